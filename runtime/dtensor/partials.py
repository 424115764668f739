"""torch's partials that are more than a reduction: values are transformed before it, after it, or both.

`_MaskPartial` (rowwise embedding, gather) zeroes what a rank does not hold, `_NormPartial` sums p-th powers. In between
both are sums of plain values, which programs carry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial

from ...errors import UnsupportedError
from .autograd import with_placements

Transform = Callable[[torch.Tensor], torch.Tensor]


class Plain(NamedTuple):
    """A request that programs carry, and what makes it the one that was asked for.

    Attributes:
        before, after: of this rank's local tensor; None where nothing is to be done.
    """

    current: DTensorSpec
    target: DTensorSpec
    before: Transform | None
    after: Transform | None


def plain_request(current: DTensorSpec, target: DTensorSpec) -> Plain | None:
    """What to carry in place of a request with transformed partials; None where it has none.

    Raises:
        UnsupportedError: partials that cannot be transformed and reduced at once.
    """
    if not any(map(_is_transformed, (*current.placements, *target.placements))):
        return None
    asked = f"placements {current.placements} to {target.placements}"
    if current.mesh != target.mesh:
        raise UnsupportedError(f"{asked}, another mesh; allowed: plain partials")
    # Along a mesh dim of one rank nothing is reduced, nor transformed.
    wide = [m for m in range(current.mesh.ndim) if current.mesh.size(m) > 1]
    partials = {p for spec in (current, target) for m in wide if (p := spec.placements[m]).is_partial()}
    norm = next((p for p in partials if isinstance(p, _NormPartial)), None)
    if norm is not None:
        if len(partials) > 1:
            raise UnsupportedError(f"{asked}; allowed: one kind of partial where norms are reduced")
        # Its terms are powers, also where it is made of replicas.
        power, root = partial(_power, norm.norm_type), partial(_power, 1.0 / norm.norm_type)
        return Plain(_plain(current), _plain(target), power, root)
    masks = [p.mask_buffer for m in wide if isinstance(p := current.placements[m], _MaskPartial)]
    masked = [m for m in wide if isinstance(target.placements[m], _MaskPartial)]
    if len(masked) > 1 or (masked and masks):
        raise UnsupportedError(f"{asked}; allowed: masks to or from, along one mesh dim if to")
    mask = partial(_masked, masks) if masks else None
    split = partial(_split, target, masked[0]) if masked else None
    return Plain(_plain(current), _plain(target, masked), mask, split)


def norms_in_turn(current: DTensorSpec, target: DTensorSpec) -> list[DTensorSpec]:
    """What comes between where norms are made replicas along several mesh dims: one at a time, with a root after each,
    as torch does it, so that sums of two terms are bitwise its own."""
    stops, placements = [], list(current.placements)
    for m, (a, b) in enumerate(zip(current.placements, target.placements, strict=True)):
        if isinstance(a, _NormPartial) and b.is_replicate() and current.mesh.size(m) > 1:
            placements[m] = b
            stops.append(with_placements(current, tuple(placements)))
    return stops[:-1]


def _is_transformed(placement: Placement) -> bool:
    return isinstance(placement, _MaskPartial | _NormPartial)


def _plain(spec: DTensorSpec, replicated: Collection[int] = ()) -> DTensorSpec:
    """The spec with sums in place of transformed partials, replicas on some mesh dims."""
    plain = [
        Replicate() if m in replicated else Partial(p.reduce_op) if isinstance(p, _MaskPartial | _NormPartial) else p
        for m, p in enumerate(spec.placements)
    ]
    return with_placements(spec, tuple(plain))


def _power(exponent: float, x: torch.Tensor) -> torch.Tensor:
    return x**exponent


def _masked(masks: list[MaskBuffer], x: torch.Tensor) -> torch.Tensor:
    # In place, and once for each: a mask lives from the op that read the indices until its result is reduced.
    for mask in masks:
        mask.apply_mask(x)
        mask.release_mask()
    return x


def _split(target: DTensorSpec, mesh_dim: int, x: torch.Tensor) -> torch.Tensor:
    return target.placements[mesh_dim]._partition_value(x, target.mesh, mesh_dim)  # type: ignore[attr-defined]
