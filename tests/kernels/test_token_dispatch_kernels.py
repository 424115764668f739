"""Dispatch and combine by kernels on virtual ranks, one-sided and two-sided, against float64."""

from __future__ import annotations

import pytest
import torch

from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["grouped", "batched"])
def test_dispatch_and_combine(device, dtype, layout):
    """Expert e multiplies by e + 1; rows beyond the capacity of expert 0 are dropped."""
    ranks, experts, k, hidden = 3, 4, 3, 24
    d = VirtualTokenDispatcher(
        ranks,
        num_experts=experts,
        top_k=k,
        hidden=hidden,
        max_tokens=6,
        dtype=dtype,
        device=device,
        options=DispatchOptions(align=4, expert_capacity=8, overflow="drop", layout=layout, zero_rows=True),
    )
    g = torch.Generator().manual_seed(1)
    counts = [6, 0, 3]
    ids = [torch.randint(-1, experts, (n, k), generator=g) for n in counts]
    ids[0][:, 0] = 0
    ids[0][:3, 1] = 0
    xs = [torch.randn(n, hidden, generator=g).to(dtype) for n in counts]
    weights = [torch.rand(n, k, generator=g) for n in counts]
    grads = [torch.randn(n, hidden, generator=g).to(dtype) for n in counts]

    seen, kept = [0] * experts, [torch.zeros(n, k) for n in counts]
    for rank, tokens in enumerate(ids):
        for t, pairs in enumerate(tokens.tolist()):
            for i, e in enumerate(pairs):
                if e >= 0:
                    kept[rank][t, i] = seen[e] < 8
                    seen[e] += 1
    assert max(seen) > 8

    on = [[v.to(device).requires_grad_(v.is_floating_point()) for v in vs] for vs in (xs, ids, weights)]
    routed = d.dispatch(*on)
    outputs = []
    for rank, r in enumerate(routed):
        low = d.config.bounds[rank]
        scale = torch.zeros(r.x.flatten(0, -2).shape[0], 1, dtype=dtype, device=device)
        at = 0
        for i, end in enumerate(r.offsets.tolist()):
            scale[at:end] = low + i + 1
            at = end
        # Also of rows that hold no token, which are zero.
        assert not r.x.flatten(0, -2)[int(r.num_rows) :].any()
        outputs.append((r.x.flatten(0, -2) * scale).view(r.x.shape))
    ys = d.combine(outputs, routed)
    torch.autograd.backward(ys, [v.to(device) for v in grads])
    # A few roundings, of the terms' absolute values: y of x * e, of that by a weight, and of sums.
    size = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]

    def near(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> None:
        assert ((got.detach().cpu().double() - want).abs() <= size * terms).all()

    for rank in range(ranks):
        x, gradient = xs[rank].double(), grads[rank].double()
        by = (ids[rank] + 1) * kept[rank].double()  # [T, K]
        share = (by * weights[rank]).sum(1, keepdim=True)
        near(ys[rank], x * share, (x * share).abs())
        near(on[0][rank].grad, gradient * share, (gradient * share).abs())
        near(on[2][rank].grad, by * (x * gradient).sum(1, keepdim=True), by * (x * gradient).abs().sum(1, keepdim=True))
    assert int(routed[2].dropped) == sum(max(0, n - 8) for n in seen)
    d.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("overflow", ["raise", "drop"])
def test_replays_of_a_cuda_graph(overflow):
    """Replays with new tokens, after more buffers than there are cached tables."""
    d = VirtualTokenDispatcher(
        2,
        num_experts=5,
        top_k=2,
        hidden=64,
        max_tokens=32,
        device="cuda",
        options=DispatchOptions(align=8, overflow=overflow, expert_capacity=16, zero_rows=True),
    )
    given = [
        [torch.zeros(n, 64, dtype=torch.bfloat16, device="cuda") for n in (32, 7)],
        [torch.zeros(n, 2, dtype=torch.int64, device="cuda") for n in (32, 7)],
        [torch.ones(n, 2, device="cuda") for n in (32, 7)],
    ]

    def layer():
        routed = d.dispatch(*given)
        return d.combine([r.x for r in routed], routed), [r.dropped for r in routed], routed

    def renew(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for x, ids, weights in zip(*given, strict=True):
            x.copy_(torch.randn(x.shape, generator=g))
            ids.copy_(torch.randint(-1, 5, ids.shape, generator=g))
            weights.copy_(torch.rand(weights.shape, generator=g))

    with torch.no_grad():
        renew(0)
        layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, overflow, received = layer()
        held = []
        for seed in range(1, 25):
            renew(seed)
            held.append(torch.empty(seed << 12, device="cuda"))
            for r in received:
                r.x.fill_(float("nan"))
            graph.replay()
            assert not any(r.x[int(r.num_rows) :].any() for r in received)
            results = [y.clone() for y in captured]
            other = VirtualTokenDispatcher(
                2,
                num_experts=5,
                top_k=2,
                hidden=64,
                max_tokens=32,
                device="cuda",
                options=DispatchOptions(align=8, overflow="drop", expert_capacity=16),
            )
            routed = other.dispatch(*given)
            want = other.combine([r.x for r in routed], routed)
            assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))
            assert [int(n) for n in overflow] == [int(r.dropped) for r in routed]
            held.append(layer() if overflow == "drop" else None)
