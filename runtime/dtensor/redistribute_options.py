"""The options of a redistribution: one frozen object, given per call and by `install`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError
from ...planner import Topology, topology_argument
from ..executor.choose_algorithm import Reduction, check_reduction
from ..transports.choose_transport import TransportName, check_name


class RedistributeOptions(NamedTuple):
    """How redistributions are carried out, and which ones; the same on all ranks.

    Attributes:
        transport: the name of a transport; None chooses by what the ranks share.
        topology: what programs are planned for; None minimises bytes.
        reduction: "ordered" or "fast".
        only: under `install`, tensors on other meshes are left to torch; None: all meshes.
        costs: under `install`, DTensor's sharding propagation uses shardweave's costs.
        spmd_types: under `install`, the collectives of spmd_types are carried out by shardweave.
        traced: under `install`, traced redistributions become torch's functional collectives by shardweave's plans.
    """

    transport: TransportName | None = None
    topology: Topology | None = None
    reduction: Reduction = "ordered"
    only: tuple[DeviceMesh, ...] | None = None
    costs: bool = False
    spmd_types: bool = False
    traced: bool = True


default = RedistributeOptions()
"""The options of `install`; where a call gives an option, that takes precedence."""


def set_default(options: RedistributeOptions) -> None:
    global default
    default = options


def call_options(transport: Any = None, topology: Any = None, reduction: Any = None) -> RedistributeOptions:
    """The options of one call: its arguments, and the default for those that are None.

    Raises:
        ArgumentError: an argument of the wrong type, or an unknown transport or reduction.
    """
    if transport is None and topology is None and reduction is None:
        return default
    check_name(transport)
    topology = topology_argument(topology)
    reduction = default.reduction if reduction is None else check_reduction(reduction)
    return RedistributeOptions(transport, topology or default.topology, reduction)


def install_options(
    topology: Any, reduction: Any, only: Any, costs: bool, spmd_types: bool, traced: bool
) -> RedistributeOptions:
    """The validated options of `install`.

    Raises:
        ArgumentError: an argument of the wrong type, or a value that is not allowed.
    """
    topology = topology_argument(topology)
    check_reduction(reduction)
    meshes = only
    if only is not None:
        meshes = (only,) if not isinstance(only, Collection) or isinstance(only, DeviceMesh) else tuple(only)
        if not all(isinstance(mesh, DeviceMesh) for mesh in meshes):
            raise ArgumentError(f"only: {only!r}; allowed: a DeviceMesh, several, or None")
    return RedistributeOptions(None, topology, reduction, meshes, bool(costs), bool(spmd_types), bool(traced))
