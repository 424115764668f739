"""spmd_types: redistribution by its types, and its collectives on shardweave."""
