"""Put shardweave's inner loop in the place of torch's, everywhere torch binds it by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .redistribution import redistribute_local_tensor, stock_redistribute_local_tensor

_SEAMS = (
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor.experimental._tp_transform",
)
_NAME = "redistribute_local_tensor"


def _bind_everywhere(function: Any) -> None:
    for seam in _SEAMS:
        module = import_module(seam)
        if hasattr(module, _NAME):
            setattr(module, _NAME, function)


def is_installed() -> bool:
    return getattr(import_module(_SEAMS[0]), _NAME) is redistribute_local_tensor


def install() -> None:
    """From now on `DTensor.redistribute`, implicit redistributions and their backward run on shardweave.

    In this process: every rank must install at the same point of the program. Doing it twice is doing it once.
    """
    _bind_everywhere(redistribute_local_tensor)


def uninstall() -> None:
    """Give torch its own inner loop back."""
    _bind_everywhere(stock_redistribute_local_tensor)


@contextmanager
def installed() -> Iterator[None]:
    """`install()` inside the block; afterwards as it was before."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        install() if before else uninstall()
