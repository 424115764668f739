"""`install`: put shardweave's replacements in place of torch's functions, in every module that binds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh

from ..planner import NVLINK_NODE, Topology, TopologyName
from .dtensor import observer, redistribute_options
from .dtensor.autograd import RedistributeReplacement
from .dtensor.bindings import Bindings
from .dtensor.drop_in import redistribute_local_tensor
from .dtensor.redistribute_options import RedistributeOptions, install_options, set_default
from .dtensor.sharding_costs import cache_clearer, set_cost_topology
from .executor.choose_algorithm import Reduction
from .integrations.spmd_types.collectives import bind_spmd_types
from .statistics import log_level
from .supported_versions import SUPPORTED, installed_version, is_supported, requirement
from .traced.cache_key import key_caches_by
from .transports.rendezvous.peer_reports import settings
from .transports.select import publish_settings

_TENSOR = "torch.distributed.tensor"
_LEFT_WITHOUT = {
    (f"{_TENSOR}._redistribute", "redistribute_local_tensor"): "redistributions in backward passes of torch's own",
    (f"{_TENSOR}._dispatch", "redistribute_local_tensor"): "implicit redistributions",
    (f"{_TENSOR}._api", "redistribute_local_tensor"): "the backward of DTensor.from_local",
    (f"{_TENSOR}.experimental._tp_transform", "redistribute_local_tensor"): "exported programs",
    (f"{_TENSOR}._redistribute", "Redistribute"): "redistributions by torch's autograd function",
    (f"{_TENSOR}._api", "Redistribute"): "DTensor.redistribute and DTensor.full_tensor",
}
"""The modules of torch and the names in them that are replaced, with what is left to torch where torch has another
name."""
_logger = logging.getLogger(__name__)


def _bound(module: str, name: str) -> Any:
    """What a module of torch binds to a name; None if there is no such module or name."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


_originals = {(module, name): found for module, name in _LEFT_WITHOUT if (found := _bound(module, name)) is not None}


def _copy(function: FunctionType) -> FunctionType:
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_REPLACEMENTS: dict[str, Any] = {
    # Another object than the public `redistribute_local_tensor`, which code that has imported it keeps.
    "redistribute_local_tensor": _copy(cast(FunctionType, redistribute_local_tensor)),
    "Redistribute": RedistributeReplacement,
}


def _versions() -> dict[str, tuple[Any, ...]]:
    """torch's object of each name, and what may take its place."""
    versions: dict[str, tuple[Any, ...]] = {}
    for (_, name), original in _originals.items():
        observed = (observer.observed(original),) if name == "redistribute_local_tensor" else ()
        versions.setdefault(name, (original, _REPLACEMENTS[name], *observed))
    return versions


_bindings = Bindings(*_versions().values())


def bind_replacements(installed: bool) -> None:
    """Bind shardweave's functions, or torch's own, in every module that binds them. If there is an observer, torch's
    functions notify it as well."""
    wanted: dict[str, Any] = {}
    for (module, name), original in _originals.items():
        function = original
        if installed:
            function = _REPLACEMENTS[name]
        elif observer.current is not None and name == "redistribute_local_tensor":
            function = observer.observed(original)
        setattr(import_module(module), name, function)
        wanted.setdefault(name, function)
    _bindings.bind(*wanted.values())


def is_installed() -> bool:
    """Whether DTensor redistributions run on shardweave in this process."""
    return all(getattr(import_module(module), name) is _REPLACEMENTS[name] for module, name in _originals)


def install(
    *,
    costs: bool = False,
    topology: Topology | TopologyName | None = None,
    reduction: Reduction = "ordered",
    only: DeviceMesh | Collection[DeviceMesh] | None = None,
    spmd_types: bool = False,
    traced: bool = True,
) -> None:
    """Run `DTensor.redistribute`, implicit redistributions and their backward on shardweave in this process.

    Every rank must call it with the same arguments, at the same point of the program. A second call replaces the
    arguments of the first.

    torch's functions are replaced in every module that is loaded, also under other names and where a module imported
    them before this call. Modules that are loaded later import shardweave's. References in other places are left alone:
    class attributes, default arguments, closures, `functools.partial`.

    Args:
        costs: DTensor's sharding propagation chooses between the strategies of an op by shardweave's costs: torch's
            `redistribute_cost` returns microseconds on `topology`; 0 where nothing is communicated; and torch's own
            number where shardweave has none (counted in `stats().delegations` under "price: ").
        topology: the links between ranks that programs are planned for and that `costs` are computed on, or a name as
            for `plan`. None: plans are for the topology that ranks on several machines find, and minimise bytes on one
            machine; costs are those of `NVLINK_NODE`, on which all ranks share one node.
        reduction: "ordered": values are reduced in ascending order of ranks, 16-bit floats accumulate in float32, and
            replicas are bitwise equal. "fast": where ranks exchange through torch.distributed, its backend computes
            sums and products in any order; max and min, which may lose NaN there, are reduced as in "ordered".
        only: the meshes whose tensors shardweave redistributes; those on other meshes are left to torch and counted.
            None: all meshes.
        spmd_types: also run the collectives of the package spmd_types on shardweave, in forward and backward: its
            `redistribute`, `all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all`. Those left to it are counted
            in `stats().delegations`. `only` then means the axes of the meshes.
        traced: what torch.compile, `make_fx` and fake tensors trace becomes torch's functional collectives by
            shardweave's plans. False: tracing is left to torch.

    Raises:
        ArgumentError: an argument of the wrong type, or a value that is not allowed, also of an environment variable;
            `spmd_types` without the package. Then the previous state stays.
    """
    _apply(install_options(topology, reduction, only, costs, spmd_types, traced))


