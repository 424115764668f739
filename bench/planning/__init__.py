"""Plans measured without communication: their bytes, their prices at scale, how long planning takes."""
