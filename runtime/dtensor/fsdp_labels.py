"""Whether the spec that FSDP2 gives to a sharded parameter describes its data.

FSDP2 cuts the local tensors of a tensor-parallel parameter, so its own cut is the last one; but its mesh dim is the
first one of the spec. A strided shard there tells by its split factor how many shards there were before. That is enough
where they were plain. Where the parameter was strided itself, as a fused weight is, or had a shard order, the same spec
stands for other elements, and nothing in it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import UnsupportedError
from ...planner import held_spans, parts_of
from ..convert_specs import layout_of_spec

Cuts = tuple[int | tuple[int, int], ...]
"""As in a planner's layout: mesh dims, or (mesh dim, split factor), the first cut first."""


def why_permuted(parameter: Any) -> str | None:
    """Why what follows the spec of one of FSDP2's parameters, an `FSDPParam`, permutes its data; None if it does not.

    The same on all ranks. None also for specs without a layout, which shardweave does not follow.
    """
    spec: DTensorSpec = parameter._sharding_spec
    # `_tp_spec` on torch 2.11.
    before = getattr(parameter, "_unsharded_dtensor_spec", None) or getattr(parameter, "_tp_spec", None)
    if before is None or spec.tensor_meta is None:
        return None
    try:
        label, given = layout_of_spec(spec), layout_of_spec(before)
    except UnsupportedError:
        return None
    names, dim, info = _names(spec), parameter.fsdp_placement.dim, parameter.mesh_info
    held = {d: _renamed(cuts, _names(before), names) for d, cuts in given.all_cuts}
    if info.shard_mesh_dim is not None:
        held[dim] = (*held.get(dim, ()), names.index(info.mesh.mesh_dim_names[info.shard_mesh_dim]))
    shape, mesh_shape = tuple(spec.tensor_meta.shape), tuple(spec.mesh.shape)
    if all(_same_indices(shape[d], mesh_shape, cuts, label.cuts(d)) for d, cuts in held.items()):
        return None
    return (
        f"it was {_text(before)} before fully_shard cut its dim {dim}, and torch labels the result {_text(spec)}, a "
        f"layout of other elements: full_tensor, checkpoints and redistributions follow the label and permute it"
    )


def _names(spec: DTensorSpec) -> tuple[str, ...]:
    return spec.mesh.mesh_dim_names or ()


def _text(spec: DTensorSpec) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in zip(_names(spec), spec.mesh.shape, strict=True))
    return f"{spec.placements} on a mesh of {sizes}"


def _renamed(cuts: Cuts, names: Sequence[str], others: Sequence[str]) -> Cuts:
    """Cuts by the mesh dims of the same names in another mesh."""
    at = [others.index(name) for name in names]
    return tuple((at[cut[0]], cut[1]) if isinstance(cut, tuple) else at[cut] for cut in cuts)


@lru_cache(256)
def _same_indices(extent: int, mesh_shape: tuple[int, ...], a: Cuts, b: Cuts) -> bool:
    """Whether every rank holds the same indices of a tensor dim under either cuts."""
    if a == b:
        return True
    cutting = {cut[0] if isinstance(cut, tuple) else cut for cut in (*a, *b)}
    ranks = product(*(range(size if m in cutting else 1) for m, size in enumerate(mesh_shape)))
    return all(
        held_spans(extent, parts_of(a, mesh_shape, at)).tolist()
        == held_spans(extent, parts_of(b, mesh_shape, at)).tolist()
        for at in ranks
    )
