"""The command line: `python -m shardweave COMMAND`; each command is a module of `bench.commands`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardweave.bench.commands import bench, calibrate, compare, demo, dispatch, doctor, plan, record, replay, report
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardweave", description="Redistribute tensors over a device mesh, by plan.")
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
