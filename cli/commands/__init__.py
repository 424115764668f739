"""The commands of `python -m shardweave`, one a module: `HELP`, `add_arguments` and `run`."""
