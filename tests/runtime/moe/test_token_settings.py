"""What a token dispatcher is asked for: settings and tensors that are refused, sizes that follow, and what it says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from moe_reference import tokens_of

from shardweave.errors import ArgumentError
from shardweave.runtime.moe.config import DispatchLayout
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer_fixed import with_splits


def one(**given) -> DispatchLayout:
    settings = {
        "ranks": 2, "num_experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4, "dtype": torch.float32,
    }  # fmt: skip
    return DispatchLayout.of(**{**settings, **given})


@pytest.mark.plan
@pytest.mark.parametrize(
    "given, text",
    [
        ({"num_experts": 0}, "num_experts: 0"),
        ({"top_k": 33}, "top_k: 33"),
        ({"align": 0}, "align: 0"),
        ({"max_tokens": True}, "max_tokens: True"),
        ({"dtype": torch.float64}, "dtype: torch.float64"),
        ({"overflow": "ignore"}, "overflow: 'ignore'; allowed: 'raise', 'drop'"),
        ({"layout": "ragged"}, "layout: 'ragged'"),
        ({"splits": "even"}, "splits: 'even'; allowed: None, 'host', 'slabs'"),
        ({"splits": "host", "slab_capacity": 3}, "slab_capacity: 3 with splits='host'; allowed: None"),
        ({"save": "all"}, "save: 'all'; allowed: 'lease', 'redispatch', 'copy'"),
        ({"leases": -1}, "leases: -1; allowed: a whole number, 0 to 1024"),
        ({"capacity": -1}, "capacity: -1"),
        ({"capacity": float("inf")}, "capacity: inf"),
        ({"layout": "batched", "capacity": 3}, "capacity: 3; batched"),
        ({"expert_map": [[0, 1, 2, 3]]}, "expert_map: lists for 1 ranks"),
        ({"expert_map": [[0, 1], [2]]}, r"expert_map: no rank has experts \[3\]"),
        ({"expert_map": [[0, 1.7], [2, 3]]}, r"expert_map\[0\]: 1.7; allowed: a whole number"),
        ({"top_k": torch.tensor(2)}, "top_k: tensor"),
        ({"capacity": True}, "capacity: True"),
        ({"slab_capacity": -1}, "slab_capacity: -1"),
        (
            {"slab_capacity": float("nan")},
            r"slab_capacity: nan; .* a factor of max_tokens \* top_k / r",
        ),
        ({"expert_map": [[0, 1], [2, 4]]}, r"expert_map\[1\]: 4; allowed: a whole number, 0 to 3"),
        ({"ranks": 64, "max_tokens": 1 << 24, "top_k": 2}, r"allowed: 2\*\*31 rows"),
    ],
    ids=str,
)
def test_settings_that_are_refused(given, text):
    with pytest.raises(ArgumentError, match=text):
        one(**given)


@pytest.mark.plan
def test_worst_case_rows_are_enough_and_no_more():
    """All tokens of all ranks at one rank, each expert's padding included."""
    assert one(align=8).rows == -(-(2 * 4 * 2 + 2 * 7) // 8) * 8
    assert one(capacity=5, align=4).rows == 8
    assert one(capacity=1.25).rows == 10
    assert one(expert_capacity=3, align=4).rows == 8
    assert one().token(1) != one(save="copy").token(1) and one().token(1) != one().token(2)
    assert one().token(1) != one(align=8).token(1) and one().token(1) == one().token(1)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda x, i, w: (x[0], i, w), r"x\[1\]: torch.float32 of shape \(8,\)"),
        (lambda x, i, w: (x.double(), i, w), r"x\[1\]: torch.float64"),
        (lambda x, i, w: (x.repeat(2, 1), i.repeat(2, 1), w.repeat(2, 1)), "T up to max_tokens, 4"),
        (lambda x, i, w: (x, i.float(), w), r"topk_ids\[1\]: torch.float32"),
        (lambda x, i, w: (x, i[:, :1], w), r"topk_ids\[1\]: .*shape \(4, 1\)"),
        (lambda x, i, w: (x, i, w.long()), r"topk_weights\[1\]: torch.int64"),
        (lambda x, i, w: (x, i.to("meta"), w), r"topk_ids\[1\]: on meta; allowed: cpu"),
    ],
)
def test_tensors_that_are_refused(change, text):
    d = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32)
    good = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    with pytest.raises(ArgumentError, match=text):
        d.dispatch(*zip(good, change(*good), strict=True))
    routed = d.dispatch(*zip(good, good, strict=True))
    with pytest.raises(ArgumentError, match=r"expert_output\[0\]: .*that of routed.x"):
        d.combine([r.x[:-1] for r in routed], routed)
    with pytest.raises(ArgumentError, match=r"routed\[0\]"):
        d.combine([r.x for r in routed], [None, None])
    with pytest.raises(ArgumentError, match=r"add\[0\]: torch.float32 of shape \(4, 7\)"):
        d.combine([r.x for r in routed], routed, add=[torch.zeros(4, 7), None])
    for change, text in (
        ({"expert_outputs": [routed[0].x, routed[1].x.to("meta")]}, r"expert_output\[1\]: on meta; allowed: cpu"),
        ({"add": [torch.zeros(4, 8, device="meta"), None]}, r"add\[0\]: on meta"),
        ({"out": [torch.zeros(4, 8, device="meta")] * 2}, r"out\[0\]: on meta"),
        ({"out": [torch.zeros(32).as_strided((4, 8), (7, 1))] * 2}, r"out\[0\]: .* each row in a place of its own"),
        (
            {"out": [torch.zeros(8).expand(4, 8)] * 2},
            r"out\[0\]: .*strides \(0, 1\); .* each row in a place of its own",
        ),
        ({"routed": routed[::-1]}, r"routed\[0\]: what rank 1 dispatched; allowed: what rank 0 did"),
    ):
        with pytest.raises(ArgumentError, match=text):
            d.combine(**{"expert_outputs": [r.x for r in routed], "routed": routed, **change})
    other = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32)
    assert other.layout == d.layout
    with pytest.raises(ArgumentError, match=r"routed\[0\]: allowed: what this dispatcher's dispatch returned"):
        other.combine([r.x for r in routed], routed)
    needing = [r.x.clone().requires_grad_() for r in routed]
    with pytest.raises(ArgumentError, match=r"out\[0\]: gradients are recorded"):
        d.combine(needing, routed, out=[torch.zeros(4, 8)] * 2)


