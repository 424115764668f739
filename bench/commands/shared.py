"""What several commands share: types of arguments, what they need, how they end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path

from ...errors import ArgumentError, UnsupportedError
from ...planner import NVLINK_INFINIBAND, NVLINK_NODE, Topology

Run = Callable[[argparse.Namespace], int]
TOPOLOGIES = {"nvlink": NVLINK_NODE, "nvlink-infiniband": NVLINK_INFINIBAND}


def number_of(what: str) -> Callable[[str], int]:
    """An argument's type: a number of `what`, 1 or more."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: a number of {what}, 1 or more, is wanted")
        return int(text)

    return number


def topology(given: str | None) -> Topology | None:
    """Of a command's `--topology`.

    Raises:
        ArgumentError: no name and no file of a topology.
    """
    if given is None:
        return None
    if given in TOPOLOGIES:
        return TOPOLOGIES[given]
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = ", ".join(TOPOLOGIES)
        raise ArgumentError(
            f"--topology: {given!r} cannot be read: {error}; allowed: {allowed}, or a JSON file"
        ) from None
    try:
        return Topology.from_json(text)
    except ArgumentError as error:
        raise ArgumentError(f"--topology: {given!r}: {error}") from None


def interruptible(run: Run) -> Run:
    """Ctrl-C ends a command that measures with the shell's own status for it, and no traceback."""

    @wraps(run)
    def quiet(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except KeyboardInterrupt:
            return 130

    return quiet


def need_rich(command: str) -> None:
    """
    Raises:
        UnsupportedError: rich is not installed.
    """
    if find_spec("rich") is None:
        raise UnsupportedError(f"{command} needs rich: pip install 'shardweave[cli]'")
