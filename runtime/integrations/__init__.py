"""Clients of other libraries: each adapts one library's interface to the rest of the runtime."""
