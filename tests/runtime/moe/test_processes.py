"""TokenDispatcher among processes, bitwise equal to virtual ranks on every transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import matrices_of, run_experts, tokens_of
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from shardweave.errors import CapacityError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.transports.shared_memory.pool_controls import pool_memory
from shardweave.runtime.transports.shared_memory.transport import SharedMemoryTransport

TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")
E, K, H, ROUNDS = 5, 3, 24, 3
SETTINGS = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 12, "dtype": torch.bfloat16, "align": 4}


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def raw(x: torch.Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def given(rank: int, i: int):
    """T differs between ranks and rounds, and may be 0."""
    return tokens_of(rank, (5 * rank + 3 * i) % 13, K, E, H, torch.bfloat16, "holes", i)


def to(tokens, device: str):
    """`tokens` on a device, without `add`."""
    moved = (getattr(tokens, name).to(device) for name in ("x", "ids", "weights", "gradient"))
    return type(tokens)(*moved)


def poisoned() -> None:
    """Fill allocations in shared memory with NaN."""
    allocate = SharedMemoryTransport.empty

    def empty(self, shape, dtype, device):
        return allocate(self, shape, dtype, device).fill_(float("nan") if dtype.is_floating_point else -7)

    SharedMemoryTransport.empty = empty  # type: ignore[method-assign]


def rounds_of(rank: int, transport: str | None, device: str = "cpu", rounds: int = ROUNDS, **more: Any) -> list[bytes]:
    """Return a rank's results and gradients, after a first dispatch in inference mode."""
    with torch.inference_mode():
        dispatcher = TokenDispatcher(**with_options(**SETTINGS, **more, device=device, transport=transport))
    low, high = dispatcher.config.bounds[rank : rank + 2]
    with torch.inference_mode():
        t = to(given(rank, 0), device)
        routed = dispatcher.dispatch(t.x, t.ids, t.weights)
        collected = [raw(dispatcher.combine(routed.x.clone(), routed))]
    for i in range(rounds):
        t = to(given(rank, i), device)
        matrices = matrices_of(E, H, torch.bfloat16)[low:high].to(device)
        x, weights, experts = leaf(t.x), leaf(t.weights), leaf(matrices)
        routed = dispatcher.dispatch(x, t.ids, weights)
        y = dispatcher.combine(run_experts(routed, list(experts), True), routed)
        y.backward(t.gradient)
        experts_grad = torch.zeros_like(experts) if experts.grad is None else experts.grad
        collected += [raw(y), raw(x.grad), raw(weights.grad), raw(experts_grad)]
    dispatcher.check()
    return collected


def virtual_rounds(
    size: int, rounds: int = ROUNDS, device: str = "cpu", nodes: Sequence[int] | None = None
) -> list[list[bytes]]:
    """Return the results and gradients of all virtual ranks; with `nodes` on one level."""
    d = VirtualTokenDispatcher(size, **with_options(**SETTINGS, device=device, one_sided=nodes is None, nodes=nodes))
    collected: list[list[bytes]] = [[] for _ in range(size)]
    for i in (None, *range(rounds)):
        tokens = [to(given(rank, i or 0), device) for rank in range(size)]
        xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
        matrices = matrices_of(E, H, torch.bfloat16).to(device)
        experts = [leaf(matrices[a:b]) for a, b in pairwise(d.config.bounds)]
        routed = d.dispatch(xs, [t.ids for t in tokens], weights)
        if i is None:
            for of_rank, y in zip(collected, d.combine([r.x for r in routed], routed), strict=True):
                of_rank.append(raw(y))
            continue
        ys = d.combine([run_experts(r, list(m), True) for r, m in zip(routed, experts, strict=True)], routed)
        torch.autograd.backward(ys, [t.gradient for t in tokens])
        for of_rank, y, x, w, m in zip(collected, ys, xs, weights, experts, strict=True):
            of_rank += [raw(y), raw(x.grad), raw(w.grad), raw(torch.zeros_like(m) if m.grad is None else m.grad)]
    return collected


