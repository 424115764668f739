"""What shardweave is measured against: stock torch and other libraries."""
