"""Other libraries' kernels beside those of TokenDispatcher: torch's operations, compiled ones, and the kernels of
torchao and torchtitan where they are installed.

Except torchtitan's, which write to peers as ours do, they write one buffer whose rows are in order of expert, token and
k: the local part of a dispatch, without an all-to-all. None of them moves weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardweave.bench.gpu.kernel_cases import Made, checked, poisoned, random_buffer
from shardweave.bench.gpu.token_cases import VirtualRank


@dataclass(frozen=True)
class Rival:
    """Another library's kernel.

    Attributes:
        make: as of a Case. ImportError where it is not installed.
    """

    name: str
    make: Callable[[], Made]


def compiled(function: Callable[..., Any], dry: bool) -> Callable[..., Any]:
    """By Inductor, which wants a C++ compiler for CPUs; where nothing is measured, by nothing that takes long."""
    backend = "aot_eager" if dry else "inductor"
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)  # type: ignore[call-overload,no-any-return]


def sorted_order(ids: torch.Tensor) -> torch.Tensor:
    """int64 [T * K], the entries in order of expert, token and k."""
    return torch.argsort(ids.view(-1), stable=True)


def counts_of(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [E]; nothing is read by the host, as bincount would."""
    zeros = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(0, ids.view(-1), torch.ones_like(ids.view(-1)))


