"""Recording: the redistributions of a running program, written as traces."""
