"""`python -m shardweave dispatch`: what it says, what it refuses, and that as many bytes do travel."""

from __future__ import annotations

import json

import pytest
import torch

from shardweave.__main__ import main
from shardweave.runtime.moe import transfer_sendrecv
from shardweave.runtime.moe.report import on_wire
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer_fixed import FixedSlabRank
from shardweave.runtime.moe.transfer_push import PushingRank
from shardweave.runtime.moe.transfer_sendrecv import SlabRank
from shardweave.runtime.moe.transfer_window import WindowRank

ASKED = ["dispatch", "--ranks", "8", "--experts", "256", "--top-k", "8", "--hidden", "7168", "--tokens", "4096"]
PHASES = ("dispatch", "combine", "backward of combine", "backward of dispatch")
pytestmark = pytest.mark.plan


def test_both_ways_are_stated(capsys):
    assert main([*ASKED, "--capacity", "1.25", "--align", "128", "--save", "copy"]) == 0
    said = capsys.readouterr().out
    rows = 4096 * 8 * 5 // 4
    assert f"{rows} rows for each rank (all tokens of all ranks: 262144), aligned to 128, grouped" in said
    assert "256 experts in 256 slots, 32 for each rank; top 8, hidden 7168, bfloat16" in said
    assert said.count(f"{rows * (7168 * 2 + 4):,}  rows received, twice while they are copied") == 3
    assert f"{rows * (7168 * 2 + 4):,}  rows received, held until backward" in said  # a window is copied from
    assert said.index("rows pushed straight") < said.index("one slab of exact size")
    # Seven eighths of the rows, each with a weight; counts of 256 slots and of bad ids, with or without a word.
    entries = 4096 * 8 * 7 // 8
    for words in (1, 2):
        assert f"{entries * (7168 * 2 + 4) + 7 * (256 + words) * 4:,}  " in said
    assert f"{entries * 7168 * 2:,} " in said


def test_json_says_what_a_dispatcher_does(capsys):
    given = {"num_experts": 6, "top_k": 2, "hidden": 16, "max_tokens": 10}
    asked = ["dispatch", "--ranks", "4", "--experts", "6", "--top-k", "2", "--hidden", "16", "--tokens", "10"]
    options = ["--dtype", "float32", "--expert-capacity", "5", "--layout", "batched", "--overflow", "drop", "--json"]
    assert main([*asked, *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert given.items() <= said.items() and said["ranks"] == 4 and said["rows"] == 2 * 5
    assert (said["dtype"], said["layout"], said["overflow"], said["save"]) == ("float32", "batched", "drop", "lease")
    d = VirtualTokenDispatcher(
        4, **given, dtype=torch.float32, expert_capacity=5, layout="batched", overflow="drop", one_sided=False
    )
    forms = (PushingRank, None), (WindowRank, None), (SlabRank, None), (FixedSlabRank, 20)  # room for all
    for way, (kind, capacity) in zip(said["ways"], forms, strict=True):
        assert way["memory"] == kind.nbytes(d.layout, capacity)
        wire = {what: (n["even"], n["most"]) for what, n in way["wire"].items()}
        assert wire == on_wire(d.layout, kind, capacity)
    assert all(f"{n:,}" in d.explain() for n in said["ways"][2]["wire"]["dispatch"].values())


@pytest.mark.parametrize(
    "options, text",
    [
        (["--top-k", "33"], "top_k: 33; allowed: a whole number, 1 to 32"),
        (["--experts", "0"], "num_experts: 0"),
        (["--dtype", "int8"], "dtype: int8; allowed: torch.float32"),
        (["--capacity", "much"], "capacity: 'much'; allowed: rows, such as 4096, or a factor"),
        (["--capacity", "nan"], "capacity: nan"),
        (["--slab-capacity", "-1"], "slab_capacity: -1"),
        (["--capacity", "3", "--layout", "batched"], "capacity: 3; batched"),
        (["--layout", "ragged"], "layout: 'ragged'"),
        (["--save", "all"], "save: 'all'"),
        (["--overflow", "ignore"], "overflow: 'ignore'"),
        (["--align", "0"], "align: 0"),
        (["--experts", "4"], "top_k: 8 of 4 experts; allowed: up to 4"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_arguments_are_one_line(capsys, options, text):
    assert main([*ASKED, *options]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"error: {text}") and error.count("\n") == 1


def test_one_node_is_one(capsys):
    for ranks, nodes in (("8", "1 node "), ("9", "2 nodes ")):
        assert main(["dispatch", "--ranks", ranks, *ASKED[3:], "--dtype", "bf16"]) == 0
        assert f"the cheaper on {nodes}by" in capsys.readouterr().out
    assert main(["dispatch", "--ranks", "1", *ASKED[3:]]) == 0 and "over 1 rank:" in capsys.readouterr().out


@pytest.mark.parametrize("save", ["lease", "redispatch"])
@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("limits", [{}, {"capacity": 12}, {"expert_capacity": 3}, {"slab_capacity": 5}], ids=str)
def test_as_many_bytes_are_sent(monkeypatch, save, top, limits):
    """By slabs, of which each byte is handed over: of even routing, and of one rank alone that sends all it has."""
    ranks, tokens, k, hidden = 3, 6, 2, 8
    d = VirtualTokenDispatcher(
        ranks, num_experts=6, top_k=k, hidden=hidden, max_tokens=tokens, dtype=torch.float32, save=save,
        overflow="drop", one_sided=False, **limits,
    )  # fmt: skip
    sent, phase = dict.fromkeys(PHASES, 0), ""

    def counted(sends, receives, token):
        sent[phase] += sum(len(data) for _, data in sends)
        return made(sends, receives, token)

    made = transfer_sendrecv.Transfer
    monkeypatch.setattr(transfer_sendrecv, "Transfer", counted)
    numbers = torch.arange(tokens * k).view(tokens, k)
    # On top: rank 0 alone has tokens, for all experts but its own.
    ids = [numbers % 4 + 2 if top else numbers % 6] * ranks
    counts = [tokens, 0, 0] if top else [tokens] * ranks
    xs = [torch.ones(n, hidden, requires_grad=True) for n in counts]
    weights = [torch.ones(n, k, requires_grad=True) for n in counts]
    phase = "dispatch"
    routed = d.dispatch(xs, [i[:n] for i, n in zip(ids, counts, strict=True)], weights)
    leaves = [r.x.detach().requires_grad_() for r in routed]
    phase = "combine"
    ys = d.combine(leaves, routed)
    phase = "backward of combine"
    gradients = torch.autograd.grad(ys, leaves, [torch.ones_like(y) for y in ys], retain_graph=True)
    phase = "backward of dispatch"
    torch.autograd.backward([r.x for r in routed], gradients)

    wire = on_wire(d.layout, d.parts[0], d.layout.slab_capacity)
    assert tuple(wire) == PHASES and all(even <= most for even, most in wire.values())
    # Counts are told by all, whoever has tokens.
    told = (ranks - 1) * (6 + 1) * 4
    # Slabs of one size travel whole, also of ranks without tokens.
    alone = top and "slab_capacity" not in limits
    want = {what: most if alone else ranks * even for what, (even, most) in wire.items()}
    want["dispatch"] += 2 * told if alone else 0
    assert sent == want
    assert sent["combine"] > 0
