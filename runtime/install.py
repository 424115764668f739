"""Put shardweave's inner loop in the place of torch's, everywhere torch binds it by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..errors import ArgumentError
from ..planner import NVLINK_NODE, Topology
from .costs import price_on, priced_on
from .redistribution import plan_for, planned_for, redistribute_local_tensor, stock_redistribute_local_tensor

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


def install(*, costs: bool = False, topology: Topology | None = None) -> None:
    """From now on `DTensor.redistribute`, implicit redistributions and their backward run on shardweave.

    In this process: every rank must install alike, at the same point of the program. Doing it twice is doing it once;
    the last call's `costs` and `topology` count.

    Args:
        costs: DTensor also chooses between the sharding strategies of an op by shardweave's prices: torch's own
            `redistribute_cost` answers with microseconds on `topology`, with 0 where nothing has to be communicated,
            and with torch's number where shardweave has none (counted in `stats().delegations` under "price: ").
        topology: what the ranks are linked by: programs are planned for it, and `costs` are prices on it. None: bytes
            alone decide, and prices are those of `NVLINK_NODE`, on which all ranks share one node.

    Raises:
        ArgumentError: `topology` is none.
    """
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology: {topology!r}; allowed: a Topology, or None")
    _bind_everywhere(redistribute_local_tensor)
    plan_for(topology)
    price_on((topology or NVLINK_NODE) if costs else None)


def uninstall() -> None:
    """Give torch its own inner loop and its own prices back."""
    _bind_everywhere(stock_redistribute_local_tensor)
    plan_for(None)
    price_on(None)


@contextmanager
def installed(*, costs: bool = False, topology: Topology | None = None) -> Iterator[None]:
    """`install(...)` inside the block; afterwards as it was before."""
    before, planned_before, prices_before = is_installed(), planned_for(), priced_on()
    install(costs=costs, topology=topology)
    try:
        yield
    finally:
        if before:
            install(costs=prices_before is not None, topology=planned_before)
        else:
            uninstall()
            plan_for(planned_before)
