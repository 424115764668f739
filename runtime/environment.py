"""The environment variables that the runtime reads, validated."""

from __future__ import annotations

import os
import re

from ..errors import ArgumentError

_MAX_TIMEOUT = 366 * 86400.0
_SEGMENT_KINDS = ("anonymous", "named")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def requested_transport() -> str | None:
    """The value of SHARDWEAVE_TRANSPORT, not validated; None where it is not set."""
    return os.environ.get("SHARDWEAVE_TRANSPORT") or None


def requested_timeout() -> float | None:
    """SHARDWEAVE_TIMEOUT: the limit of every wait for another rank, in seconds; None where it is not set.

    Raises:
        ArgumentError: not a positive number of seconds.
    """
    text = os.environ.get("SHARDWEAVE_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise ArgumentError(f"SHARDWEAVE_TIMEOUT: {text!r}; allowed: a number of seconds above 0, at most a year")
    return seconds


def pretended_node_size() -> int | None:
    """SHARDWEAVE_NODE_SIZE: the number of consecutive ranks that are treated as one node; None where it is not set.

    Raises:
        ArgumentError: not a whole number above 0.
    """
    text = os.environ.get("SHARDWEAVE_NODE_SIZE")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ArgumentError(f"SHARDWEAVE_NODE_SIZE: {text!r}; allowed: a whole number of ranks above 0")
    return int(text)


def requested_segments() -> str | None:
    """SHARDWEAVE_SEGMENTS: the kind of shared memory, "anonymous" or "named"; None where it is not set.

    Raises:
        ArgumentError: another value.
    """
    kind = os.environ.get("SHARDWEAVE_SEGMENTS") or None
    if kind is not None and kind not in _SEGMENT_KINDS:
        raise ArgumentError(f"SHARDWEAVE_SEGMENTS: {kind!r}; allowed: {', '.join(_SEGMENT_KINDS)}")
    return kind


def requested_pool_limit() -> int | None:
    """SHARDWEAVE_POOL_LIMIT in bytes; None where it is not set.

    Raises:
        ArgumentError: not a number of bytes.
    """
    text = os.environ.get("SHARDWEAVE_POOL_LIMIT")
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    if match is None:
        raise ArgumentError(
            f"SHARDWEAVE_POOL_LIMIT: {text!r}; allowed: a whole number of bytes, optionally followed by K, M or G"
        )
    return int(match[1]) << _UNITS[match[2]]


def requested_poison() -> bool:
    """SHARDWEAVE_POISON_ROWS: whether rows that would stay uninitialised are filled with NaN.

    Raises:
        ArgumentError: neither 0 nor 1.
    """
    text = os.environ.get("SHARDWEAVE_POISON_ROWS")
    if text and text not in ("0", "1"):
        raise ArgumentError(f"SHARDWEAVE_POISON_ROWS: {text!r}; allowed: 0, 1")
    return text == "1"
