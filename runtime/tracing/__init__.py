"""Traces: what a program redistributes, recorded while it runs."""
