"""Redistribution of DTensors: the public functions, and the replacements of torch's functions."""
