"""Triton kernels that count, place, move and add rows of tokens."""
