"""Put shardweave's inner loop in the place of torch's, everywhere torch binds it by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..planner import NVLINK_NODE, Topology
from .costs import price_on, priced_on
from .lowering import Reduction
from .redistribution import (
    How,
    default,
    how_asked,
    redistribute_local_tensor,
    run_by_default,
    stock_redistribute_local_tensor,
)

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


def install(*, costs: bool = False, topology: Topology | None = None, reduction: Reduction = "ordered") -> None:
    """From now on `DTensor.redistribute`, implicit redistributions and their backward run on shardweave.

    In this process: every rank must install alike, at the same point of the program. Doing it twice is doing it once;
    the last call's arguments count.

    Args:
        costs: DTensor also chooses between the sharding strategies of an op by shardweave's prices: torch's own
            `redistribute_cost` answers with microseconds on `topology`, with 0 where nothing has to be communicated,
            and with torch's number where shardweave has none (counted in `stats().delegations` under "price: ").
        topology: what the ranks are linked by: programs are planned for it, and `costs` are prices on it. None: bytes
            alone decide, and prices are those of `NVLINK_NODE`, on which all ranks share one node.
        reduction: "ordered": values are reduced in ascending order of ranks, 16-bit floats in float32, so that replicas
            are bitwise equal; "fast": where the ranks exchange through torch.distributed, its backend reduces as it
            likes.

    Raises:
        ArgumentError: `topology` or `reduction` is none.
    """
    how = how_asked(None, topology, reduction)._replace(topology=topology)
    _bind_everywhere(redistribute_local_tensor)
    run_by_default(how)
    price_on((topology or NVLINK_NODE) if costs else None)


def uninstall() -> None:
    """Give torch its own inner loop and its own prices back."""
    _bind_everywhere(stock_redistribute_local_tensor)
    run_by_default(How())
    price_on(None)


@contextmanager
def installed(
    *, costs: bool = False, topology: Topology | None = None, reduction: Reduction = "ordered"
) -> Iterator[None]:
    """`install(...)` inside the block; afterwards as it was before."""
    before, how_before, prices_before = is_installed(), default(), priced_on()
    install(costs=costs, topology=topology, reduction=reduction)
    try:
        yield
    finally:
        _bind_everywhere(redistribute_local_tensor if before else stock_redistribute_local_tensor)
        run_by_default(how_before)
        price_on(prices_before)
