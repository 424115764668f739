"""Token dispatch in which a token crosses once for each rank: bits equal to once for each expert, and what crosses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_reference import tokens_of
from rank_processes import interpreted, run_ranks
from test_processes import SETTINGS, E, H, K, given, leaf, raw, rounds_of, virtual_rounds
from test_windows import ODD, Listed, digest, odd_tokens, trained
from torch.utils.checkpoint import checkpoint

import shardweave
from shardweave import kernels
from shardweave.errors import UnsupportedError
from shardweave.kernels.signal import signal_kernel
from shardweave.planner import MachineFigures
from shardweave.runtime.moe.config import DispatchConfig
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.transfer.dedupe import DedupedTransfer, with_dedupe
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports import machines as machines_module
from shardweave.runtime.transports.select import current_transports

pytestmark = pytest.mark.multi

KINDS = ("uniform", "zipf", "hot", "hot rank", "none", "holes")
FP8 = {"hidden": 256, "quantize": "fp8_128", "quantize_output": "fp8_128"}
MORE: dict[str, dict] = {
    "few ranks": {"top_k": 7, "zero_rows": True},  # more experts of a token than ranks, and repeated ids
    "dropped": {"capacity": 16, "expert_capacity": 9, "overflow": "drop", "top_k": 4},
    "strided": {"save": "copy", "hidden": 30, "dtype": torch.float16, "num_sms": 2},
    "float32": {"dtype": torch.float32, "hidden": 17, "pooled_buffers": 0},
}


def both(settings: dict) -> list[TokenDispatcher]:
    ds = [TokenDispatcher(**settings, transport="symmetric_memory", dedupe=dedupe) for dedupe in (False, True)]
    assert [isinstance(d.transfers[0], DedupedTransfer) for d in ds] == [False, True]
    return ds


def unusual_settings(rank: int) -> None:
    for given_here in (*ODD.values(), *MORE.values()):
        settings = {**SETTINGS, **given_here}
        ds = both(settings)
        for i in range(2):
            tokens = odd_tokens(settings, rank, i)
            one, once = (trained(Listed(d), settings, [tokens]) for d in ds)
            assert one == once, given_here
        ds[1].check()


def routings(rank: int, seeds: int) -> None:
    """Random routings, with unequal numbers of tokens."""
    settings = {**SETTINGS, "num_experts": 11, "top_k": 5}
    ds = both(settings)
    for seed in range(seeds):
        for i, kind in enumerate(KINDS):
            count = (5 * rank + 3 * i + seed) % 13
            tokens = tokens_of(rank, count, 5, 11, H, torch.bfloat16, kind, seed)
            one, once = (trained(Listed(d), settings, [tokens]) for d in ds)
            assert one == once, (kind, seed)


def layer(d: TokenDispatcher, rank: int, i: int, phases: bool = False) -> list[bytes]:
    """The result of a layer and its gradients, also of experts that apply weights; quantized or not."""
    hidden = d.config.hidden
    t = tokens_of(rank, (5 * rank + 3 * i) % 13, K, E, hidden, d.config.dtype, "holes", i)
    x, weights = leaf(t.x), leaf(t.weights)
    routed = d.dispatch_start(x, t.ids, weights).finish() if phases else d.dispatch(x, t.ids, weights)
    rows = routed.dequantized() if d.config.quantize else routed.x
    output = torch.tanh(rows)
    y = d.combine_start(output, routed, add=x).finish() if phases else d.combine(output, routed, add=x)
    unweighted = d.combine(output * routed.weights[..., None].to(rows.dtype), routed, weighted=False)
    (y + unweighted).backward(t.gradient)
    own = int(routed.num_rows)
    rest = [raw(v) for v in (routed.offsets, routed.counts, routed.x[:own].view(torch.uint8), routed.weights[:own])]
    return [raw(y), raw(unweighted), raw(x.grad), raw(weights.grad), *rest]


def layers(rank: int, settings: dict, phases: bool = False) -> None:
    ds = both({**SETTINGS, **settings})
    for i in range(3):
        assert layer(ds[0], rank, i) == layer(ds[1], rank, i, phases), (settings, i)


def payloads(rank: int) -> None:
    """Rows of another width than the experts' output; the same launches again."""
    ds = both({**SETTINGS, "payloads": [(torch.uint8, 24), (torch.float32, 3), (torch.int64, ())]})
    for i in range(3):
        t = given(rank, i)
        parts = [t.x.view(torch.uint8)[:, :24], torch.rand(len(t.x), 3), torch.arange(len(t.x))]
        collected = []
        for d in ds:
            routed = d.dispatch(parts, t.ids, t.weights)
            n = int(routed.num_rows)
            own = [payload[:n] for payload in routed.payloads]
            output = torch.arange(d.config.rows * H).view(-1, H).to(torch.bfloat16)
            collected.append([*map(raw, own), raw(d.combine(output, routed))])
        assert collected[0] == collected[1]