def gather(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    return x.index_select(0, order // k)


def route_and_gather(x: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return gather(x, sorted_order(ids), ids.shape[1]), counts_of(ids, experts).cumsum(0)


def weighted_sum(rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each token's rows fetched and summed in float32."""
    fetched = rows.index_select(0, inverse.view(-1)).view(*weights.shape, -1)
    return (fetched.float() * weights[:, :, None]).sum(1).to(rows.dtype)


def added(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each row weighted and added to its token's."""
    scaled = rows * weights.view(-1)[order][:, None].to(rows.dtype)
    zeros = torch.zeros(weights.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    return zeros.index_add_(0, order // weights.shape[1], scaled)


def _sorted(rank: VirtualRank) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of entries, and where each entry is in it."""
    order = sorted_order(rank.ids)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _permutation(rank: VirtualRank, run: Callable[[torch.Tensor], Any]) -> Made:
    """`run` of new tokens returns their rows in order, alone or before other things."""
    x = rank.tokens()

    def right(result: Any) -> bool:
        rows = result[0] if isinstance(result, tuple) else result
        return bool(rows.equal(gather(x, _sorted(rank)[0], rank.ids.shape[1])))

    return checked(lambda: run(x), right)


def permuting(rank: VirtualRank, dry: bool) -> list[Rival]:
    """Rows put in order that is known."""
    k, order = rank.shape.top_k, _sorted(rank)[0]
    fast = compiled(gather, dry)
    return [
        Rival("index_select", lambda: _permutation(rank, lambda x: gather(x, order, k))),
        Rival("torchtitan", lambda: _by_torchtitan(rank, routing=False)),
        Rival("torch.compile", lambda: _permutation(rank, lambda x: fast(x, order, k))),
    ]


def routing_and_permuting(rank: VirtualRank, dry: bool) -> list[Rival]:
    """From ids to rows in order, and where the experts' groups end."""
    experts = rank.shape.experts
    fast = compiled(route_and_gather, dry)
    return [
        Rival("argsort + index_select", lambda: _permutation(rank, lambda x: route_and_gather(x, rank.ids, experts))),
        Rival("torchao", lambda: _by_torchao(rank)),
        Rival("torchtitan", lambda: _by_torchtitan(rank, routing=True)),
        Rival("torch.compile", lambda: _permutation(rank, lambda x: fast(x, rank.ids, experts))),
    ]


def combining(rank: VirtualRank, dry: bool) -> list[Rival]:
    """Each token's weighted rows summed."""
    order, inverse = _sorted(rank)
    fast = compiled(weighted_sum, dry)

    def made(run: Callable[[torch.Tensor], torch.Tensor]) -> Made:
        size = order.numel() * rank.shape.hidden
        rows = random_buffer(size, torch.bfloat16, rank.device).view(order.numel(), -1)

        def right(result: torch.Tensor) -> bool:
            total = torch.zeros(rank.shape.tokens, rank.shape.hidden, dtype=torch.float64, device=rank.device)
            for k in range(rank.shape.top_k):
                at = inverse.view(-1, rank.shape.top_k)[:, k]
                total.addcmul_(rows[at].double(), rank.weights[:, k, None].double())
            return result.equal(total.to(rows.dtype))

        return checked(lambda: run(rows), right)

    def torchtitan() -> Made:
        from torchtitan.distributed.minimal_async_ep import kernels  # type: ignore[import-not-found]

        flat, shape = rank.weights.view(-1), rank.shape
        return made(
            lambda rows: kernels.reduce_topk_slots_kernel(
                rows, inverse, flat, num_tokens=shape.tokens, top_k=shape.top_k, scores_are_slot_ordered=True
            )
        )

    return [
        Rival("index_select + sum", lambda: made(lambda rows: weighted_sum(rows, inverse, rank.weights))),
        Rival("index_add", lambda: made(lambda rows: added(rows, order, rank.weights))),
        Rival("torchtitan", torchtitan),
        Rival("torch.compile", lambda: made(lambda rows: fast(rows, inverse, rank.weights))),
    ]


def _by_torchao(rank: VirtualRank) -> Made:
    """Its indices for the grouped GEMM, of one source, and a gather through them."""
    from torchao.prototype.moe_training.ep.kernels import generate_permute_indices  # type: ignore[import-not-found]

    experts, k, x = rank.shape.experts, rank.shape.top_k, rank.tokens()
    # Of groups aligned to one row only empty ones are padded, to one.
    rows = rank.ids.numel() + int((counts_of(rank.ids, experts) == 0).sum())

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        order, counts = sorted_order(rank.ids), counts_of(rank.ids, experts)
        index, *_ = generate_permute_indices(counts, experts, 1, rows, 1, use_cpu=not x.is_cuda)
        return x.index_select(0, order.index_select(0, index.clamp(min=0)) // k), index

    return checked(run, lambda result: result[0][result[1] >= 0].equal(gather(x, _sorted(rank)[0], k)))


def _by_torchtitan(rank: VirtualRank, routing: bool) -> Made:
    """MinimalAsyncEP's own kernels, into the buffers of all ranks; the counts of peers are there, as for ours."""
    from torchtitan.distributed.minimal_async_ep import kernels

    shape, me = rank.shape, rank.me
    x, (whole, buffers) = rank.tokens(), rank.buffers(poisoned)
    table, _ = buffers.table()
    local = shape.experts // shape.ranks
    numbers = shape.ranks, shape.ranks, local
    counts = [m.long()[:, :-1].contiguous() for m in rank.matrices.tensors]
    addresses = torch.tensor([c.data_ptr() for c in counts], dtype=torch.int64, device=rank.device)

    def route() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        order = sorted_order(rank.ids)
        own = counts_of(rank.ids, shape.experts)
        kernels.copy_full_counts_to_peers_kernel(
            own, counts, rank=me, ep_size=shape.ranks, num_experts=shape.experts, dst_ptrs=addresses
        )
        by_source = counts[me].view(numbers)
        total = by_source.sum(0)
        starts = total.cumsum(1) - total + (by_source.cumsum(0) - by_source)[me]
        to, rows = kernels.fill_dispatch_metadata_kernel(
            own, starts.reshape(-1), own.cumsum(0) - own, num_routed_tokens=len(order), num_local_experts=local,
            max_tokens_per_segment=shape.tokens,
        )  # fmt: skip
        return to, rows, order // shape.top_k

    known = route()

    def call() -> None:
        to, rows, source = route() if routing else known
        kernels.copy_rows_to_peers_kernel(
            x, list(buffers.tensors), to, rows, ep_size=shape.ranks, num_rows=len(rows), num_cols=shape.hidden,
            dst_ptrs=table, block_m=4, num_warps=8, src_rows=source,
        )  # fmt: skip

    return call, lambda: all(bool(whole[rank.at[:, k]].equal(x)) for k in range(shape.top_k))
