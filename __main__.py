"""The command line: `python -m shardweave COMMAND`. `cli.commands` declares the arguments of each command."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import shardweave
from shardweave.cli.commands import bench, calibrate, demo, dispatch, doctor, plan, record, replay
from shardweave.cli.output_streams import lost_output, open_streams, spelled_in_ascii
from shardweave.errors import ShardweaveError

_COMMANDS = {
    "plan": plan,
    "dispatch": dispatch,
    "demo": demo,
    "calibrate": calibrate,
    "record": record,
    "replay": replay,
    "bench": bench,
    "doctor": doctor,
}


_MAX_ERROR = 1000  # characters
_DEPENDENCIES = ("torch", "triton", "numpy")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error, shortened in the middle: arguments may have any length."""
        half = _MAX_ERROR // 2
        super().error(message if len(message) <= _MAX_ERROR else f"{message[:half]}…{message[-half:]}")


def _versions() -> str:
    """The versions of shardweave, as imported, and of its dependencies."""
    versions = [f"shardweave {shardweave.__version__}"]
    for name in _DEPENDENCIES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="shardweave", description="Plan, measure and compare redistributions of tensors over device meshes."
    )
    parser.add_argument(
        "--version", action="version", version=_versions(), help="print the versions of shardweave and its dependencies"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        description = f"{command.HELP[0].upper()}{command.HELP[1:]}."
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=description))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 2 for an invalid argument or output that cannot be written, 1 for a
    wrong result, a problem or a failed rank, 130 after Ctrl-C.

    Where a reader such as `head` closes the pipe before the output is written, every command ends quietly with 141, the
    status that a shell gives to a process ended by SIGPIPE. The signal itself stays ignored, since ranks have pipes
    too. Output that the pipe took whole is no failure.
    """
    without_output = open_streams()
    try:
        with spelled_in_ascii():
            try:
                arguments = _parser().parse_args(argv)
            except SystemExit:  # after --help or --version
                sys.stdout.flush()
                raise
            if arguments.command != "record":
                if without_output:
                    print("error: standard output is closed; allowed: a file or a pipe, or /dev/null", file=sys.stderr)
                    return 2
                return _run(arguments)
        return _run(arguments)  # a script prints as it would without `record`
    except OSError:
        lost = lost_output()
        if lost is None:
            raise
        if isinstance(lost, BrokenPipeError):
            return 141
        print(f"error: standard output: {lost.strerror}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    try:
        status: int = _COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return status
    except ShardweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if arguments.command == "record":
            raise  # the script's own
        return 130


if __name__ == "__main__":
    sys.exit(main())
