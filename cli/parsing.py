"""Argument types for several commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import ArgumentError, shown
from ..planner import ITEMSIZE, TOPOLOGIES, Topology
from ..runtime.text_files import read_text

_SHORT_DTYPES = {
    **{"bf16": "bfloat16", "half": "float16", "float": "float32", "double": "float64", "cfloat": "complex64"},
    **{"chalf": "complex32"},
    **{"cdouble": "complex128", "short": "int16", "int": "int32", "long": "int64", "b8": "bool", "byte": "uint8"},
    **{f"{letters}{bits}": f"float{bits}" for letters in ("f", "fp") for bits in (16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)} | {f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (32, 64, 128)},
    **{"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"},
    **{f"{letters}_{kind}": f"float8_{kind}" for letters in ("fp8", "f8") for kind in ("e4m3fn", "e5m2")},
    **{f"f8{name[7:]}": name for name in ITEMSIZE if name.startswith("float8_")},
}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def dtype(text: str) -> str:
    """Argument type: the name of a dtype. Short names and other spellings become the name that torch prints."""
    name = text.removeprefix("torch.")
    return _SHORT_DTYPES.get(name.lower(), name)


def layout_text(text: str) -> str:
    """Argument type: the text form of a layout. Words may begin with a small letter, as in "s0 r"."""
    return re.sub(r"(?<!\S)[rsp]", lambda letter: letter[0].upper(), text)


def whole_number(text: str) -> int:
    """Argument type: a whole number of at most 64 bits."""
    digits = text.lstrip("+-")
    # int() refuses more than 4,300 digits.
    if not (digits.isdecimal() and len(digits) <= 19 and len(text) - len(digits) <= 1):
        raise argparse.ArgumentTypeError(f"{shown(text)}: not a whole number below 2**63")
    return int(text)


def number_of_bytes(text: str) -> int:
    """Argument type: a number of bytes, such as "4096", "64K" or "1MiB"."""
    match = re.fullmatch(r"([0-9]{1,19})(?:([KMGT])(?:iB)?)?", text)
    nbytes = int(match[1]) << _UNITS[match[2] or ""] if match else 1 << 63
    if nbytes >= 1 << 63:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: not a whole number below 2**63, of bytes or with a unit: K or KiB (1024 bytes), M or MiB, "
            "G or GiB, T or TiB"
        )
    return nbytes


def number_of(what: str) -> Callable[[str], int]:
    """Argument type: a number of `what`, 1 or more."""

    def number(text: str) -> int:
        if not text.isdecimal() or len(text) > 19 or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{shown(text)}: not a number of {what}, 1 or more")
        return int(text)

    return number


def file_of(ending: str) -> Callable[[str], Path]:
    """Argument type: a file name with this ending."""

    def file(text: str) -> Path:
        if Path(text).suffix.lower() != ending:
            raise argparse.ArgumentTypeError(f"{shown(text)}: not a name that ends with {ending}")
        return Path(text)

    return file


def topology(name: str | None) -> Topology | None:
    """The topology of the argument `--topology`.

    Raises:
        ArgumentError: neither the name nor the file of a topology.
    """
    if name is None:
        return None
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]
    try:
        text = read_text(Path(name))
    except (OSError, ValueError) as error:  # ValueError: a null in the name, or a binary file
        allowed = ", ".join(TOPOLOGIES)
        raise ArgumentError(
            f"--topology: {shown(name)} cannot be read: {shown_error(error)}; allowed: {allowed}, or a JSON file"
        ) from None
    try:
        return Topology.from_json(text)
    except ArgumentError as error:
        raise ArgumentError(f"--topology: {shown(name)}: {error}") from None


def shown_error(error: Exception) -> str:
    """The text of an exception without the name of the file, which may be long."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