def uninstall() -> None:
    """Restore torch's redistribution and costs, and the collectives of spmd_types, in every module that is loaded."""
    _apply(None)


@contextmanager
def installed(
    *,
    costs: bool = False,
    topology: Topology | TopologyName | None = None,
    reduction: Reduction = "ordered",
    only: DeviceMesh | Collection[DeviceMesh] | None = None,
    spmd_types: bool = False,
    traced: bool = True,
) -> Iterator[None]:
    """A context manager that calls `install` with the same arguments, and restores the previous state on exit.

    Args:
        costs, topology, reduction, only, spmd_types, traced: as for `install`.

    Raises:
        ArgumentError: as for `install`.
    """
    before = redistribute_options.default if is_installed() else None
    install(
        costs=costs,
        topology=topology,
        reduction=reduction,
        only=only,
        spmd_types=spmd_types,
        traced=traced,
    )
    try:
        yield
    finally:
        _apply(before)


def _apply(options: RedistributeOptions | None) -> None:
    """Install with these options, or uninstall. Installing changes nothing if it raises."""
    if options is not None:
        _warn_of_versions()
        publish_settings()  # makes the transports, which raises for variables with values that are not allowed
        if options.costs:
            cache_clearer()  # raises where torch lacks it
    was_installed = is_installed()
    bind_spmd_types(options is not None and options.spmd_types)
    bind_replacements(options is not None)
    default = options or RedistributeOptions()
    set_default(default)
    key_caches_by(None if options is None else repr(options._replace(only=None)))
    set_cost_topology((default.topology or NVLINK_NODE) if default.costs else None)
    publish_settings()
    level = log_level(logging.INFO)
    if options is not None:
        versions = ", ".join(f"{name} {installed_version(name)}" for name in SUPPORTED)
        arguments = ", ".join(f"{name}={value}" for name, value in options._asdict().items() if name != "transport")
        _logger.log(level, "installed: DTensor redistributions run on shardweave (%s; %s)", arguments, versions)
    elif was_installed:
        _logger.log(level, "uninstalled: DTensor redistributions run on torch")


@cache
def _warn_of_versions() -> None:
    """Warn, once and on rank 0, if torch or triton is a version that shardweave is not tested with, and of each name
    that torch lacks."""
    level = log_level(logging.WARNING)
    for name in SUPPORTED:
        if not is_supported(name):
            _logger.log(
                level,
                "%s %s is not tested with shardweave, which requires %s; install() goes on with the names that fit",
                name, installed_version(name), requirement(name),
            )  # fmt: skip
    for (module, name), left in _LEFT_WITHOUT.items():
        if (module, name) not in _originals:
            _logger.log(
                level, "torch %s has no %s.%s; left to torch: %s", installed_version("torch"), module, name, left
            )


def _default_option(name: str) -> Callable[[], str]:
    return lambda: str(getattr(redistribute_options.default, name))


# Ranks compare these when they first exchange anything.
settings |= {
    "install()": lambda: "called" if is_installed() else "not called",
    # Each rank passes its own slices of meshes, so these cannot be compared.
    "install(only=)": lambda: "given" if redistribute_options.default.only else "not given",
    "install(topology=)": _default_option("topology"),
    "install(reduction=)": _default_option("reduction"),
    "install(costs=)": lambda: "on" if redistribute_options.default.costs else "off",
    "install(traced=)": lambda: "on" if redistribute_options.default.traced else "off",
    "install(spmd_types=)": lambda: "on" if redistribute_options.default.spmd_types else "off",
}
