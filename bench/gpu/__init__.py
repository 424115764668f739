"""Measurements of kernels and whole programs on a GPU."""
