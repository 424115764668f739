"""Token dispatch with device-side synchronisation, through windows and buffer pools: by the CPU paths, by the kernels
in the interpreter, and on a GPU that several processes share. What all transports share is tested with them.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import test_no_sync
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
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
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports.symmetric_memory.window import window_size

pytestmark = pytest.mark.multi
LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def in_the_interpreter(rank: int) -> str:
    assert kernels.interpreted(signal_kernel)
    collected = digest(rounds_of(rank, "symmetric_memory", rounds=1))
    layer_under_the_guard(rank)
    return collected


def layer_under_the_guard(rank: int) -> None:
    """A layer and its backward under the sync guard; only signals, which kernels process on a GPU, are exempt."""
    d = TokenDispatcher(**with_options(**SETTINGS, transport="symmetric_memory"))
    t = given(rank, 1)
    x, weights = leaf(t.x), leaf(t.weights)
    with SyncGuard() as guard, test_no_sync.control_words_of(guard):
        routed = d.dispatch(x, t.ids, weights)
        y = d.combine(routed.x * 2, routed, add=x)
        y.backward(t.gradient)
    assert guard.seen["clone"] and guard.seen["empty"], guard.seen


def test_interpreted_kernels_equal_virtual_ranks() -> None:
    """Bitwise equal to virtual ranks."""
    virtual = "[t.digest(rounds) for rounds in t.virtual_rounds(2, rounds=1)]"
    assert interpreted("test_windows", f"t.run_ranks(t.in_the_interpreter, 2) == {virtual}") == "True"


def among_others(rank: int) -> list[bytes]:
    """Two dispatchers take turns with one window, and with a redistribution; windows are made at construction only."""
    transport = transport_of("cpu")
    first, second = (
        TokenDispatcher(**with_options(**SETTINGS, save=save, transport="symmetric_memory"))
        for save in ("buffer", "copy")
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


def combined(rank: int) -> list[bytes]:
    d = TokenDispatcher(**with_options(**SETTINGS, transport="shared_memory"))
    collected = []
    for i in range(3):
        t = given(rank, i)
        routed = d.dispatch(t.x, t.ids, t.weights)
        collected.append(raw(d.combine(routed.x, routed)))
    return collected


def test_dispatchers_share_a_window_beside_redistributions() -> None:
    assert run_ranks(among_others, 4) == run_ranks(combined, 4)


def many_at_once(rank: int, pooled_buffers: int) -> int:
    """Dispatch with results held for random times and written in place; returns the number of copies."""
    d = TokenDispatcher(**with_options(**SETTINGS, pooled_buffers=pooled_buffers, transport="symmetric_memory"))
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
    d = TokenDispatcher(**with_options(**settings, transport="symmetric_memory"))
    smaller = TokenDispatcher(**with_options(**{**settings, "max_tokens": 11}, transport="symmetric_memory"))
    before, seen = stats().copies.total(), set()
    for i in range(8):
        t = given(rank, 2 * i)
        small = (5 * np.arange(3) + 6 * i) % 13 < 12  # equal on all ranks
        routed = (smaller if small.all() else d).dispatch(t.x, t.ids, t.weights)
        seen.add(routed.x.data_ptr())
    assert len(seen) == 2 and stats().copies.total() == before
    routed = None
    TokenDispatcher(**with_options(**SETTINGS, pooled_buffers=0, transport="symmetric_memory")).dispatch(
        t.x, t.ids, t.weights
    )
    TokenDispatcher(**with_options(**SETTINGS, save="copy", transport="symmetric_memory")).dispatch(
        t.x, t.ids, t.weights
    )
    assert stats().copies.total() == before


def test_rows_stay_in_pooled_buffers() -> None:
    run_ranks(reused, 3)
    few = run_ranks(many_at_once, 3, 2)
    assert all(0 < copied < 24 for copied in few), few
    assert run_ranks(many_at_once, 3, 24) == [0, 0, 0]


def pooled_buffers_by_rank(rank: int) -> None:
    TokenDispatcher(**with_options(**SETTINGS, pooled_buffers=1 + rank, transport="symmetric_memory"))


def test_different_pooled_buffers_raise() -> None:
    ends = end_ranks(pooled_buffers_by_rank, 2, environment={"SHARDWEAVE_TIMEOUT": "5"})
    assert any(end.error == "DisagreementError" and "`pooled_buffers`" in end.message for end in ends), ends


# Of three ranks.
ODD: dict[str, dict[str, Any]] = {
    "batched": {"layout": "batched", "expert_capacity": 6, "overflow": "drop"},
    "few experts": {
        "layout": "batched",
        "expert_capacity": 5,
        "overflow": "drop",
        "expert_map": [[], [0, 1, 2, 3, 4], []],
    },
    "replicated": {"expert_map": [[0, 1, 2], [3], [4, 0]], "save": "redispatch"},
    "no room": {"capacity": 8, "overflow": "drop", "dtype": torch.float16, "hidden": 7, "save": "copy"},
    "nothing": {"max_tokens": 0, "dtype": torch.float32},
    "one": {"top_k": 1, "hidden": 1, "align": 128, "dtype": torch.float32},
    "few ranks": {"top_k": 7, "zero_rows": True},  # more experts of a token than ranks, and repeated ids
    "dropped": {"capacity": 16, "expert_capacity": 9, "overflow": "drop", "top_k": 4},
    "strided": {"save": "copy", "hidden": 30, "dtype": torch.float16},
    "float32": {"dtype": torch.float32, "hidden": 17, "pooled_buffers": 0},
}


def random_settings(seed: int, ranks: int) -> dict[str, Any]:
    draw = random.Random(seed)
    more: dict[str, Any] = {
        "dtype": draw.choice([torch.float32, torch.bfloat16, torch.float16]), "hidden": draw.choice([1, 7, 24, 64]),
        "top_k": draw.randint(1, 5), "align": draw.choice([1, 4, 8]), "max_tokens": draw.choice([1, 5, 12]),
        "save": draw.choice(["buffer", "copy", "redispatch"]), "pooled_buffers": draw.randint(0, 3),
        "zero_rows": draw.choice([True, False]), "overflow": "drop",
    }  # fmt: skip
    if draw.random() < 0.5:
        more["chunk_capacity"] = draw.choice([1, 4, 1.5])
    if draw.random() < 0.5:
        more["expert_capacity"] = draw.randint(0, 6)
    if draw.random() < 0.3:
        more["capacity"] = draw.choice([8, 16])
    if draw.random() < 0.5:
        of_rank = [[e for e in range(E) if draw.random() < 0.5 or e % ranks == r] for r in range(ranks)]
        more["expert_map"] = of_rank
    return more


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

    def combine(self, outputs, routed, add=(None,), weighted=True):
        return [self.d.combine(outputs[0], routed[0], add=add[0], weighted=weighted)]

    def check(self) -> None:
        self.d.check()


def results_of(make: Callable[..., Any], several: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[list[Any]]:
    """Of each rank, of dispatchers of some ranks or of all, which have lists."""
    collected: list[list[Any]] = [[] for _ in ranks]
    for more in several:
        d, settings = make(**more), {**SETTINGS, **more}
        for i in range(2):
            by_rank = trained(d, settings, [odd_tokens(settings, rank, i) for rank in ranks])
            for of_rank, got in zip(collected, by_rank, strict=True):
                of_rank.append(got)
        tokens = [odd_tokens(settings, rank, 2) for rank in ranks]
        routed = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])
        for of_rank, r in zip(collected, routed, strict=True):
            of_rank.append([raw(r.load().per_source), raw(r.dropped)])
        d.check()
    return collected


def in_windows(rank: int, several: Sequence[dict[str, Any]], more: dict[str, Any]) -> list[Any]:
    def made(**given_here: Any) -> Listed:
        return Listed(
            TokenDispatcher(**with_options(**{**SETTINGS, **more, **given_here}, transport="symmetric_memory"))
        )

    return results_of(made, several, [rank])[0]


def on_virtual_ranks(ranks: int, several: Sequence[dict[str, Any]]) -> list[list[Any]]:
    def made(**more: Any) -> shardweave.moe.VirtualTokenDispatcher:
        return shardweave.moe.VirtualTokenDispatcher(ranks, **with_options(**{**SETTINGS, **more}))

    return results_of(made, several, range(ranks))


# Rows pushed for each expert, and once for each rank.
WAYS: list[dict[str, Any]] = [{}, {"dedupe": True}]


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_unusual_settings_equal_virtual_ranks(more: dict[str, Any]) -> None:
    several = [*ODD.values()]
    assert run_ranks(in_windows, 3, several, more) == on_virtual_ranks(3, several)


@pytest.mark.long
@pytest.mark.parametrize("more", WAYS, ids=str)
def test_random_settings_equal_virtual_ranks(more: dict[str, Any]) -> None:
    several = [random_settings(seed, 4) for seed in range(LONG_PARTS)]
    found, want = run_ranks(in_windows, 4, several, more), on_virtual_ranks(4, several)
    for rank in range(4):
        for i, (got, wanted) in enumerate(zip(found[rank], want[rank], strict=True)):
            assert got == wanted, (rank, several[i // 3])


def again_in_backward(rank: int, how: str, more: dict[str, Any]) -> list[bytes]:
    """Two layers, compiled or checkpointed: one rank compiles them."""
    d = TokenDispatcher(**with_options(**SETTINGS, **more, transport="symmetric_memory"))

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


@pytest.mark.parametrize(
    "how, size, more",
    [
        ("checkpointed", 3, {}),
        pytest.param("checkpointed", 2, {"dedupe": True}, marks=pytest.mark.long),
        pytest.param("compiled", 2, {"dedupe": True}, marks=pytest.mark.long),
        pytest.param("compiled", 4, {"two_level": True, "chunk_capacity": 1 << 20}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_compiled_and_checkpointed_equal_eager(how: str, size: int, more: dict[str, Any]) -> None:
    nodes = {"SHARDWEAVE_NODE_SIZE": "2"} if "two_level" in more else {}
    got, want = (run_ranks(again_in_backward, size, each, more, environment=nodes) for each in (how, "eager"))
    assert got == want


def dispatches_late(rank: int, disagrees: bool) -> None:
    """A redistribution has left floats where counts will be."""
    d = TokenDispatcher(**with_options(**SETTINGS, transport="symmetric_memory"))
    other = TokenDispatcher(**with_options(**{**SETTINGS, "num_experts": 40}, transport="symmetric_memory"))
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


def never_combines(rank: int, more: dict[str, Any]) -> None:
    d = TokenDispatcher(**with_options(**SETTINGS, **more, transport="symmetric_memory"))
    t = given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    if rank != 1:
        out = torch.zeros(len(t.x), H, dtype=t.x.dtype)
        try:
            d.combine(routed.x, routed, out=out)
        finally:
            assert out.isnan().all()


@pytest.mark.parametrize("more", [{}, pytest.param({"dedupe": True}, marks=pytest.mark.long)], ids=str)
def test_missing_rank_is_named_and_outputs_overwritten(more: dict[str, Any]) -> None:
    ends = end_ranks(never_combines, 3, more, environment={"SHARDWEAVE_TIMEOUT": "10"})
    assert ends[1].error is None
    for rank in (0, 2):
        assert ends[rank].error in ("MeetingTimeoutError", "PeerError"), ends[rank]
        assert "outputs since then are overwritten" in ends[rank].message
    texts = ("rank 1 did not arrive within 10 s", "rank 1 is gone")
    assert any(text in ends[rank].message for text in texts for rank in (0, 2))


def explained(rank: int) -> str:
    text = TokenDispatcher(**with_options(**SETTINGS, transport="symmetric_memory")).explain()
    dist.barrier()  # ranks that have ended cannot be mapped
    return text


def test_explain_states_window() -> None:
    d = shardweave.moe.VirtualTokenDispatcher(2, **with_options(**SETTINGS))
    (text, _) = run_ranks(explained, 2)
    # Counts of 7 words for 2 ranks, and 88 rows of 48 bytes and a weight, each from a multiple of 256 bytes on.
    rows = d.config.rows
    want = 256 + -(-rows * H * 2 // 256) * 256 + -(-rows * 4 // 256) * 256
    assert "symmetric_memory" in text and f"{window_size(want, exact=True):,}  window" in text, text
    assert f"{rows * H * 2:,}  buffers that peers write rows into, pooled_buffers=1" in text, text
    # A model has one window, and rows and routing for each layer.
    once = window_size(want, exact=True) + rows * (H * 2 + 4)
    assert f"a model with n of these layers, in training: {once:,} + n * " in text, text


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
    d = TokenDispatcher(**with_options(**SETTINGS, device="cuda", transport="symmetric_memory", dedupe=dedupe))
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
