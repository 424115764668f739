"""Put what `drop_in` has in the place of torch's own, everywhere torch binds it by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module

from torch.distributed.device_mesh import DeviceMesh

from ...planner import NVLINK_NODE, Topology
from ..executor.lower import Reduction
from ..transports.rendezvous import settings
from ..transports.select import publish_settings
from . import drop_in
from .drop_in import Policy, carry_out_under, policy, policy_asked
from .local import RedistributeOptions, default, requested_options, set_default_options
from .observer import observed, observer
from .sharding_costs import price_on, priced_on


def _said(read: Callable[[], object]) -> Callable[[], str]:
    return lambda: str(read())


# What ranks compare when they first meet.
settings |= {
    "install()": lambda: "called" if is_installed() else "not called",
    "install(min_bytes=)": _said(lambda: policy().min_bytes),
    # Each rank gives its own slices of meshes.
    "install(only=)": lambda: "given" if policy().only else "not given",
    "install(topology=)": _said(lambda: default().topology),
    "install(reduction=)": _said(lambda: default().reduction),
    "install(costs=)": _said(lambda: "on" if priced_on() is not None else "off"),
}


_SEAMS = {
    "redistribute_local_tensor": (
        "torch.distributed.tensor._redistribute",
        "torch.distributed.tensor._dispatch",
        "torch.distributed.tensor._api",
        "torch.distributed.tensor.experimental._tp_transform",
    ),
    "Redistribute": ("torch.distributed.tensor._redistribute", "torch.distributed.tensor._api"),
}
"""Where torch binds what is replaced, by its name there and in `drop_in`."""
_stock = {
    (seam, name): getattr(import_module(seam), name)
    for name, seams in _SEAMS.items()
    for seam in seams
    if hasattr(import_module(seam), name)
}


def bind_seams(ours: bool) -> None:
    """Bind shardweave's functions, or torch's own, wherever torch binds them; torch's tell the observer, if any."""
    for (seam, name), stock in _stock.items():
        told = observer() is not None and name == "redistribute_local_tensor"  # ours tells by itself
        setattr(import_module(seam), name, getattr(drop_in, name) if ours else observed(stock) if told else stock)


def is_installed() -> bool:
    """Whether DTensor's redistributions run on shardweave in this process."""
    return all(getattr(import_module(seam), name) is getattr(drop_in, name) for seam, name in _stock)


def install(
    *,
    costs: bool = False,
    topology: Topology | None = None,
    reduction: Reduction = "ordered",
    min_bytes: int = 0,
    only: DeviceMesh | Collection[DeviceMesh] | None = None,
) -> None:
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
            are bitwise equal; "fast": where the ranks exchange through torch.distributed, its backend adds up and
            multiplies as it likes (max and min, of which it may lose NaN, go the ordered way).
        min_bytes: tensors of fewer bytes, over all ranks, are left to torch and counted.
        only: the meshes whose tensors shardweave carries over; those of others are left to torch and counted. None: of
            all meshes.

    Raises:
        ArgumentError: an argument is none of these.
    """
    options = requested_options(None, topology, reduction)._replace(topology=topology, reduction=reduction)
    carried_out = policy_asked(min_bytes, only)
    bind_seams(True)
    set_default_options(options)
    carry_out_under(carried_out)
    price_on((topology or NVLINK_NODE) if costs else None)
    publish_settings()


def uninstall() -> None:
    """Give torch its own redistribution and its own prices back."""
    bind_seams(False)
    set_default_options(RedistributeOptions())
    carry_out_under(Policy())
    price_on(None)
    publish_settings()


@contextmanager
def installed(
    *,
    costs: bool = False,
    topology: Topology | None = None,
    reduction: Reduction = "ordered",
    min_bytes: int = 0,
    only: DeviceMesh | Collection[DeviceMesh] | None = None,
) -> Iterator[None]:
    """`install(...)` inside the block; afterwards as it was before.

    Args:
        costs, topology, reduction, min_bytes, only: as for `install`.

    Raises:
        ArgumentError: as for `install`.
    """
    before, how_before, policy_before, prices_before = is_installed(), default(), policy(), priced_on()
    install(costs=costs, topology=topology, reduction=reduction, min_bytes=min_bytes, only=only)
    try:
        yield
    finally:
        bind_seams(before)
        set_default_options(how_before)
        carry_out_under(policy_before)
        price_on(prices_before)
        publish_settings()
