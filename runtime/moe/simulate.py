"""VirtualTokenDispatcher: all ranks of a token dispatcher in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ArgumentError, shown
from ...kernels import on_device
from ..transports.in_process import InProcessTransport, run_all
from .autograd import combine_tokens, dispatch_tokens
from .config import DispatchConfig, takes_settings
from .dispatch_record import Tokens
from .engine import TokenEngine, device_of
from .routed import RoutedTokens
from .transfer.base import Steps, TokenTransfer
from .transfer.levels import two_sided_transfer
from .transfer.push import PushTransfer
from .validate import check_combine, check_dispatch, packed_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .config import DispatchSettings


class VirtualTokenDispatcher(TokenEngine):
    """All ranks of a TokenDispatcher in this process, on one device: for tests, and for kernels of W ranks on one GPU.

    Methods take and return lists with one item for each of `size` ranks. Otherwise they are TokenDispatcher's, with
    bitwise equal results.

    Args:
        size: W, the number of ranks, at least 1.
        num_experts, top_k, hidden, max_tokens, dtype, capacity, expert_capacity, align, overflow, layout, expert_map,
            save, pooled_buffers, chunk_capacity, splits, zero_rows, num_sms, two_level, payloads, quantize,
            quantize_output, device: as for TokenDispatcher.
        one_sided: True: ranks write into each other's buffers; False: they send and receive, as over a network.
        nodes: with one_sided=False, the node of each rank, which decides the order of sums. With two_level=True ranks
            of a node write into each other's buffers.

    Raises:
        ArgumentError: a number or name that is not allowed.
    """

    @takes_settings()
    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str = "cpu",
        one_sided: bool = True,
        nodes: Sequence[int] | None = None,
        **settings: Unpack[DispatchSettings],
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"size: {size!r}; allowed: a number of ranks, at least 1")
        if nodes is not None and one_sided:
            raise ArgumentError(f"nodes: {shown(nodes)} with one_sided=True; allowed: None, for one node")
        config = DispatchConfig(size, nodes, **settings)
        transport, ranks, device = InProcessTransport(one_sided), tuple(range(size)), device_of(device)
        kind: type[TokenTransfer] = PushTransfer if one_sided else two_sided_transfer(config)
        with on_device(device):
            transfers = [kind(config, transport, ranks, r, device, config.fingerprint(0)) for r in ranks]
            super().__init__(config, transfers, "in process")

    def run(self, operation: int, runs: Sequence[Steps[Any]]) -> list[Any]:
        results = run_all(dict(enumerate(runs)))
        return [results[rank] for rank in range(len(runs))]

    def dispatch(
        self,
        xs: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        *,
        scale: Sequence[torch.Tensor] | None = None,
    ) -> list[RoutedTokens]:
        """TokenDispatcher.dispatch on all ranks.

        Args:
            xs, topk_ids, topk_weights: [T, H], [T, K] and [T, K] of each rank; T may differ.
            scale: of each rank, as for TokenDispatcher.

        Raises:
            ArgumentError: lists of another length than the number of ranks; unsupported shape or dtype, with its rank.
            CapacityError: as for TokenDispatcher.
        """
        scales: Sequence[Any] = [None] * self.config.ranks if scale is None else scale
        self._check_lists(x=xs, topk_ids=topk_ids, topk_weights=topk_weights, scale=scales)
        tokens = []
        for rank, (x, ids, weights, of_rank) in enumerate(zip(xs, topk_ids, topk_weights, scales, strict=True)):
            at, device = f"[{rank}]", self.transfers[rank].device
            tokens.append(Tokens(packed_tokens(self.config, device, x, of_rank, at), ids, weights))
            check_dispatch(self.config, device, tokens[-1], at)
        return dispatch_tokens(self, tokens)

    def combine(
        self,
        expert_outputs: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        *,
        out: Sequence[torch.Tensor] | None = None,
        add: Sequence[torch.Tensor] | None = None,
        weighted: bool = True,
    ) -> list[torch.Tensor]:
        """TokenDispatcher.combine on all ranks: [T, H] each.

        Raises:
            ArgumentError: lists of another length than the number of ranks; unsupported shape or dtype, with its rank.
        """
        outs: Sequence[Any] = [None] * self.config.ranks if out is None else out
        adds: Sequence[Any] = [None] * self.config.ranks if add is None else add
        self._check_lists(expert_output=expert_outputs, routed=routed, out=outs, add=adds)
        for rank, (values, r, o, a) in enumerate(zip(expert_outputs, routed, outs, adds, strict=True)):
            source = self.handle, rank
            check_combine(self.config, self.transfers[rank].device, source, values, r, o, a, f"[{rank}]")
        return combine_tokens(self, expert_outputs, routed, outs, adds, weighted)

    def _check_lists(self, **lists: Sequence[Any]) -> None:
        for name, given in lists.items():
            if len(given) != self.config.ranks:
                raise ArgumentError(f"{name}: {len(given)} of them; allowed: one for each of {self.config.ranks} ranks")
