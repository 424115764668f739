"""How ranks begin calls together, and find out why one of them does not come."""
