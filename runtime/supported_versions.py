"""The versions of torch and triton that shardweave is tested with."""

from __future__ import annotations

from importlib import import_module

# The version ranges of pyproject.toml: [first, end).
SUPPORTED = {"torch": ((2, 11), (2, 16)), "triton": ((3, 6), (3, 10))}


def requirement(name: str) -> str:
    """A requirement in pip's syntax: torch>=2.11,<2.16."""
    least, below = (".".join(map(str, numbers)) for numbers in SUPPORTED[name])
    return f"{name}>={least},<{below}"


def installed_version(name: str) -> str:
    """The version of the module: torch for AMD GPUs installs triton under another package name."""
    return str(import_module(name).__version__)


def is_supported(name: str) -> bool:
    """Whether the installed version of "torch" or "triton" is in the tested range."""
    numbers = tuple(int(part) for part in installed_version(name).split("+")[0].split(".")[:2] if part.isdecimal())
    least, below = SUPPORTED[name]
    return least <= numbers < below
