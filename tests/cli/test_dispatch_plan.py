"""`python -m shardweave dispatch`: its output, refused arguments, and that its bytes on the wire are those sent."""

from __future__ import annotations

import json

import pytest
import torch
from dispatcher_settings import with_options

from shardweave.__main__ import main
from shardweave.runtime.moe.report import on_wire
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer import chunk_exchange
from shardweave.runtime.moe.transfer.fixed import FixedTransfer
from shardweave.runtime.moe.transfer.push import PushTransfer
from shardweave.runtime.moe.transfer.sendrecv import SendRecvTransfer
from shardweave.runtime.moe.transfer.window import WindowTransfer

PHASES = ("dispatch", "combine", "backward of combine", "backward of dispatch")
pytestmark = pytest.mark.plan


def test_dispatch_json_equals_dispatcher(capsys):
    given = {"num_experts": 6, "top_k": 2, "hidden": 16, "max_tokens": 10}
    arguments = ["dispatch", "--ranks", "4", "--experts", "6", "--top-k", "2", "--hidden", "16", "--tokens", "10"]
    options = ["--dtype", "float32", "--expert-capacity", "5", "--layout", "batched", "--overflow", "drop", "--json"]
    assert main([*arguments, *options]) == 0
    output = json.loads(capsys.readouterr().out)
    assert given.items() <= output.items() and output["ranks"] == 4 and output["rows"] == 2 * 5
    assert (output["dtype"], output["layout"], output["overflow"], output["save"]) == (
        "float32",
        "batched",
        "drop",
        "buffer",
    )
    d = VirtualTokenDispatcher(
        4,
        **with_options(
            **given, dtype=torch.float32, expert_capacity=5, layout="batched", overflow="drop", one_sided=False
        ),
    )
    forms = (PushTransfer, None), (WindowTransfer, None), (SendRecvTransfer, None), (FixedTransfer, 20)  # room for all
    for algorithm, (kind, capacity) in zip(output["algorithms"], forms, strict=True):
        assert algorithm["memory"] == kind.nbytes(d.config, capacity)
        wire = {what: (n["even"], n["most"]) for what, n in algorithm["wire"].items()}
        assert wire == on_wire(d.config, kind, capacity)
    assert all(f"{n:,}" in d.explain() for n in output["algorithms"][2]["wire"]["dispatch"].values())


@pytest.mark.parametrize("save", ["buffer", "redispatch"])
@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("limits", [{}, {"capacity": 12}, {"expert_capacity": 3}, {"chunk_capacity": 5}], ids=str)
def test_dispatch_states_bytes_sent(monkeypatch, save, top, limits):
    """Two-sided, with even routing, and with one rank that sends all of its rows."""
    ranks, tokens, k, hidden = 3, 6, 2, 8
    d = VirtualTokenDispatcher(
        ranks,
        **with_options(
            num_experts=6,
            top_k=k,
            hidden=hidden,
            max_tokens=tokens,
            dtype=torch.float32,
            save=save,
            overflow="drop",
            one_sided=False,
            **limits,
        ),
    )
    sent, phase = dict.fromkeys(PHASES, 0), ""

    def counted(sends, receives, fingerprint, **given):
        sent[phase] += sum(len(data) for _, data in sends)
        return transfer(sends, receives, fingerprint, **given)

    transfer = chunk_exchange.Transfer
    monkeypatch.setattr(chunk_exchange, "Transfer", counted)
    numbers = torch.arange(tokens * k).view(tokens, k)
    # With `top`, only rank 0 has tokens, for all experts but its own.
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

    wire = on_wire(d.config, d.transfers[0], d.config.chunk_capacity)
    assert tuple(wire) == PHASES and all(even <= most for even, most in wire.values())
    # All ranks share counts, with or without tokens.
    counts_nbytes = (ranks - 1) * (6 + 1) * 4
    # Chunks of fixed size travel whole, also from ranks without tokens.
    alone = top and "chunk_capacity" not in limits
    want = {what: most if alone else ranks * even for what, (even, most) in wire.items()}
    want["dispatch"] += 2 * counts_nbytes if alone else 0
    assert sent == want
    assert sent["combine"] > 0
