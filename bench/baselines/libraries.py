"""The versions of the libraries that are measured beside shardweave if they are installed."""

from __future__ import annotations

INSTALL = {"torchao": "pip install torchao==0.18.0", "torchtitan": "pip install torchtitan==0.3.0"}


def why_absent(contender: str, error: Exception) -> str:
    """The reason why a contender could not be made; for a library that is not installed, how to install it."""
    if isinstance(error, ImportError) and contender in INSTALL:
        return f"not installed ({error}); to measure it too: {INSTALL[contender]}"
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