def test_lists_that_are_refused():
    d = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32)
    t = tokens_of(0, 4, 2, 4, 8, torch.float32, "uniform")
    with pytest.raises(ArgumentError, match="topk_ids: 1 of them; allowed: one for each of 2 ranks"):
        d.dispatch([t.x] * 2, [t.ids], [t.weights] * 2)
    routed = d.dispatch([t.x] * 2, [t.ids] * 2, [t.weights] * 2)
    with pytest.raises(ArgumentError, match="out: 1 of 2 given"):
        d.combine([r.x for r in routed], routed, out=[torch.zeros(4, 8), None])


@pytest.mark.plan
def test_numbers_of_numpy_are_numbers():
    given = {"top_k": np.int64(2), "num_experts": np.int32(4), "max_tokens": np.int64(4), "align": np.uint8(8)}
    assert one(**given, expert_map=np.arange(4).reshape(2, 2)) == one(align=8, expert_map=[[0, 1], [2, 3]])
    assert one(capacity=np.int64(5), align=4) == one(capacity=5, align=4)


@pytest.mark.plan
def test_settings_are_hashed_once(monkeypatch):
    hashed, blake2b = [], hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **given: hashed.append(1) or blake2b(*args, **given))
    layout = one()
    assert len({layout.token(number) for number in (0, 1, 2, 1)}) == 3 and len(hashed) == 1


def test_explain_states_what_slabs_take():
    d = VirtualTokenDispatcher(
        2, num_experts=5, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32, capacity=10, align=4, one_sided=False
    )
    text = d.explain()
    assert "one slab of exact size" in text and "expert output that peers read" not in text
    assert f"{(4 * 2 + 12) * 32:,}  slabs sent and received" in text
    # Slots, places and rows of entries, counts, and where the rows that come belong.
    assert f"{8 * 16 + 2 * 6 * 8 + 12 * 8:,}  routing" in text


def test_explain_states_memory():
    d = VirtualTokenDispatcher(
        2, num_experts=5, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32, capacity=10, align=4
    )
    text = d.explain()
    assert "5 experts in 5 slots, 2 to 3 for each rank" in text and "12 rows for each rank" in text
    assert f"{12 * (32 + 4):,}  rows received, held until backward" in text and "save: lease" in text


@pytest.mark.plan
def test_splits_are_chosen_by_price_and_told() -> None:
    nodes = [rank // 8 for rank in range(16)]
    decode, train = (one(ranks=16, num_experts=64, hidden=7168, max_tokens=t) for t in (1, 4096))
    chosen, why = with_splits(decode, nodes)
    assert chosen.slab_capacity == 2 and why.startswith("splits: slabs, the cheaper on 2 nodes by the links of NVLink")
    chosen, why = with_splits(train, nodes)
    assert chosen == train and why.startswith("splits: host, the cheaper")
    assert one(splits="slabs").slab_capacity == 4 * 2 and one(splits="host") == one()
    assert one(splits="slabs", slab_capacity=3).slab_capacity == 3
