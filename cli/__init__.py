"""The commands of `python -m shardweave`, and what they need and no benchmark does."""
