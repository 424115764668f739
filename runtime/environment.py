"""The variables of the environment that the runtime reads, checked."""

from __future__ import annotations

import os
import re

from ..errors import ArgumentError

_LONGEST_TIMEOUT = 366 * 86400.0
_SEGMENTS = ("anonymous", "named")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def transport_asked_for() -> str | None:
    """The name that SHARDWEAVE_TRANSPORT gives, not checked; None where it is not set."""
    return os.environ.get("SHARDWEAVE_TRANSPORT") or None


def timeout_asked_for() -> float | None:
    """Seconds that SHARDWEAVE_TIMEOUT gives any wait for another rank; None where it is not set.

    Raises:
        ArgumentError: it is no positive number of seconds.
    """
    text = os.environ.get("SHARDWEAVE_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ArgumentError(f"SHARDWEAVE_TIMEOUT: {text!r}; allowed: a number of seconds above 0, a year at most")
    return seconds


def pretended_node_size() -> int | None:
    """Consecutive ranks of which SHARDWEAVE_NODE_SIZE says that they alone share memory; None where it is not set.

    Raises:
        ArgumentError: it is no whole number above 0.
    """
    text = os.environ.get("SHARDWEAVE_NODE_SIZE")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ArgumentError(f"SHARDWEAVE_NODE_SIZE: {text!r}; allowed: a whole number of ranks above 0")
    return int(text)


def segments_asked_for() -> str | None:
    """The kind of shared memory that SHARDWEAVE_SEGMENTS names, "anonymous" or "named"; None where it is not set.

    Raises:
        ArgumentError: SHARDWEAVE_SEGMENTS is neither "anonymous" nor "named".
    """
    asked = os.environ.get("SHARDWEAVE_SEGMENTS") or None
    if asked is not None and asked not in _SEGMENTS:
        raise ArgumentError(f"SHARDWEAVE_SEGMENTS: {asked!r}; allowed: {', '.join(_SEGMENTS)}")
    return asked


def pool_limit_asked_for() -> int | None:
    """Bytes that SHARDWEAVE_POOL_LIMIT says; None where it is not set.

    Raises:
        ArgumentError: it is no number of bytes.
    """
    text = os.environ.get("SHARDWEAVE_POOL_LIMIT")
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    if match is None:
        raise ArgumentError(f"SHARDWEAVE_POOL_LIMIT: {text!r}; allowed: a whole number of bytes, or one with K, M or G")
    return int(match[1]) << _UNITS[match[2]]


def poison_asked_for() -> bool:
    """Whether SHARDWEAVE_POISON_ROWS asks for NaN in rows that would not be initialised.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    text = os.environ.get("SHARDWEAVE_POISON_ROWS")
    if text and text not in ("0", "1"):
        raise ArgumentError(f"SHARDWEAVE_POISON_ROWS: {text!r}; allowed: 0, 1")
    return text == "1"
