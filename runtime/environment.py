"""The environment variables that the runtime reads, validated."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError

_MAX_TIMEOUT = 366 * 86400.0
_MAX_RECORDS = 1_000_000
_TORCH_FILES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_SEGMENT_KINDS = ("anonymous", "named")


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


def requested_poison() -> bool:
    """SHARDWEAVE_POISON_ROWS: whether rows that would stay uninitialised are filled with NaN.

    Raises:
        ArgumentError: neither 0 nor 1.
    """
    text = os.environ.get("SHARDWEAVE_POISON_ROWS") or "0"
    if text not in ("0", "1"):
        raise ArgumentError(f"SHARDWEAVE_POISON_ROWS: {text!r}; allowed: 0, 1")
    return text == "1"


def requested_flight_records() -> int:
    """SHARDWEAVE_FR_BUFFER_SIZE: the number of recent calls that the flight recorder keeps; 0, also where it is not
    set: there is no flight recorder.

    Raises:
        ArgumentError: not a whole number, or too large.
    """
    text = os.environ.get("SHARDWEAVE_FR_BUFFER_SIZE") or "0"
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) <= _MAX_RECORDS):
        raise ArgumentError(
            f"SHARDWEAVE_FR_BUFFER_SIZE: {text!r}; allowed: a whole number of calls, at most {_MAX_RECORDS}"
        )
    return int(text)


def flight_record_folder() -> Path:
    """The folder of flight records: `shardweave` in the folder where torch's flight recorder has its files, by
    TORCH_FR_DUMP_TEMP_FILE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE or torch's default.

    It is a folder of its own because torch's analysis reads all files of a folder, one for each rank.
    """
    prefix = next(filter(None, map(os.environ.get, _TORCH_FILES)), None)
    if prefix is not None:
        return Path(prefix).absolute().parent / "shardweave"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch" / "shardweave"
