"""All ranks of a token dispatcher in one process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ArgumentError
from ..transports.in_process import InProcessTransport, run_all
from .config import DispatchLayout, DispatchSettings, spelled_out
from .engine import TokenEngine, placed
from .routed import RoutedTokens
from .transfer_fixed import slab_rank
from .transfer_push import PushingRank
from .validate import check_combine, check_dispatch

if TYPE_CHECKING:
    from typing_extensions import Unpack


class VirtualTokenDispatcher(TokenEngine):
    """All ranks of a TokenDispatcher in this process, on one device: for tests, and for kernels of W ranks on one GPU.

    Its methods take and return lists, one item for each of `size` ranks; otherwise they are TokenDispatcher's, and so
    are the results, bit for bit.

    Args:
        size: W, ranks from 1 on.
        num_experts, top_k, hidden, max_tokens, dtype, capacity, expert_capacity, align, overflow, layout, expert_map,
            save, leases, slab_capacity, zero_rows, device: as of TokenDispatcher.
        one_sided: ranks write into each other's buffers; False: they send and receive, as over a network.

    Raises:
        ArgumentError: a number or name that is not allowed.
    """

    @spelled_out()
    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str = "cpu",
        one_sided: bool = True,
        **settings: Unpack[DispatchSettings],
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"size: {size!r}; allowed: a number of ranks from 1 on")
        agreed = DispatchLayout.of(size, **settings)
        transport, ranks, device = InProcessTransport(one_sided), tuple(range(size)), placed(device)
        part = PushingRank if one_sided else slab_rank(agreed)
        parts = [part(agreed, transport, ranks, r, device, agreed.token(0)) for r in ranks]
        super().__init__(agreed, parts, "in process")

    def run(self, what: int, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        ended = run_all(dict(enumerate(runs)))
        return [ended[rank] for rank in range(len(runs))]

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
    ) -> list[RoutedTokens]:
        """TokenDispatcher.dispatch of all ranks.

        Args:
            xs, topk_ids, topk_weights: of each rank, [T, H], [T, K] and [T, K]; T may differ.

        Raises:
            ArgumentError: not one of each for every rank; a shape or dtype that is not allowed, with its rank.
            CapacityError: as of TokenDispatcher.
        """
        self._check_lists(x=xs, topk_ids=topk_ids, topk_weights=topk_weights)
        for rank, (x, ids, weights) in enumerate(zip(xs, topk_ids, topk_weights, strict=True)):
            check_dispatch(self.layout, self.parts[rank].device, x, ids, weights, f"[{rank}]")
        return self._dispatch(xs, topk_ids, topk_weights)

    def combine(
        self,
        expert_outputs: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        *,
        out: Sequence[torch.Tensor] | None = None,
        add: Sequence[torch.Tensor] | None = None,
        weighted: bool = True,
    ) -> list[torch.Tensor]:
        """TokenDispatcher.combine of all ranks: [T, H] for each.

        Raises:
            ArgumentError: not one of each for every rank; a shape or dtype that is not allowed, with its rank.
        """
        outs: Sequence[Any] = [None] * self.layout.ranks if out is None else out
        adds: Sequence[Any] = [None] * self.layout.ranks if add is None else add
        self._check_lists(expert_output=expert_outputs, routed=routed, out=outs, add=adds)
        for rank, (values, r, o, a) in enumerate(zip(expert_outputs, routed, outs, adds, strict=True)):
            of = self.handle, rank
            check_combine(self.layout, self.parts[rank].device, of, values, r, o, a, f"[{rank}]")
        return self._combine(expert_outputs, routed, outs, adds, weighted)

    def _check_lists(self, **lists: Sequence[Any]) -> None:
        for name, given in lists.items():
            if len(given) != self.layout.ranks:
                raise ArgumentError(f"{name}: {len(given)} of them; allowed: one for each of {self.layout.ranks} ranks")