def beside_another_group(rank: int, transport: str) -> bytes:
    """Four ranks in two interleaved groups of two, which dispatch concurrently."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    d = TokenDispatcher(mesh["ep"], **with_options(**SETTINGS, transport=transport))
    t = tokens_of(rank // 2, 7, K, E, H, torch.bfloat16, "zipf", rank % 2)
    routed = d.dispatch(t.x, t.ids, t.weights)
    return raw(d.combine(routed.x, routed))


def virtual_twos() -> list[bytes]:
    ys = []
    for dp in (0, 1):
        d = VirtualTokenDispatcher(2, **with_options(**SETTINGS))
        tokens = [tokens_of(r, 7, K, E, H, torch.bfloat16, "zipf", dp) for r in range(2)]
        routed = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])
        ys.append([raw(y) for y in d.combine([r.x for r in routed], routed)])
    return [ys[rank % 2][rank // 2] for rank in range(4)]


def more_ranks_than_experts(transport: str) -> list:
    """The last ranks have no experts, so what they combine does not depend on received rows."""
    d = TokenDispatcher(num_experts=2, top_k=1, hidden=8, max_tokens=4, dtype=torch.float32, transport=transport)
    x = torch.full((4, 8), 1.0 + dist.get_rank(), requires_grad=True)
    routed = d.dispatch(x, torch.tensor([[0], [1], [-1], [0]]), torch.ones(4, 1))
    output = torch.zeros_like(routed.x) if dist.get_rank() >= 2 else 3 * routed.x
    d.combine(output, routed).sum().backward()
    return x.grad.tolist()


def lost_on_one(rank: int, transport: str) -> str:
    d = TokenDispatcher(
        num_experts=4,
        top_k=1,
        hidden=8,
        max_tokens=4,
        dtype=torch.float32,
        transport=transport,
        options=DispatchOptions(capacity=2),
    )
    d.dispatch(torch.zeros(4, 8), torch.full((4, 1), 0 if rank == 1 else -1), torch.ones(4, 1))
    with pytest.raises(CapacityError) as raised:
        d.check()
    return str(raised.value)


def each_transport(rank: int) -> list[list]:
    poisoned()
    collected: list[list] = []
    for transport in TRANSPORTS:
        collected.append([rounds_of(rank, transport)])
        # Chunks of fixed size, with room for all rows of a rank; ignored in shared memory.
        assert rounds_of(rank, transport, chunk_capacity=12 * K) == collected[-1][0], transport
        if dist.get_world_size() == 4:
            collected[-1] += [
                beside_another_group(rank, transport),
                more_ranks_than_experts(transport),
                lost_on_one(rank, transport),
            ]
    return collected


@pytest.mark.multi
@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_processes_equal_virtual_ranks(size):
    torch.set_num_threads(1)
    by_rank, want = run_ranks(each_transport, size), virtual_rounds(size)
    twos = virtual_twos()
    for rank, of_transports in enumerate(by_rank):
        for transport, (rounds, *more) in zip(TRANSPORTS, of_transports, strict=True):
            assert rounds == want[rank], f"rank {rank}, {transport}"
            if more:
                beside, gradient, text = more
                assert beside == twos[rank]
                assert gradient == [[3.0] * 8, [3.0] * 8, [0.0] * 8, [3.0] * 8]
                assert text == by_rank[0][0][3] and "2 rows exceeded the capacity" in text


def memory_left(rank: int) -> list[int]:
    """Bytes in use after a dispatch whose rows are gone, after a combine whose input is gone, and after backward."""
    before = pool_memory().allocated
    d = TokenDispatcher(num_experts=4, top_k=2, hidden=1024, max_tokens=512, dtype=torch.float32)
    x, ids, weights = torch.randn(512, 1024), torch.randint(0, 4, (512, 2)), torch.rand(512, 2)
    d.dispatch(x, ids, weights)
    left = [pool_memory().allocated]
    routed = d.dispatch(x, ids, weights)
    y = d.combine(routed.output_buffer().fill_(1.0), routed)
    del routed
    left.append(pool_memory().allocated - y.nbytes)
    routed = d.dispatch(leaf(x), ids, leaf(weights))
    d.combine(routed.x * 2, routed).backward(x)
    del routed, y
    left.append(pool_memory().allocated)
    return [nbytes - before for nbytes in left]


@pytest.mark.multi
def test_memory_is_free_when_results_are_gone():
    """Before the next call: peers have read it when a call returns."""
    for left in run_ranks(memory_left, 2):
        assert max(left) < 1 << 20, left  # rows take 8 MiB, sums 2; smaller pieces are kept for the next call