def all_of_it(rank: int) -> list[bytes]:
    unusual_settings(rank)
    routings(rank, 1)
    layers(rank, {}, phases=True)
    layers(rank, FP8)
    payloads(rank)
    return rounds_of(rank, "symmetric_memory", dedupe=True)


def test_results_equal_those_without_and_virtual_ranks() -> None:
    assert run_ranks(all_of_it, 3, timeout=240) == virtual_rounds(3)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_many_routings(size: int) -> None:
    run_ranks(routings, size, 12, timeout=600)


def in_the_interpreter(rank: int) -> str:
    assert kernels.interpreted(signal_kernel)
    crossing(rank)
    without_room(rank)
    return digest(rounds_of(rank, "symmetric_memory", rounds=1, dedupe=True))


def without_room(rank: int) -> None:
    """A dispatcher with receive buffers of no rows."""
    d = TokenDispatcher(**{**SETTINGS, "max_tokens": 0, "align": 1}, transport="symmetric_memory", dedupe=True)
    assert d.config.rows == 0
    t = tokens_of(rank, 0, SETTINGS["top_k"], E, H, torch.bfloat16, "uniform")
    for _ in range(2):  # the second one may make the launches of the first again
        routed = d.dispatch(t.x, t.ids, t.weights)
        assert d.combine(routed.x, routed).shape == (0, H) and int(routed.num_rows) == 0


def crossing(rank: int) -> None:
    """Count what kernels load from the memory of other ranks, and store there: a row for each token and rank that has
    experts of it, counts, and tables."""
    from accesses import Counts

    ranks, settings = dist.get_world_size(), {**SETTINGS, "top_k": 4}
    d = TokenDispatcher(**settings, transport="symmetric_memory", dedupe=True)
    (transfer,) = d.transfers
    theirs = [data for peer, data in transfer._window.data.items() if peer != rank]  # type: ignore[attr-defined]
    low, high = d.config.bounds[rank : rank + 2]
    row, tables = H * 2, (ranks - 1) * (d.config.bounds[-1] + 2 + d.config.max_tokens * 4 * 2) * 4
    for i, kind in enumerate(("uniform", "hot", "holes", "holes")):  # the last two make the same launches
        tokens = [tokens_of(r, 3 + 4 * r, 4, E, H, torch.bfloat16, kind, i) for r in range(ranks)]
        here = [((t.ids >= low) & (t.ids < high)).any(1).sum() for r, t in enumerate(tokens) if r != rank]
        t, crossed = tokens[rank], int(sum(here)) * row
        with Counts(theirs) as counts:
            routed = d.dispatch(t.x, t.ids, t.weights)
        assert counts.found["load", True] == crossed and counts.found["store", True] == tables
        with Counts(theirs) as counts:
            d.combine(routed.x, routed)
        assert counts.found["load", True] == 0 and counts.found["store", True] == crossed


def test_interpreted_kernels_equal_virtual_ranks_and_bytes_cross_once() -> None:
    virtual = "[t.digest(rounds) for rounds in t.virtual_rounds(2, rounds=1)]"
    assert interpreted("test_dedupe", f"t.run_ranks(t.in_the_interpreter, 2) == {virtual}") == "True"


@pytest.mark.long
@pytest.mark.parametrize("call", ["unusual_settings, 3", "routings, 2, 1", "layers, 2, t.FP8", "payloads, 2"])
def test_interpreted_kernels_equal_those_once_per_expert(call: str) -> None:
    assert interpreted("test_dedupe", f"set(t.run_ranks(t.{call}, timeout=280))") == "{None}"


def again_in_backward(rank: int, how: str, dedupe: bool) -> list[bytes]:
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory", dedupe=dedupe)

    def two_layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            routed = d.dispatch(x, ids, weights)
            x = d.combine(torch.tanh(routed.x), routed, add=x)
        return x

    run: Any = torch.compile(two_layers, backend="aot_eager", fullgraph=True) if how == "compiled" else two_layers
    collected = []
    for i in range(2):
        t = given(rank, i)
        x, weights = leaf(t.x), leaf(t.weights)
        if how == "checkpointed":
            y = checkpoint(two_layers, x, t.ids, weights, use_reentrant=False)
        else:
            y = run(x, t.ids, weights)
        y.backward(t.gradient)
        collected += [raw(y), raw(x.grad), raw(weights.grad)]
    return collected


