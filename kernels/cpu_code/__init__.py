"""Loops over rows in memory of the CPU, compiled by the LLVM inside Triton."""
