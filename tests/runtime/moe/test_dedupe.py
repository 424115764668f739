"""Token dispatch in which a token crosses once for each rank: bits equal to once for each expert, and what crosses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import interpreted, run_ranks
from test_processes import SETTINGS, E, H, K, given, leaf, raw, rounds_of, virtual_rounds
from test_symmetric import transport_of
from test_windows import Listed, digest, trained

import shardweave
from shardweave import kernels
from shardweave.errors import UnsupportedError
from shardweave.kernels.signal import signal_kernel
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.statistics import stats

pytestmark = pytest.mark.multi

KINDS = ("uniform", "zipf", "hot", "hot rank", "none", "holes")
FP8 = {"hidden": 256, "quantize": "fp8_128", "quantize_output": "fp8_128"}


def both(settings: dict) -> list[TokenDispatcher]:
    ds = [
        TokenDispatcher(**with_options(**settings, transport="symmetric_memory", dedupe=dedupe))
        for dedupe in (False, True)
    ]
    assert ["once for each rank inside a node" in d.explain() for d in ds] == [False, True]
    return ds


def routings(rank: int) -> None:
    """Random routings, with unequal numbers of tokens."""
    settings = {**SETTINGS, "num_experts": 11, "top_k": 5}
    ds = both(settings)
    for i, kind in enumerate(KINDS):
        tokens = tokens_of(rank, (5 * rank + 3 * i) % 13, 5, 11, H, torch.bfloat16, kind)
        one, once = (trained(Listed(d), settings, [tokens]) for d in ds)
        assert one == once, kind


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


def all_of_it(rank: int) -> list[bytes]:
    routings(rank)
    layers(rank, {}, phases=True)
    layers(rank, FP8)
    return rounds_of(rank, "symmetric_memory", dedupe=True)


def test_results_equal_those_without_and_virtual_ranks() -> None:
    assert run_ranks(all_of_it, 3, timeout=240) == virtual_rounds(3)


def in_the_interpreter(rank: int) -> str:
    assert kernels.interpreted(signal_kernel)
    crossing(rank)
    without_room(rank)
    return digest(rounds_of(rank, "symmetric_memory", rounds=1, dedupe=True))


def without_room(rank: int) -> None:
    """A dispatcher with receive buffers of no rows."""
    d = TokenDispatcher(
        **with_options(**{**SETTINGS, "max_tokens": 0, "align": 1}, transport="symmetric_memory", dedupe=True)
    )
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
    d = TokenDispatcher(**with_options(**settings, transport="symmetric_memory", dedupe=True))
    theirs = [data for window in transport_of("cpu")._all for peer, data in window.data.items() if peer != rank]
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
def test_interpreted_kernels_equal_those_once_per_expert() -> None:
    assert interpreted("test_dedupe", "set(t.run_ranks(t.layers, 2, t.FP8, timeout=280))") == "{None}"


def stated(rank: int) -> tuple[str, int, str]:
    d = TokenDispatcher(**with_options(**SETTINGS, transport="symmetric_memory", dedupe=True))
    before = stats().copies.total()
    t = given(rank, 1)
    with torch.no_grad():
        routed = d.dispatch(t.x, t.ids, t.weights)
        d.combine(routed.output_buffer().copy_(routed.x), routed)
    by_default = TokenDispatcher(**with_options(**SETTINGS, transport="symmetric_memory")).explain()
    return d.explain(), stats().copies.total() - before, by_default


def test_explain_states_choice_and_bytes() -> None:
    (text, copies, by_default), _ = run_ranks(stated, 2)
    assert "once for each rank inside a node: requested" in text and "pooled_buffers" not in text, text
    assert "tokens fetched once by each rank" in text and copies == 0
    c = shardweave.moe.VirtualTokenDispatcher(2, **with_options(**SETTINGS)).config
    # With even routing 5 experts of 3 on rank 0 and 2 on rank 1: all tokens have one on rank 0, 9 of 10 on rank 1.
    assert f"{12 * H * 2:,} {c.max_tokens * H * 2:>16,}  combine" in text, text
    assert "once for each expert inside a node: ranks share the memory" in by_default


def refused(rank: int) -> str:
    with pytest.raises(UnsupportedError, match="dedupe: True, but only") as raised:
        TokenDispatcher(**with_options(**SETTINGS, dedupe=True))
    return str(raised.value)


def test_unsupported_on_other_transports() -> None:
    with pytest.raises(UnsupportedError, match="virtual ranks have no windows"):
        shardweave.moe.VirtualTokenDispatcher(2, **with_options(**SETTINGS, dedupe=True))
    assert all("symmetric_memory" in text for text in run_ranks(refused, 2))
