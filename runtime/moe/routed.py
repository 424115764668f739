"""What a dispatch gives a rank's experts: rows by group, and everything that combine needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from .config import DispatchLayout
from .redispatch import RowsAgain, unpack
from .routing import Sent


@dataclass(frozen=True)
class TokenLoad:
    """How tokens were spread, of all ranks; the same on all of them.

    Attributes:
        per_slot: int64 [S], tokens for each slot, which is an expert or one copy of it; dropped ones counted.
        per_expert: int64 [E], tokens for each expert, those for all of its copies together.
        per_rank: int64 [W], tokens for each rank.
        imbalance: float32 [], the largest of per_rank over their mean; 1 without tokens.
    """

    per_slot: torch.Tensor
    per_expert: torch.Tensor
    per_rank: torch.Tensor
    imbalance: torch.Tensor


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """What a rank's experts get. A pytree.

    Rows from `num_rows` on are zero if the dispatcher's `layout.zero_rows` is True. Otherwise they are not initialised:
    mask them, never multiply by them.

    Attributes:
        x: [R, H], rows grouped by slot, then by source rank, token and k; padding rows are zero. Batched: [S_local, C,
            H]. Differentiable.
        weights: float32 [R] (batched [S_local, C]), each row's weight, 0 for padding; for experts that apply it
            themselves. Differentiable.
        topk_weights: float32 [T, K], what this rank dispatched.
    """

    x: torch.Tensor
    weights: torch.Tensor
    topk_weights: torch.Tensor
    _sent: Sent
    _layout: DispatchLayout
    _of: tuple[int, int]
    """The number of its dispatcher, and of the rank of that."""
    _tokens: torch.Tensor | None = None
    """Where they are dispatched again in backward: what was."""
    _again: RowsAgain | None = None

    def kept(self) -> AbstractContextManager[Any]:
        """A context for the experts, in which autograd saves of `x` no more than the dispatcher's `save` says.

        With save="redispatch" it saves nothing on the memory of `x`, which is free once this object, `x` and what was
        made of them are dropped. With the others it does nothing.
        """
        if self._again is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._again.pack(self.x), unpack)

    @property
    def offsets(self) -> torch.Tensor:
        """int32 [S_local], where each group ends, padding included, as `torch._grouped_mm` takes them."""
        return self._sent.groups.offsets

    @property
    def counts(self) -> torch.Tensor:
        """int64 [S_local], rows of each group."""
        return self._sent.groups.counts

    @property
    def padded_counts(self) -> torch.Tensor:
        """int64 [S_local], rows of each group, padding included."""
        return self._sent.groups.padded_counts

    @property
    def num_rows(self) -> torch.Tensor:
        """int32 [1], where the last group ends."""
        return self._sent.groups.num_rows

    @property
    def dropped(self) -> torch.Tensor:
        """int64 [], rows of all ranks together that had no room; equal on all ranks."""
        return self._sent.groups.lost[0]

    @property
    def bad_ids(self) -> torch.Tensor:
        """int64 [], ids of all ranks together that are no expert's; equal on all ranks."""
        return self._sent.groups.lost[1]

    def load(self) -> TokenLoad:
        """How this dispatch's tokens were spread; no communication, nothing is read by the host."""
        per_slot = self._sent.matrix[:, :-1].sum(0)
        per_expert, experts = per_slot, self._layout.experts_on(per_slot.device)
        if experts is not None:
            per_expert = per_slot.new_zeros(self._layout.num_experts).index_add_(0, experts, per_slot)
        running = torch.nn.functional.pad(per_slot.cumsum(0), (1, 0))
        bounds = self._layout.bounds
        per_rank = torch.stack([running[b] - running[a] for a, b in zip(bounds, bounds[1:], strict=False)])
        mean = per_rank.sum() / self._layout.ranks
        return TokenLoad(per_slot, per_expert, per_rank, torch.where(mean > 0, per_rank.amax() / mean, 1.0))


def _flatten(routed: RoutedTokens) -> tuple[list[Any], Any]:
    parts = [routed.x, routed.weights, routed.topk_weights, *routed._sent.tensors()]
    if routed._tokens is None:
        return parts, (routed._layout, routed._of, None)
    return [*parts, routed._tokens], (routed._layout, routed._of, routed._again)


def _unflatten(parts: Iterable[Any], context: Any) -> RoutedTokens:
    x, weights, topk_weights, *sent = parts
    layout, of, again = context
    if again is None:
        return RoutedTokens(x, weights, topk_weights, Sent.of(sent), layout, of)
    return RoutedTokens(x, weights, topk_weights, Sent.of(sent[:-1]), layout, of, sent[-1], again)


_pytree.register_pytree_node(RoutedTokens, _flatten, _unflatten)
