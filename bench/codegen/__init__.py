"""Kernels compiled ahead of time, with every set of constants that programs launch."""
