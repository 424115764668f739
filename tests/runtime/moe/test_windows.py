"""Token dispatch with device-side synchronisation, through windows and buffer pools: by the CPU paths, by the kernels
in the interpreter, and on a GPU that several processes share. What all transports share is tested with them.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest
import test_no_sync
import torch
import torch.distributed as dist
from moe_reference import tokens_of
from rank_processes import ONE_GPU, end_ranks, interpreted, run_ranks
from sync_guard import SyncGuard
from test_processes import SETTINGS, E, H, K, given, leaf, raw, rounds_of, virtual_rounds
from test_symmetric import gpu, transport_of  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardweave
from shardweave import kernels
from shardweave.kernels.signal import signal_kernel
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.transfer.window import WindowTransfer
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports.symmetric_memory.window import window_size

pytestmark = pytest.mark.multi


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def in_the_interpreter(rank: int) -> str:
    assert kernels.interpreted(signal_kernel)
    collected = digest(rounds_of(rank, "symmetric_memory", rounds=1))
    layer_under_the_guard(rank)
    return collected


def layer_under_the_guard(rank: int) -> None:
    """A layer and its backward under the sync guard; only signals, which kernels process on a GPU, are exempt."""
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory")
    t = given(rank, 1)
    x, weights = leaf(t.x), leaf(t.weights)
    with SyncGuard() as guard, test_no_sync.control_words_of(guard):
        routed = d.dispatch(x, t.ids, weights)
        y = d.combine(routed.x * 2, routed, add=x)
        y.backward(t.gradient)
    assert guard.seen["clone"] and guard.seen["empty"], guard.seen


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_interpreted_kernels_equal_virtual_ranks(size: int) -> None:
    """Bitwise equal to virtual ranks."""
    virtual = f"[t.digest(rounds) for rounds in t.virtual_rounds({size}, rounds=1)]"
    assert interpreted("test_windows", f"t.run_ranks(t.in_the_interpreter, {size}) == {virtual}") == "True"


def among_others(rank: int) -> list[bytes]:
    """Two dispatchers take turns with one window, and with a redistribution; windows are made at construction only."""
    transport = transport_of("cpu")
    first, second = (
        TokenDispatcher(**SETTINGS, save=save, transport="symmetric_memory") for save in ("buffer", "copy")
    )
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(28.0).view(7, 4), mesh, [Shard(0)])
    shardweave.redistribute(x, [Replicate()], transport="symmetric_memory")
    made, collected = len(transport._all), []
    for i in range(3):
        t = given(rank, i)
        ones, twos = first.dispatch(t.x, t.ids, t.weights), second.dispatch(-t.x, t.ids, t.weights)
        whole = shardweave.redistribute(x, [Replicate()], transport="symmetric_memory").to_local()
        assert torch.equal(whole, torch.arange(28.0).view(7, 4))
        out = torch.full((len(t.x), 2 * H), float("nan"), dtype=t.x.dtype)
        first.combine(ones.x, ones, out=out[:, :H])
        assert out[:, H:].isnan().all()
        negative = second.combine(twos.x, twos)
        assert torch.equal(negative, -out[:, :H])
        collected.append(raw(out[:, :H]))
    assert len(transport._all) == made
    return collected


def combined(rank: int, transport: str, name: str) -> list[bytes]:
    d = TokenDispatcher(**SETTINGS, transport=transport)
    assert d.name == name
    collected = []
    for i in range(3):
        t = given(rank, i)
        routed = d.dispatch(t.x, t.ids, t.weights)
        collected.append(raw(d.combine(routed.x, routed)))
    return collected


def test_dispatchers_share_a_window_beside_redistributions() -> None:
    assert run_ranks(among_others, 4) == run_ranks(combined, 4, "shared_memory", "shared_memory")


def test_ranks_on_several_nodes_send_chunks() -> None:
    nodes = {"SHARDWEAVE_NODE_SIZE": "2"}
    collected = run_ranks(combined, 4, "symmetric_memory", "hierarchical symmetric_memory", environment=nodes)
    # Sums are rounded for each node, as on a transport that uses shared memory there.
    assert collected == run_ranks(combined, 4, "hierarchical", "hierarchical", environment=nodes)


def many_at_once(rank: int, pooled_buffers: int) -> int:
    """Dispatch with results held for random times and written in place; returns the number of copies."""
    d = TokenDispatcher(**SETTINGS, pooled_buffers=pooled_buffers, transport="symmetric_memory")
    draw, held, want = random.Random(rank), {}, {}
    before = stats().copies.total()
    for i in range(24):
        t = given(rank, i)
        held[i] = d.dispatch(t.x, t.ids, t.weights)
        kept = held[i].x[: int(held[i].num_rows)]
        kept.neg_()
        want[i] = kept.clone()
        if i % 5 == 4:  # a view keeps its buffer in use
            held[i] = kept[1:]
            want[i] = want[i][1:]
        for j in draw.sample(sorted(held), draw.randrange(2)):
            del held[j], want[j]
        for j, of in held.items():
            assert torch.equal(of if isinstance(of, torch.Tensor) else of.x[: len(want[j])], want[j]), (i, j)
    return stats().copies.total() - before


def reused(rank: int) -> None:
    """Dispatch repeatedly, freeing each result with the next: no copies, and two buffers are reused."""
    settings = {**SETTINGS, "pooled_buffers": 2}
    d = TokenDispatcher(**settings, transport="symmetric_memory")
    smaller = TokenDispatcher(**{**settings, "max_tokens": 11}, transport="symmetric_memory")
    before, seen = stats().copies.total(), set()
    for i in range(8):
        t = given(rank, 2 * i)
        small = (5 * np.arange(3) + 6 * i) % 13 < 12  # equal on all ranks
        routed = (smaller if small.all() else d).dispatch(t.x, t.ids, t.weights)
        seen.add(routed.x.data_ptr())
    assert len(seen) == 2 and stats().copies.total() == before
    routed = None
    pools = transport_of("cpu")._pools
    assert [len(of_group) for of_group in pools.values()] == [1]
    TokenDispatcher(**SETTINGS, pooled_buffers=0, transport="symmetric_memory").dispatch(t.x, t.ids, t.weights)
    TokenDispatcher(**SETTINGS, save="copy", transport="symmetric_memory").dispatch(t.x, t.ids, t.weights)
    assert [len(of_group) for of_group in pools.values()] == [1] and stats().copies.total() == before


def test_rows_stay_in_pooled_buffers() -> None:
    run_ranks(reused, 3)
    few = run_ranks(many_at_once, 3, 2)
    assert all(0 < copied < 24 for copied in few), few
    assert run_ranks(many_at_once, 3, 24) == [0, 0, 0]


def pooled_buffers_by_rank(rank: int) -> None:
    TokenDispatcher(**SETTINGS, pooled_buffers=1 + rank, transport="symmetric_memory")


def test_different_pooled_buffers_raise() -> None:
    ends = end_ranks(pooled_buffers_by_rank, 2, environment={"SHARDWEAVE_TIMEOUT": "5"})
    assert any(end.error == "DisagreementError" and "`pooled_buffers`" in end.message for end in ends), ends


MAP = [[0, 1, 2], [3], [4, 0]]
ODD: dict[str, dict] = {
    "batched": {"layout": "batched", "expert_capacity": 6, "overflow": "drop"},
    "few experts": {
        "layout": "batched",
        "expert_capacity": 5,
        "overflow": "drop",
        "expert_map": [[], [0, 1, 2, 3, 4], []],
    },
    "replicated": {"expert_map": MAP, "save": "redispatch"},
    "no room": {"capacity": 8, "overflow": "drop", "dtype": torch.float16, "hidden": 7, "save": "copy"},
    "nothing": {"max_tokens": 0, "dtype": torch.float32},
    "one": {"top_k": 1, "hidden": 1, "align": 128, "dtype": torch.float32},
}


def odd_tokens(settings: dict, rank: int, i: int):
    count = min((5 * rank + 3 * i) % 13, settings["max_tokens"])
    return tokens_of(rank, count, settings["top_k"], E, settings["hidden"], settings["dtype"], "holes", i)


def trained(d, settings: dict, tokens: list) -> list[list[bytes]]:
    """Return the output of a residual layer, its gradients and its counts, of each rank of a dispatcher with lists."""
    xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
    routed = d.dispatch(xs, [t.ids for t in tokens], weights)
    outputs = []
    for r in routed:
        with r.kept():
            # Expert outputs with strided rows.
            outputs.append(torch.tanh(r.x).transpose(0, -1).contiguous().transpose(0, -1))
    ys = d.combine(outputs, routed, add=xs)
    torch.autograd.backward(ys, [t.gradient for t in tokens])
    of_all = zip(ys, xs, weights, routed, strict=True)
    return [
        [raw(v) for v in (y, x.grad, w.grad, r.offsets, r.counts, r.num_rows, r.dropped, r.bad_ids)]
        for y, x, w, r in of_all
    ]


class Listed:
    """A dispatcher of one rank with a list interface."""

    def __init__(self, d: TokenDispatcher) -> None:
        self.d = d

    def dispatch(self, xs, ids, weights):
        return [self.d.dispatch(xs[0], ids[0], weights[0])]

    def combine(self, outputs, routed, add):
        return [self.d.combine(outputs[0], routed[0], add=add[0])]


def odd_settings(rank: int) -> list[list[bytes]]:
    collected = []
    for given_here in ODD.values():
        settings = {**SETTINGS, **given_here}
        d = TokenDispatcher(**settings, transport="symmetric_memory")
        for i in range(3):
            collected += trained(Listed(d), settings, [odd_tokens(settings, rank, i)])
        d.check()
    return collected


def test_unusual_settings_equal_virtual_ranks() -> None:
    torch.set_num_threads(1)
    want: list[list] = [[], [], []]
    for given_here in ODD.values():
        settings = {**SETTINGS, **given_here}
        d = shardweave.moe.VirtualTokenDispatcher(3, **settings)
        for i in range(3):
            by_rank = trained(d, settings, [odd_tokens(settings, rank, i) for rank in range(3)])
            for of_rank, got in zip(want, by_rank, strict=True):
                of_rank.append(got)
    assert run_ranks(odd_settings, 3) == want


def again_in_backward(rank: int, how: str) -> list[bytes]:
    """Two layers, compiled or checkpointed: one rank compiles them."""
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory")

    def layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            routed = d.dispatch(x, ids, weights)
            x = d.combine(torch.tanh(routed.x), routed, add=x)
        return x

    compiles = how == "compiled" and rank == 0
    run = torch.compile(layers, backend="aot_eager", fullgraph=True) if compiles else layers
    collected = []
    for i in range(2):
        t = given(rank, i)
        x, weights = leaf(t.x), leaf(t.weights)
        if how == "checkpointed":
            y = checkpoint(layers, x, t.ids, weights, use_reentrant=False)
        else:
            y = run(x, t.ids, weights)
        y.backward(t.gradient)
        collected += [raw(y), raw(x.grad), raw(weights.grad)]
    d.check()
    return collected


# test_zero_rows compiles layers with windows in the gate.
@pytest.mark.parametrize("how", ["checkpointed", pytest.param("compiled", marks=pytest.mark.long)])
def test_compiled_and_checkpointed_equal_eager(how: str) -> None:
    assert run_ranks(again_in_backward, 3, how) == run_ranks(again_in_backward, 3, "eager")


def dispatches_late(rank: int, disagrees: bool) -> None:
    """A redistribution has left floats where counts will be."""
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory")
    other = TokenDispatcher(**{**SETTINGS, "num_experts": 40}, transport="symmetric_memory")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(-torch.ones(9, 400), mesh, [Shard(0)])
    shardweave.redistribute(x, [Shard(1)], transport="symmetric_memory")
    t = given(rank, 1)
    if rank != 1:
        d.dispatch(t.x, t.ids, t.weights)
    elif disagrees:
        other.dispatch(t.x, t.ids, t.weights)


@pytest.mark.parametrize("disagrees", [False, True])
def test_stale_window_is_not_read_as_counts(disagrees: bool) -> None:
    """Without a barrier, offsets computed from stale data would be out of bounds."""
    ends = end_ranks(dispatches_late, 3, disagrees, environment={"SHARDWEAVE_TIMEOUT": "2"})
    errors = [end.error for end in ends]
    assert set(errors) <= {"MeetingTimeoutError", "DisagreementError", "PeerError", None} and errors.count(None) < 2, (
        ends
    )
    # The first rank to see it signals its failure; ended processes are noticed before the timeout.
    assert {"DisagreementError"} & set(errors) if disagrees else {"MeetingTimeoutError", "PeerError"} & set(errors)


def late_in_the_interpreter() -> str:
    ends = end_ranks(dispatches_late, 2, False, environment={"SHARDWEAVE_TIMEOUT": "2"})
    return str([ends[rank].error for rank in range(2)])


def test_kernels_do_not_read_stale_window_as_counts() -> None:
    assert interpreted("test_windows", "t.late_in_the_interpreter()") in (
        "['MeetingTimeoutError', None]",
        "['PeerError', None]",
    )


def never_combines(rank: int) -> None:
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory")
    t = given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    if rank != 1:
        out = torch.zeros(len(t.x), H, dtype=t.x.dtype)
        try:
            d.combine(routed.x, routed, out=out)
        finally:
            assert out.isnan().all()


def test_missing_rank_is_named_and_outputs_overwritten() -> None:
    ends = end_ranks(never_combines, 3, environment={"SHARDWEAVE_TIMEOUT": "3"})
    assert ends[1].error is None
    for rank in (0, 2):
        assert ends[rank].error in ("MeetingTimeoutError", "PeerError"), ends[rank]
        assert "outputs since then are overwritten" in ends[rank].message
    texts = ("rank 1 did not arrive within 3 s", "rank 1 is gone")
    assert any(text in ends[rank].message for text in texts for rank in (0, 2))


def explained(rank: int) -> str:
    layers = [TokenDispatcher(**SETTINGS, transport="symmetric_memory") for _ in range(3)]
    assert len({id(d.transfers[0]._window) for d in layers}) == 1, "layers share a window"
    larger = TokenDispatcher(**{**SETTINGS, "max_tokens": 900}, transport="symmetric_memory").transfers[0]._window
    needed = WindowTransfer.window_nbytes(replace(layers[0].config, max_tokens=900))
    assert larger.nbytes == needed, "no larger than needed"
    text = layers[0].explain()
    dist.barrier()  # ranks that have ended cannot be mapped
    return text


def test_explain_states_window() -> None:
    d = shardweave.moe.VirtualTokenDispatcher(2, **SETTINGS)
    (text, _) = run_ranks(explained, 2)
    # Counts of 7 words for 2 ranks, and 88 rows of 48 bytes and a weight, each from a multiple of 256 bytes on.
    rows = d.config.rows
    want = 256 + -(-rows * H * 2 // 256) * 256 + -(-rows * 4 // 256) * 256
    assert WindowTransfer.window_nbytes(d.config) == want
    assert "symmetric_memory" in text and f"{window_size(want, exact=True):,}  window" in text, text
    assert f"{rows * H * 2:,}  buffers that peers write rows into, pooled_buffers=1" in text, text


def on_a_gpu(rank: int, dedupe: bool) -> str:
    return digest(rounds_of(rank, "symmetric_memory", device="cuda", dedupe=dedupe))


@pytest.mark.gpu
@pytest.mark.parametrize("dedupe", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_on_one_gpu(gpu: None, size: int, dedupe: bool) -> None:  # noqa: F811
    collected = run_ranks(on_a_gpu, size, dedupe, environment=ONE_GPU, timeout=300)
    # Compare on the same device: torch sums in other orders on CPUs.
    assert collected == [digest(rounds) for rounds in virtual_rounds(size, device="cuda")]


def captured_on_a_gpu(rank: int, dedupe: bool) -> bool:
    """Dispatch and combine in one graph, replayed with other tokens."""
    d = TokenDispatcher(**SETTINGS, device="cuda", transport="symmetric_memory", dedupe=dedupe)
    tokens = [tokens_of(rank, 7, K, E, H, torch.bfloat16, "zipf", i) for i in range(3)]
    x, ids, weights = (getattr(tokens[0], name).cuda() for name in ("x", "ids", "weights"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            routed = d.dispatch(x, ids, weights)
            d.combine(routed.x, routed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        routed = d.dispatch(x, ids, weights)
        y = d.combine(routed.x, routed)
    for t in (*tokens, *tokens):
        for name, into in (("x", x), ("ids", ids), ("weights", weights)):
            into.copy_(getattr(t, name))
        graph.replay()
        got = y.clone()
        with torch.no_grad():
            routed = d.dispatch(x, ids, weights)
            want = d.combine(routed.x, routed)
        if not torch.equal(got, want):
            return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("dedupe", [False, True])
def test_layer_in_cuda_graph(gpu: None, dedupe: bool) -> None:  # noqa: F811
    assert run_ranks(captured_on_a_gpu, 2, dedupe, environment=ONE_GPU, timeout=300) == [True, True]
