"""The environment variables that the runtime reads, validated."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch

from ..errors import ArgumentError
from ..kernels import processors_of

_MAX_TIMEOUT = 366 * 86400.0
_MAX_RECORDS = 1_000_000
_TORCH_FILES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_SEGMENT_KINDS = ("anonymous", "named")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
BYTES = "a whole number below 2**63, of bytes or with a unit: K or KiB (1024 bytes), M or MiB, G or GiB, T or TiB"
_LOGGERS = {
    "all": ("",),
    "dispatch": (".runtime.moe",),
    "dtensor": (".runtime.dtensor", ".runtime.install", ".runtime.statistics"),
    "executor": (".runtime.executor",),
    "flight_recorder": (".runtime.flight_recorder",),
    "transports": (".runtime.transports",),
}
"""The names that SHARDWEAVE_LOGS takes, and the loggers below `shardweave` that each of them sets."""
_LOG_LEVELS = {"": logging.INFO, "+": logging.DEBUG, "-": logging.ERROR}


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


def requested_sms() -> int | None:
    """SHARDWEAVE_NUM_SMS: the `num_sms` of everything that is not given one; None where it is not set.

    Raises:
        ArgumentError: not a whole number above 0.
    """
    text = os.environ.get("SHARDWEAVE_NUM_SMS")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ArgumentError(f"SHARDWEAVE_NUM_SMS: {text!r}; allowed: a whole number of SMs above 0")
    return int(text)


def num_sms(device: torch.device, given: int | None = None) -> int | None:
    """The most SMs of a launch that communicates: the argument `num_sms`, or SHARDWEAVE_NUM_SMS; None: neither is set.

    Raises:
        ArgumentError: SHARDWEAVE_NUM_SMS is not a whole number above 0, or a GPU has fewer SMs.
    """
    name, number = ("num_sms", given) if given is not None else ("SHARDWEAVE_NUM_SMS", requested_sms())
    if number is not None and device.type == "cuda" and number > (most := processors_of(device)):
        raise ArgumentError(f"{name}: {number}; allowed: 1 to {most}, the SMs of {device}")
    return number


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
    limit = bytes_of(text)
    if limit is None:
        raise ArgumentError(f"SHARDWEAVE_POOL_LIMIT: {text!r}; allowed: {BYTES}")
    return limit


def bytes_of(text: str) -> int | None:
    """The bytes that a text such as "4096", "64K" or "1MiB" says; None: not such a number."""
    match = re.fullmatch(r"([0-9]{1,19})(?:([KMGT])(?:iB)?)?", text)
    nbytes = int(match[1]) << _UNITS[match[2] or ""] if match else 1 << 63
    return nbytes if nbytes < 1 << 63 else None


def requested_poison() -> bool:
    """SHARDWEAVE_POISON_ROWS: whether rows that would stay uninitialised are filled with NaN.

    Raises:
        ArgumentError: neither 0 nor 1.
    """
    return _switch("SHARDWEAVE_POISON_ROWS")


def requested_logs() -> dict[str, int]:
    """SHARDWEAVE_LOGS: the level of each logger that it names; empty where it is not set.

    As in TORCH_LOGS, names are separated by commas; `name` is level INFO, `+name` DEBUG and `-name` ERROR.

    Raises:
        ArgumentError: a name that is not known.
    """
    levels: dict[str, int] = {}
    for item in (os.environ.get("SHARDWEAVE_LOGS") or "").split(","):
        if not item.strip():
            continue
        sign, name = re.fullmatch(r"([+-]?)(.*)", item.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        if name not in _LOGGERS:
            raise ArgumentError(
                f"SHARDWEAVE_LOGS: {item.strip()!r}; allowed: {', '.join(_LOGGERS)}, each also after + (DEBUG) or - "
                "(ERROR), separated by commas"
            )
        levels |= dict.fromkeys((f"shardweave{logger}" for logger in _LOGGERS[name]), _LOG_LEVELS[sign])
    return levels


def requested_nvtx() -> bool:
    """SHARDWEAVE_NVTX: whether calls are NVTX ranges as well.

    Raises:
        ArgumentError: neither 0 nor 1.
    """
    return _switch("SHARDWEAVE_NVTX")


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


def _switch(name: str, default: bool = False) -> bool:
    text = os.environ.get(name) or str(int(default))
    if text not in ("0", "1"):
        raise ArgumentError(f"{name}: {text!r}; allowed: 0, 1")
    return text == "1"
