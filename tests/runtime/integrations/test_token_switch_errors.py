"""Errors of TokenSwitch: overflow, bad ids, refused arguments, ranks that make different calls, an older torch."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks, run_ranks
from test_token_switch import LAYOUTS, THERE, H, K, needs_token_switch, switch_of

from shardweave.errors import ArgumentError, CapacityError, DisagreementError


@pytest.mark.plan
@pytest.mark.skipif(THERE, reason="torch has torch.distributed._token_switch, with layouts")
def test_name_is_absent_before_torch_2_15():
    with pytest.raises(ImportError, match=r"TokenSwitch: torch is 2\.1.*; allowed: 2\.15 or newer"):
        importlib.import_module("shardweave.integrations.token_switch")


def overflowing(rank: int, transport: str) -> list[str]:
    texts = []
    for layout in LAYOUTS:
        ids = torch.full((4, K), 0 if rank == 1 else -1)
        lost = 2 if layout == "flat" else 4 * K - 2
        text = rf"routing 0: {lost} rows exceeded the capacity \(max_recv_tokens_per_rank: 2\), all ranks together"
        switch = switch_of(4, 2, transport=transport)
        assert int(switch.create_routing(ids, layout=layout).handle.dropped) == lost
        with pytest.raises(CapacityError, match=text) as raised:
            switch.check()
        switch.check()  # each is raised once
        switch.create_routing(ids, layout=layout)
        switch.create_routing(torch.full((1, 1), -1), layout="flat")
        with pytest.raises(CapacityError, match="routing 1: "):
            switch.create_routing(ids, layout=layout)
        texts.append(str(raised.value))
        bad = torch.tensor([[0, 4, -2], [4, 2**31 - 1, 0]], dtype=torch.int32)
        routed = switch.create_routing(bad, layout=layout)
        assert int(routed.handle.bad_ids) == 4 * dist.get_world_size()
        with pytest.raises(CapacityError, match=rf"and {4 * dist.get_world_size()} ids were outside -1 to 3"):
            switch.check()
        # They act as -1.
        drop = switch_of(4, 40, overflow="drop", transport=transport)
        x, weights, none = torch.randn(2, H), torch.rand(2, 3), torch.tensor([[0, -1, -1], [-1, -1, 0]])
        for got, want in zip(
            *[drop.dispatch(drop.create_routing(i, layout=layout), x, weights, 40) for i in (bad.long(), none)],
            strict=True,
        ):
            assert got is want is None or torch.equal(got, want)
        drop.check()
    return texts


@needs_token_switch
@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("symmetric_memory", marks=pytest.mark.long)])
def test_overflow_and_bad_ids(transport):
    texts = run_ranks(overflowing, 2, transport)
    assert texts[0] == texts[1]


def refusals(rank: int) -> None:
    """All ranks refuse, and the next call works."""
    switch, other = switch_of(5, 8), switch_of(5, 8)
    flat = switch.create_routing(torch.full((2, K), -1), layout="flat")
    major = switch.create_routing(torch.full((2, K), -1), layout="expert_major")
    x, weights, ids, counts = torch.zeros(2, H), torch.zeros(2, K), torch.full((2, K), -1), torch.zeros(3).int()
    rows, of_rows, of_ids = torch.zeros(8, H), torch.zeros(8, K), torch.zeros(8, K).long()

    def make(*given, **named):
        from shardweave.integrations.token_switch import TokenSwitch  # needs torch 2.15

        return TokenSwitch(*given, **named)

    def inference(x):
        with torch.inference_mode():
            return x.clone()

    def out(*parts):
        return lambda: switch.dispatch(flat, x, weights, out=parts)

    calls = [
        (lambda: make(3, 5, 9, 8, 64), "process_group: 3; allowed: a process group with this rank, a 1-D DeviceMesh"),
        (lambda: make(None, 0, 9, 8, 64), "num_experts: 0; allowed: a whole number, 1 to"),
        (lambda: make(None, 5, -1, 8, 64), "max_dispatch_tokens_per_rank: -1; allowed: a whole number, 0 to"),
        (lambda: make(None, 5, 9, 1.5, 64), "max_recv_tokens_per_rank: 1.5; allowed: a whole number, 0 to"),
        (lambda: make(None, 5, 9, 8, 0), "max_token_bytes: 0; allowed: a whole number, 1 to"),
        (lambda: make(None, 5, 9, 8, True), "max_token_bytes: True; allowed"),
        (lambda: make(None, 5, 9, 8, 64, overflow="trap"), "overflow: 'trap'; allowed: 'raise', 'drop'"),
        (
            lambda: switch.create_routing(ids, layout="rank_major"),
            "layout: 'rank_major'; allowed: 'flat', 'expert_major'",
        ),
        (lambda: switch.create_routing([[0]], layout="flat"), r"topk_idx: \[\[0\]\]; allowed: int32 or int64"),
        (lambda: switch.create_routing(weights, layout="flat"), "topk_idx: torch.float32 of shape"),
        (lambda: switch.create_routing(ids[0], layout="flat"), r"topk_idx: torch.int64 of shape \(3,\)"),
        (lambda: switch.create_routing(ids[:, :0], layout="flat"), r"topk_idx: .* \(2, 0\).* K 1 to 32"),
        (lambda: switch.create_routing(ids.repeat(5, 1), layout="flat"), "T up to max_dispatch_tokens_per_rank, 9"),
        (lambda: switch.create_routing(ids, counts[:1], layout="flat"), r"per_expert_token_counts: .* n at least [23]"),
        (lambda: switch.create_routing(ids, counts.long(), layout="flat"), "per_expert_token_counts: torch.int64"),
        (lambda: switch.create_routing(ids, counts[:1].expand(5), layout="flat"), "per_expert.* without overlap"),
        (
            lambda: switch.dispatch(None, x, weights, 8),
            "routing: None; allowed: a result of this switch's create_routing",
        ),
        (lambda: other.dispatch(flat, x, weights, 8), "routing: of another switch; allowed: a result of this switch's"),
        (lambda: other.combine(major, rows), "routing: of another switch; allowed: a result of this switch's"),
        (lambda: switch.dispatch(flat, x, weights), "max_recv_tokens: None, without out; allowed"),
        (lambda: switch.dispatch(flat, x, weights, 7), "max_recv_tokens: 7; allowed: a whole number, 8 to"),
        (lambda: switch.dispatch(flat, x[:1], weights, 8), r"tokens: .* of shape \(1, 12\).*; allowed: .* \[2, H\]"),
        (
            lambda: switch.dispatch(flat, x.double(), weights, 8),
            "tokens: torch.float64 .* allowed: float32 or bfloat16",
        ),
        (lambda: switch.dispatch(flat, x.repeat(1, 2), weights, 8), r"rows of 1 to 56 bytes \(max_token_bytes\)"),
        (lambda: switch.dispatch(flat, x[:, :0], weights, 8), r"tokens: .* of shape \(2, 0\)"),
        (lambda: switch.dispatch(flat, x.to("meta"), weights, 8), "tokens: on meta; allowed: cpu"),
        (lambda: switch.dispatch(flat, x, weights[:, :1], 8), r"topk_weights: .* \(2, 1\).*; allowed: .* \(2, 3\)"),
        (lambda: switch.dispatch(flat, x, ids, 8), "topk_weights: torch.int64"),
        (out(rows, of_rows), r"out: 2 of them; allowed: \(out_tokens, out_topk_weights, out_topk_idx\)"),
        (out(rows[:7], of_rows, of_ids), r"out\[0\]: 7 rows; allowed: at least max_recv_tokens_per_rank, 8"),
        (out(rows[:, :8], of_rows, of_ids), r"out\[0\]: .* allowed: float32 of shape \[M, 12\]"),
        (out(rows.half(), of_rows, of_ids), r"out\[0\]: torch.float16"),
        (out(rows[:1].expand(8, H), of_rows, of_ids), r"out\[0\]: .* without overlap"),
        (out(rows, of_rows[:, 0], of_ids), r"out\[1\]: .* of shape \[8, 3\]"),
        (out(rows, of_rows, of_rows), r"out\[2\]: torch.float32 .* allowed: int64 or int32"),
        (
            lambda: switch.dispatch(major, x, weights, out=(rows, of_rows[:, 0], of_ids)),
            r"out\[2\]: a Tensor; allowed in the expert-major layout: None",
        ),
        (lambda: switch.combine(major, rows[0]), r"expert_tokens: .* of shape \(12,\)"),
        (lambda: switch.combine(major, rows.long()), "expert_tokens: torch.int64"),
        (
            lambda: switch.combine(major, rows, out=rows),
            r"out: .* of shape \(8, 12\).* allowed: float32 of shape \[2, 12\]",
        ),
        (lambda: switch.combine(major, rows, out=x.half()), "out: torch.float16"),
        # Memory that is read and written.
        (lambda: switch.combine(major, rows, out=rows[:2]), "out: overlaps the memory of expert_tokens; allowed"),
        (lambda: switch.combine(major, rows[1:], out=rows[:2]), "out: overlaps the memory of expert_tokens; allowed"),
        (
            lambda: switch.dispatch(flat, rows[-2:], weights, out=(rows, None, None)),
            r"out\[0\]: overlaps the memory of tokens; allowed: memory of its own",
        ),
        (
            lambda: switch.dispatch(flat, x, of_rows[:2], out=(rows, of_rows, None)),
            r"out\[1\]: overlaps the memory of topk_weights; allowed",
        ),
        (out(rows, rows.view(-1)[: 8 * K].view(8, K), None), r"out\[1\]: overlaps the memory of out\[0\]; allowed"),
        (out(rows, of_rows, of_rows.view(torch.int32)), r"out\[2\]: overlaps the memory of out\[1\]; allowed"),
        # Inference tensors cannot be written to outside of inference mode.
        (
            lambda: switch.create_routing(ids, inference(counts), layout="flat"),
            "per_expert_token_counts: made in inference mode; allowed outside of it: a tensor made outside of it",
        ),
        (out(inference(rows), None, None), r"out\[0\]: made in inference mode; allowed"),
        (out(rows, inference(of_rows), None), r"out\[1\]: made in inference mode; allowed"),
        (out(rows, None, inference(of_ids)), r"out\[2\]: made in inference mode; allowed"),
        (lambda: switch.combine(major, rows, out=inference(x)), "out: made in inference mode; allowed"),
    ]
    for i, (call, text) in enumerate(calls):
        with pytest.raises(ArgumentError, match=text):
            call()
        if i % 9 == 0:
            assert switch.dispatch(flat, x, weights, 8)[2].eq(-1).all()
    assert torch.equal(switch.combine(major, rows), x)
    # Adjacent memory, and inference tensors in inference mode, are allowed.
    together = torch.zeros(10, H)
    assert torch.equal(switch.combine(major, together[:8], out=together[8:]), x)
    switch.dispatch(flat, together[8:], weights, out=(together[:8], None, None))
    with torch.inference_mode():
        switch.create_routing(ids, inference(counts), layout="flat")
        assert torch.equal(switch.combine(major, rows, out=inference(x)), x)


@needs_token_switch
@pytest.mark.multi
def test_refused_arguments():
    run_ranks(refusals, 2)


def refused_by_one(rank: int) -> None:
    switch, ids = switch_of(5, 8), torch.full((2, K), -1)
    switch.create_routing(ids, layout="flat" if rank == 0 else "batched")


def refused_and_repeated(rank: int, transport: str) -> None:
    """One rank has too many tokens for a routing, or of a dispatch, whose dispatchers are made then."""
    switch = switch_of(5, 8, transport=transport)
    ids = torch.zeros((2, K), dtype=torch.int64)
    refuses = rank == 0
    for layout in LAYOUTS:
        for given in (ids.repeat(5, 1) if refuses else ids, ids):
            try:
                routing = switch.create_routing(given, layout=layout)
            except (ArgumentError, DisagreementError) as error:
                assert given is not ids or not refuses and error.recoverable, error
                assert refuses or "rank 0 refused its arguments" in str(error) and "T up to max_disp" in str(error)
        if transport == "shared_memory":  # elsewhere rows move at once
            with pytest.raises(ArgumentError if refuses else DisagreementError):
                switch.dispatch(routing, torch.zeros(3 if refuses else 2, 6), torch.zeros(2, K), 8)
        rows, *_ = switch.dispatch(routing, torch.ones(2, 6), torch.ones(2, K), 8)
        assert rows.shape == (8, 6)


def other_layout(rank: int) -> None:
    switch_of(5, 8).create_routing(torch.full((2, K), -1), layout=LAYOUTS[rank])


def other_hidden(rank: int) -> None:
    switch = switch_of(5, 8)
    routed = switch.create_routing(torch.full((2, K), -1), layout="flat")
    switch.dispatch(routed, torch.zeros(2, 4 + rank), torch.zeros(2, K), 8)


@needs_token_switch
@pytest.mark.multi
def test_a_refusal_or_another_call_reaches_the_peers():
    reported = {"DisagreementError", "PeerError", "TransportError"}
    first, second = end_ranks(refused_by_one, 2, environment={"SHARDWEAVE_TIMEOUT": "40"})
    assert second.error == "ArgumentError" and first.error in reported and "layout: 'batched'" in first.message
    for transport in ("shared_memory", "process_group"):
        run_ranks(refused_and_repeated, 2, transport, environment={"SHARDWEAVE_TIMEOUT": "40"})
    for function in (other_layout, other_hidden):
        ends = end_ranks(function, 2, environment={"SHARDWEAVE_TIMEOUT": "40"})
        assert {end.error for end in ends} <= reported, [end.message for end in ends]