@pytest.mark.long
@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_equal_eager(how: str) -> None:
    assert run_ranks(again_in_backward, 2, how, True) == run_ranks(again_in_backward, 2, "eager", False)


def stated(rank: int) -> tuple[str, int, str]:
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory", dedupe=True)
    before = stats().copies.total()
    t = given(rank, 1)
    with torch.no_grad():
        routed = d.dispatch(t.x, t.ids, t.weights)
        d.combine(routed.output_buffer().copy_(routed.x), routed)
    by_default = TokenDispatcher(**SETTINGS, transport="symmetric_memory").explain()
    return d.explain(), stats().copies.total() - before, by_default


def test_explain_states_choice_and_bytes() -> None:
    (text, copies, by_default), _ = run_ranks(stated, 2)
    assert "once for each rank inside a node: requested" in text and "pooled_buffers" not in text, text
    assert "tokens fetched once by each rank" in text and copies == 0
    c = shardweave.moe.VirtualTokenDispatcher(2, **SETTINGS).config
    # With even routing 5 experts of 3 on rank 0 and 2 on rank 1: all tokens have one on rank 0, 9 of 10 on rank 1.
    assert f"{12 * H * 2:,} {c.max_tokens * H * 2:>16,}  combine" in text, text
    assert "once for each expert inside a node: ranks share the memory" in by_default


@pytest.mark.plan
def test_default_on_gpus_is_cheaper_by_figures_of_first_rank() -> None:
    def chosen(tokens: int, **given: Any) -> tuple[bool | None, str]:
        config = DispatchConfig(8, num_experts=256, top_k=8, hidden=7168, max_tokens=tokens, **given)
        config, why = with_dedupe(config, torch.device("cuda"), True, lambda: MachineFigures("NVIDIA H200", "RDMA"))
        return config.dedupe, why

    dedupe, why = chosen(4096)
    assert dedupe and "crosses once for each rank inside a node: the cheaper by NVIDIA H200 (nominal: NVLink 4" in why
    assert "1332 us and 545,915,820 bytes from a rank to others" in why and "2045 us and 822,198,272 once per" in why
    dedupe, why = chosen(16)
    assert dedupe is False and "once for each expert inside a node: the cheaper by" in why
    assert chosen(16, dedupe=True)[0] and chosen(4096, dedupe=False) == (
        False, "a token crosses once for each expert inside a node: requested"
    )  # fmt: skip


def figures(rank: int) -> tuple[str, int]:
    """Those of rank 1, which has others than rank 0 and 2."""
    machines_module.machine_figures = lambda device: MachineFigures(device.type, nics=1 + rank)
    found = current_transports().machines.figures_of_first((1, 2) if rank else (0,), torch.device("cpu"))
    dist.barrier()  # the store ends with rank 0
    return found.device_source, found.nics


def test_figures_are_those_of_first_rank() -> None:
    source = "cpu (assumed: a core copies 10 GB/s in shared memory)"
    assert run_ranks(figures, 3) == [(source, 1), (source, 2), (source, 2)]


def refused(rank: int) -> str:
    with pytest.raises(UnsupportedError, match="dedupe: True, but only") as raised:
        TokenDispatcher(**SETTINGS, dedupe=True)
    return str(raised.value)


def test_unsupported_on_other_transports() -> None:
    with pytest.raises(UnsupportedError, match="virtual ranks have no windows"):
        shardweave.moe.VirtualTokenDispatcher(2, **SETTINGS, dedupe=True)
    assert all("symmetric_memory" in text for text in run_ranks(refused, 2))


def never_combines(rank: int) -> None:
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory", dedupe=True)
    t = given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    if rank != 1:
        out = torch.zeros(len(t.x), H, dtype=t.x.dtype)
        try:
            d.combine(routed.x, routed, out=out)
        finally:
            assert out.isnan().all()


@pytest.mark.long
def test_outputs_are_overwritten_where_a_rank_is_missing() -> None:
    from rank_processes import end_ranks

    ends = end_ranks(never_combines, 2, environment={"SHARDWEAVE_TIMEOUT": "3"})
    assert ends[1].error is None and ends[0].error in ("MeetingTimeoutError", "PeerError"), ends
