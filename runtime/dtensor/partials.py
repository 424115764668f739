"""Partial placements of torch that transform values before and after the reduction.

`_MaskPartial` (rowwise embedding, gather) zeroes values that a rank does not hold; `_NormPartial` sums p-th powers.
Such a request is carried out as one plain sum or several, with a transform before it, after it, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial

from ...errors import UnsupportedError
from ..convert_specs import with_placements

Transform = Callable[[torch.Tensor], torch.Tensor]


class PlainRequest(NamedTuple):
    """A redistribution with plain placements, and what is done to this rank's local tensor around it.

    Attributes:
        before, after: transforms of the local tensor; None: identity.
    """

    current: DTensorSpec
    target: DTensorSpec
    before: Transform | None = None
    after: Transform | None = None


def has_transforms(current: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a request has transformed partials."""
    return any(map(_is_transformed, (*current.placements, *target.placements)))


def plain_requests(current: DTensorSpec, target: DTensorSpec) -> list[PlainRequest]:
    """The requests with plain placements that, one after the other, carry out a request: itself, if it has no
    transformed partials.

    Norms that become replicas along several mesh dims are reduced along one at a time, with a root after each, as torch
    does, so that sums of two terms are bitwise equal to torch's.

    Raises:
        UnsupportedError: partials that cannot be transformed and reduced together.
    """
    if not has_transforms(current, target):
        return [PlainRequest(current, target)]
    _transformed(current, target)  # raises for all of them before the first is carried out
    specs = [current, *_norm_intermediates(current, target), target]
    return [_transformed(*ends) for ends in pairwise(specs)]


def _transformed(current: DTensorSpec, target: DTensorSpec) -> PlainRequest:
    """A request with transformed partials as one with plain placements.

    Raises:
        UnsupportedError: as `plain_requests`.
    """
    request = f"placements {current.placements} to {target.placements}"
    if current.mesh != target.mesh:
        raise UnsupportedError(f"{request}, on another mesh; allowed: plain partials")
    # Along a mesh dim of size 1 values are neither reduced nor transformed.
    wide = [m for m in range(current.mesh.ndim) if current.mesh.size(m) > 1]
    partials = {p for spec in (current, target) for m in wide if (p := spec.placements[m]).is_partial()}
    norm = next((p for p in partials if isinstance(p, _NormPartial)), None)
    if norm is not None:
        if len(partials) > 1:
            raise UnsupportedError(f"{request}; allowed: one kind of partial where norms are reduced")
        # The terms of a norm are powers, also where it is made from replicas.
        power, root = partial(_power, norm.norm_type), partial(_power, 1.0 / norm.norm_type)
        return PlainRequest(_untransformed(current), _untransformed(target), power, root)
    masks = [p.mask_buffer for m in wide if isinstance(p := current.placements[m], _MaskPartial)]
    masked = [m for m in wide if isinstance(target.placements[m], _MaskPartial)]
    if len(masked) > 1 or (masked and masks):
        raise UnsupportedError(
            f"{request}; allowed: masks in the source or in the target, and in the target along one mesh dim"
        )
    mask = partial(_apply_masks, masks) if masks else None
    split = partial(_partition, target, masked[0]) if masked else None
    return PlainRequest(_untransformed(current), _untransformed(target, masked), mask, split)


def _norm_intermediates(current: DTensorSpec, target: DTensorSpec) -> list[DTensorSpec]:
    """The specs between the reductions of norms along several mesh dims."""
    intermediates, placements = [], list(current.placements)
    for m, (a, b) in enumerate(zip(current.placements, target.placements, strict=True)):
        if isinstance(a, _NormPartial) and b.is_replicate() and current.mesh.size(m) > 1:
            placements[m] = b
            intermediates.append(with_placements(current, tuple(placements)))
    return intermediates[:-1]


def _is_transformed(placement: Placement) -> bool:
    return isinstance(placement, _MaskPartial | _NormPartial)


def _untransformed(spec: DTensorSpec, replicated: Collection[int] = ()) -> DTensorSpec:
    """The spec with plain sums in place of transformed partials, and replicas on the mesh dims `replicated`."""
    placements = [
        Replicate() if m in replicated else Partial(p.reduce_op) if isinstance(p, _MaskPartial | _NormPartial) else p
        for m, p in enumerate(spec.placements)
    ]
    return with_placements(spec, tuple(placements))


def _power(exponent: float, x: torch.Tensor) -> torch.Tensor:
    return x**exponent


def _apply_masks(masks: list[MaskBuffer], x: torch.Tensor) -> torch.Tensor:
    # In place, and once per mask: a mask lives from the op that read the indices until its result is reduced.
    for mask in masks:
        mask.apply_mask(x)
        mask.release_mask()
    return x


def _partition(target: DTensorSpec, mesh_dim: int, x: torch.Tensor) -> torch.Tensor:
    return target.placements[mesh_dim]._partition_value(x, target.mesh, mesh_dim)  # type: ignore[attr-defined]
