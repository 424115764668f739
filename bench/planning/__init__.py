"""Plans without communication: their bytes, and their prices at scale."""
