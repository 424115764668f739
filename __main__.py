"""The command line: `python -m shardweave COMMAND`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NoReturn

import shardweave
from shardweave.cli.output_streams import lost_output, open_streams, spelled_in_ascii
from shardweave.errors import ShardweaveError, UnsupportedError

_COMMANDS = {
    "plan": "print the steps, bytes and cost of a redistribution",
    "dispatch": "print the memory and the bytes on the wire of a token dispatcher",
    "demo": "compare shardweave with stock DTensor on redistributions of real models, on this machine",
    "calibrate": "measure the links between ranks of torchrun, or local ones; prints JSON for plan --topology",
    "record": "run a script or module and record the redistributions of its DTensors",
    "replay": "run the redistributions of a trace on torch and on shardweave, and time both",
    "bench": "benchmark shardweave against other implementations, with checked results",
    "doctor": "check software, settings and transports of this machine; report problems and fixes",
}
"""What each command does; its module in `cli` has the arguments and the work."""
_WITH_RICH = ("demo", "calibrate", "replay", "doctor")
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


def _parser(command: str | None = None) -> argparse.ArgumentParser:
    """With the arguments of one command: only its module is imported.

    Raises:
        UnsupportedError: it needs rich, which is not installed.
    """
    parser = _Parser(
        prog="shardweave", description="Plan, measure and compare redistributions of tensors over device meshes."
    )
    parser.add_argument(
        "--version", action="version", version=_versions(), help="print the versions of shardweave and its dependencies"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in _COMMANDS.items():
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == command:
            if name in _WITH_RICH and find_spec("rich") is None:
                raise UnsupportedError(f"{name} needs rich: pip install 'shardweave[cli]'")
            import_module(f"shardweave.cli.{name}").add_arguments(added)
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
            given = list(sys.argv[1:] if argv is None else argv)
            try:
                arguments = _parser(*given[:1]).parse_args(given)
            except SystemExit:  # after --help or --version
                sys.stdout.flush()
                raise
            except UnsupportedError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
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
        status: int = import_module(f"shardweave.cli.{arguments.command}").main(arguments)
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
