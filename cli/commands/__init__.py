"""The arguments of the commands of `python -m shardweave`, one module per command, and nothing else.

Each module declares `HELP`, `add_arguments` and `run`. `run` passes the parsed arguments to the module that does the
work: the one of the same name in `cli`, or `bench.harness.run` for bench. It is imported there, so that a command loads
only what it needs.
"""
