"""Plans without communication: their bytes, and their CPU time at scale."""
