"""The command line: `python -m shardweave COMMAND`; each command is a module of `cli.commands`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import shardweave
from shardweave.cli.commands import bench, calibrate, compare, demo, dispatch, doctor, plan, record, replay, report
from shardweave.errors import ShardweaveError

_COMMANDS = {
    "plan": plan,
    "dispatch": dispatch,
    "demo": demo,
    "calibrate": calibrate,
    "record": record,
    "replay": replay,
    "bench": bench,
    "compare": compare,
    "report": report,
    "doctor": doctor,
}


_LONGEST = 1000  # characters of a fault in the arguments
_OTHERS = ("torch", "triton", "numpy")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Of arguments of any length, as much as can be read."""
        half = _LONGEST // 2
        super().error(message if len(message) <= _LONGEST else f"{message[:half]}…{message[-half:]}")


def _versions() -> str:
    """Of shardweave and of what it stands on: as installed, or as imported where it is not."""
    found = []
    for name in ("shardweave", *_OTHERS):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} {shardweave.__version__ if name == 'shardweave' else 'not installed'}")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shardweave", description="Redistribute tensors over a device mesh, by plan.")
    parser.add_argument("--version", action="version", version=_versions(), help="versions of what is installed")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 2 for a bad argument, 1 for a fault that was found or ranks that were lost."""
    arguments = _parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command].run(arguments)
    except ShardweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
