"""What real and virtual ranks of a token dispatcher have in common: the way from arguments to operators and back."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError
from .autograd import Combine, Dispatch, combine_into
from .config import DispatchLayout
from .ops import by_rank, register, routing_length, state_of
from .overflow import LATEST, Losses
from .redispatch import RowsAgain
from .report import explain
from .routed import RoutedTokens
from .routing import Sent
from .transfer import TokenRank
from .transfer_fixed import ways_of


class TokenEngine:
    """Everything is a list: one for each rank in this process."""

    def __init__(self, layout: DispatchLayout, parts: Sequence[TokenRank], name: str, why: str = "") -> None:
        self.layout, self.parts, self.name, self.why = layout, parts, name, why
        self._losses = Losses(layout, parts[0].device)
        self.handle, self.state = register(self), state_of(parts[0].transport, parts[0].device)
        layout.experts_on(parts[0].device)  # for `load`, which may be captured in a graph

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenEngine:
        """A copy of a model, as averages of parameters are kept in, meets the same peers by the same dispatcher."""
        return self

    def before_dispatch(self) -> None:
        self._losses.check(LATEST)

    def after_dispatch(self, lost: torch.Tensor) -> None:
        self._losses.add(lost)

    def run(self, what: int, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Wait for the dispatches so far.

        Raises:
            CapacityError: with overflow="raise", one of them dropped rows or had bad ids. Each is raised once.
        """
        self._losses.check(0)

    def explain(self) -> str:
        """The settings, and the memory and bytes on the wire that they take, of each rank."""
        return "\n".join([explain(self.layout, ways_of(self.parts[0]), self.name), *[f"  {self.why}"] * bool(self.why)])

    def _dispatch(
        self, xs: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> list[RoutedTokens]:
        layout = self.layout
        again = layout.save == "redispatch"
        if again and torch.compiler.is_compiling():
            raise UnsupportedError('save="redispatch" under torch.compile; allowed: "lease", "copy"')
        weights = [w.float() for w in weights]
        given = Dispatch.apply(self, *xs, *weights, *ids)
        found = []
        by_part = by_rank(given, 2 + routing_length(self))
        for part, tokens, w, (x, *sent) in zip(self.parts, xs, weights, by_part, strict=True):
            numbers = sent[0]
            if layout.batched:
                slots = layout.bounds[part.me + 1] - layout.bounds[part.me]
                assert layout.expert_capacity is not None
                shape = slots, layout.expert_capacity
                n = shape[0] * shape[1]
                x, numbers = x[:n].view(*shape, layout.hidden), numbers[:n].view(shape)
            kept = (tokens.detach(), RowsAgain(x)) if again else ()
            found.append(RoutedTokens(x, numbers, w, Sent.of(sent), layout, (self.handle, part.me), *kept))
        return found

    def _combine(
        self,
        values: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        outs: Sequence[torch.Tensor | None],
        adds: Sequence[torch.Tensor | None],
        weighted: bool,
    ) -> list[torch.Tensor]:
        layout = self.layout
        flat = []
        for v in values:
            if layout.batched:
                v = v.reshape(-1, layout.hidden)
                if len(v) < layout.rows:  # a rank with fewer slots than others
                    v = torch.cat([v, v.new_zeros(layout.rows - len(v), layout.hidden)])
            flat.append(v)
        weights: list[Any] = [r.topk_weights if weighted else None for r in routed]
        routing = [tensor for r in routed for tensor in r._sent.tensors()[1:]]
        adds = list(adds)
        given = [o for o in outs if o is not None]
        if given:
            if len(given) < len(outs):
                raise ArgumentError(f"out: {len(given)} of {len(outs)} given; allowed: one for each rank, or None")
            with torch.no_grad():
                combine_into(self, given, flat, routing, weights if weighted else [], adds)
            return given
        dispatched, tokens = [r._sent.weights for r in routed], [r._tokens for r in routed if r._tokens is not None]
        again = [r._again for r in routed if r._again is not None]
        return list(Combine.apply(self, weighted, again, *flat, *weights, *adds, *dispatched, *tokens, *routing))


def placed(device: torch.device | str) -> torch.device:
    """As tensors on it say: the current one where none is named."""
    return torch.empty(0, device=device).device
