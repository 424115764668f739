"""shardweave in other libraries: one module for each, which may import that library."""
