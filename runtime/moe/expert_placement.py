"""The expert map of parameters that DTensor shards, whose rule differs from TokenDispatcher's."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError
from ..convert_specs import unordered_dims


def experts_of_shards(num_experts: int, mesh: DeviceMesh) -> list[list[int]] | None:
    """Return the `expert_map` of parameters that are `Shard(0)` over a 1-D mesh; None: the default.

    DTensor shards by torch.chunk: ten experts on four ranks are 3, 3, 3 and 1, and the last ranks may have none. Like
    the dispatcher, `distribute_tensor` uses the order of the process group.

    Raises:
        UnsupportedError: uneven shards on a mesh whose ranks do not ascend, for which torch drops rows.
    """
    ranks = mesh.size()
    if num_experts % ranks == 0:
        return None
    if unordered_dims(mesh):
        raise UnsupportedError(
            f"{num_experts} experts on ranks {mesh.mesh.tolist()}, which do not ascend: torch drops rows of uneven "
            f"shards there; allowed: ascending ranks, or a multiple of {ranks} experts"
        )
    each = -(-num_experts // ranks)
    return [list(range(min(r * each, num_experts), min((r + 1) * each, num_experts))) for r in range(ranks)]
