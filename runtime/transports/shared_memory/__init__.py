"""CPU ranks of one machine that write into each other's memory."""
