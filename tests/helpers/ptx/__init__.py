"""Compiled kernels without a GPU: their PTX, parsed, and executed lane by lane in the memory of this process."""
