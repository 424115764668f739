"""DispatchConfig: refused settings and tensors, derived sizes, fingerprints, and `explain`."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import typing

import numpy as np
import pytest
import torch
from moe_reference import tokens_of

import shardweave
from shardweave.errors import ArgumentError
from shardweave.kernels import RowLaunch
from shardweave.runtime.integrations.torchtitan import TorchtitanDispatcher
from shardweave.runtime.moe import config as config_module
from shardweave.runtime.moe.config import DispatchConfig
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer import base, push, sendrecv
from shardweave.runtime.moe.transfer.base import ROUTING
from shardweave.runtime.moe.transfer.levels import with_splits
from shardweave.runtime.moe.transfer.window import WindowTransfer


def one(**given) -> DispatchConfig:
    settings = {
        "ranks": 2, "num_experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4, "dtype": torch.float32,
    }  # fmt: skip
    return DispatchConfig(**{**settings, **given})


@pytest.mark.plan
@pytest.mark.parametrize(
    "given, text",
    [
        ({"num_experts": 0}, "num_experts: 0"),
        ({"top_k": 33}, "top_k: 33"),
        ({"align": 0}, "align: 0"),
        ({"max_tokens": True}, "max_tokens: True"),
        ({"dtype": torch.float64}, "dtype: torch.float64"),
        ({"dtype": "bf16"}, "dtype: 'bf16'; allowed: torch.float32, torch.bfloat16, torch.float16"),
        ({"overflow": "ignore"}, "overflow: 'ignore'; allowed: 'raise', 'drop'"),
        ({"layout": "ragged"}, "layout: 'ragged'"),
        ({"splits": "even"}, "splits: 'even'; allowed: None, 'host', 'fixed'"),
        ({"splits": "host", "chunk_capacity": 3}, "chunk_capacity: 3 with splits='host'; allowed: None"),
        ({"two_level": 1}, "two_level: 1; allowed: True, False, None"),
        ({"dedupe": "rank"}, "dedupe: 'rank'; allowed: True, False, None"),
        ({"nodes": [0, 1, 1]}, "nodes: of 3 ranks; allowed: one for each of 2"),
        ({"save": "all"}, "save: 'all'; allowed: 'buffer', 'redispatch', 'copy'"),
        ({"pooled_buffers": -1}, "pooled_buffers: -1; allowed: a whole number, 0 to 1024"),
        ({"num_sms": 0}, "num_sms: 0; allowed: a whole number, 1 to 1024"),
        ({"num_sms": 2.0}, "num_sms: 2.0; allowed: a whole number"),
        ({"capacity": -1}, "capacity: -1"),
        ({"capacity": float("inf")}, "capacity: inf"),
        ({"layout": "batched", "capacity": 3}, "capacity: 3; allowed with layout='batched': None"),
        ({"expert_map": [[0, 1, 2, 3]]}, "expert_map: lists for 1 ranks"),
        ({"expert_map": 5}, "expert_map: 5; allowed: for each rank a list"),
        ({"expert_map": [0, 1]}, r"expert_map: \[0, 1\]; allowed: for each rank a list"),
        ({"expert_map": [[0, 1], [2]]}, r"expert_map: no rank has experts \[3\]"),
        ({"expert_map": [[0, 1.7], [2, 3]]}, r"expert_map\[0\]: 1.7; allowed: a whole number"),
        ({"top_k": torch.tensor(2)}, "top_k: tensor"),
        ({"capacity": True}, "capacity: True"),
        (
            {"capacity": "a"},
            r"capacity: 'a'; allowed: a whole number, 0 to 2147483647, or a factor of max_tokens \* top_k ",
        ),
        ({"chunk_capacity": -1}, "chunk_capacity: -1"),
        (
            {"chunk_capacity": float("nan")},
            r"chunk_capacity: nan; .* a factor of max_tokens \* top_k / r",
        ),
        ({"expert_map": [[0, 1], [2, 4]]}, r"expert_map\[1\]: 4; allowed: a whole number, 0 to 3"),
        ({"ranks": 64, "max_tokens": 1 << 24, "top_k": 2}, r"allowed: fewer than 2\*\*31 rows"),
    ],
    ids=str,
)
def test_config_refuses_settings(given, text):
    with pytest.raises(ArgumentError, match=text):
        one(**given)


@pytest.mark.plan
def test_config_rows_and_fingerprints():
    """By default there is room for all tokens of all ranks on one rank, with each expert's padding."""
    assert one(align=8).rows == -(-(2 * 4 * 2 + 2 * 7) // 8) * 8
    assert one(capacity=5, align=4).rows == 8
    assert one(capacity=1.25).rows == 10
    assert one(expert_capacity=3, align=4).rows == 8
    assert one().fingerprint(1) != one(save="copy").fingerprint(1) and one().fingerprint(1) != one().fingerprint(2)
    assert one(num_sms=3) == one() and one(num_sms=3).fingerprint(1) == one().fingerprint(1)
    assert one().fingerprint(1) != one(align=8).fingerprint(1) and one().fingerprint(1) == one().fingerprint(1)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda x, i, w: (x[0], i, w), r"x\[1\]: torch.float32 of shape \(8,\)"),
        (lambda x, i, w: (x.double(), i, w), r"x\[1\]: torch.float64"),
        (lambda x, i, w: (x.repeat(2, 1), i.repeat(2, 1), w.repeat(2, 1)), "T up to max_tokens, 4"),
        (lambda x, i, w: (x, i.float(), w), r"topk_ids\[1\]: torch.float32"),
        (lambda x, i, w: (x, i[:, :1], w), r"topk_ids\[1\]: .*shape \(4, 1\)"),
        (lambda x, i, w: (x.to_sparse(), i, w), r"x\[1\]: of layout torch.sparse_coo; allowed: a dense tensor"),
        (lambda x, i, w: (torch.nested.nested_tensor([x]), i, w), r"x\[1\]: a nested tensor; allowed: a dense tensor"),
        (lambda x, i, w: (x, i.to_sparse(), w), r"topk_ids\[1\]: of layout torch.sparse_coo"),
        (
            lambda x, i, w: (x, i, w.byte().view(torch.float4_e2m1fn_x2)),
            r"topk_weights\[1\]: torch.float4_e2m1fn_x2 .*allowed: torch.float32, torch.bfloat16, torch.float16, ",
        ),
        (lambda x, i, w: (x, i, w.to(torch.float8_e4m3fn)), r"topk_weights\[1\]: torch.float8_e4m3fn"),
        (lambda x, i, w: (x, i, w.long()), r"topk_weights\[1\]: torch.int64"),
        (lambda x, i, w: (x, i.to("meta"), w), r"topk_ids\[1\]: on meta; allowed: cpu"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_dispatch_and_combine_refuse_tensors(change, text):
    d = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32)
    good = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    with pytest.raises(ArgumentError, match=text):
        d.dispatch(*zip(good, change(*good), strict=True))
    routed = d.dispatch(*zip(good, good, strict=True))
    with pytest.raises(ArgumentError, match=r"expert_output\[0\]: .*that of routed.x"):
        d.combine([r.x[:-1] for r in routed], routed)
    with pytest.raises(ArgumentError, match=r"routed\[0\]: None; allowed: a result of this dispatcher's dispatch"):
        d.combine([r.x for r in routed], [None, None])
    for call in (d.combine, d.combine_start):
        with pytest.raises(ArgumentError, match="weighted: None; allowed: True, False"):
            call([r.x for r in routed], routed, weighted=None)
    with pytest.raises(ArgumentError, match=r"add\[0\]: torch.float32 of shape \(4, 7\)"):
        d.combine([r.x for r in routed], routed, add=[torch.zeros(4, 7), None])
    for name in ("add", "out"):
        for wrong, text in ((5, "5; allowed: a tensor"), (torch.zeros(4, 8).to_sparse(), "of layout torch.sparse_coo")):
            with pytest.raises(ArgumentError, match=rf"{name}\[0\]: {text}"):
                d.combine([r.x for r in routed], routed, **{name: [wrong, wrong]})
    shared = torch.zeros(5, 8)
    with torch.inference_mode():
        inference = torch.zeros(4, 8)
    for change, text in (
        ({"expert_outputs": [routed[0].x, routed[1].x.to("meta")]}, r"expert_output\[1\]: on meta; allowed: cpu"),
        ({"add": [torch.zeros(4, 8, device="meta"), None]}, r"add\[0\]: on meta"),
        ({"out": [torch.zeros(4, 8, device="meta")] * 2}, r"out\[0\]: on meta"),
        ({"out": [torch.zeros(32).as_strided((4, 8), (7, 1))] * 2}, r"out\[0\]: .* rows that do not overlap"),
        (
            {"out": [torch.zeros(8).expand(4, 8)] * 2},
            r"out\[0\]: .*strides \(0, 1\); .* rows that do not overlap",
        ),
        ({"out": [routed[0].x[:4], torch.zeros(4, 8)]}, r"out\[0\]: overlaps the memory of expert_output\[0\]"),
        ({"out": [shared[1:5]] * 2, "add": [shared[:4]] * 2}, r"out\[0\]: overlaps the memory of add\[0\]"),
        ({"out": [inference] * 2}, r"out\[0\]: made in inference mode; allowed outside of it"),
        ({"routed": routed[::-1]}, r"routed\[0\]: of rank 1; allowed: of rank 0"),
    ):
        with pytest.raises(ArgumentError, match=text):
            d.combine(**{"expert_outputs": [r.x for r in routed], "routed": routed, **change})
    other = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32)
    assert other.config == d.config
    with pytest.raises(
        ArgumentError, match=r"routed\[0\]: of dispatcher \d+; allowed: a result of this dispatcher's dispatch"
    ):
        other.combine([r.x for r in routed], routed)
    needing = [r.x.clone().requires_grad_() for r in routed]
    with pytest.raises(ArgumentError, match=r"out\[0\]: gradients are recorded"):
        d.combine(needing, routed, out=[torch.zeros(4, 8)] * 2)


def test_virtual_dispatcher_refuses_lists():
    d = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32)
    t = tokens_of(0, 4, 2, 4, 8, torch.float32, "uniform")
    with pytest.raises(ArgumentError, match="topk_ids: 1 of them; allowed: one for each of 2 ranks"):
        d.dispatch([t.x] * 2, [t.ids], [t.weights] * 2)
    routed = d.dispatch([t.x] * 2, [t.ids] * 2, [t.weights] * 2)
    with pytest.raises(ArgumentError, match="out: 1 of 2 given"):
        d.combine([r.x for r in routed], routed, out=[torch.zeros(4, 8), None])


@pytest.mark.plan
def test_config_accepts_iterators_as_expert_map():
    config = one(expert_map=(iter(of_rank) for of_rank in ([0, 1], [3, 2])))
    assert config == one(expert_map=[[0, 1], [3, 2]]) and config.expert_map == ((0, 1), (3, 2))


@pytest.mark.plan
def test_config_accepts_numpy_integers():
    given = {"top_k": np.int64(2), "num_experts": np.int32(4), "max_tokens": np.int64(4), "align": np.uint8(8)}
    assert one(**given, expert_map=np.arange(4).reshape(2, 2)) == one(align=8, expert_map=[[0, 1], [2, 3]])
    assert one(capacity=np.int64(5), align=4) == one(capacity=5, align=4)


@pytest.mark.plan
def test_config_is_hashed_once(monkeypatch):
    hashed, blake2b = [], hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **given: hashed.append(1) or blake2b(*args, **given))
    config = one()
    assert len({config.fingerprint(number) for number in (0, 1, 2, 1)}) == 3 and len(hashed) == 1


def test_explain_states_chunks():
    d = VirtualTokenDispatcher(
        2, num_experts=5, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32, capacity=10, align=4, one_sided=False
    )
    text = d.explain()
    assert "one chunk of exact size" in text and "expert output that peers read" not in text
    assert f"{(4 * 2 + 12) * 32:,}  chunks sent and received" in text
    # Physical experts, places and rows of pairs, counts, and the places of received rows.
    assert f"{8 * 16 + 2 * 6 * 8 + 12 * 8:,}  routing" in text


def test_explain_states_memory():
    d = VirtualTokenDispatcher(
        2, num_experts=5, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32, capacity=10, align=4
    )
    text = d.explain()
    assert "5 experts as 5 physical experts, 2 to 3 per rank" in text and "12 rows per rank" in text
    assert f"{12 * (32 + 4):,}  rows received, held until backward" in text and "save: buffer" in text
    # Each layer holds rows and routing; gradients and the experts' output are needed one layer after another.
    once, each = 12 * (32 + 4) + 12 * 32, 12 * (32 + 4) + 8 * 16 + 2 * 6 * 8
    assert f"a model with n of these layers, in training: {once:,} + n * {each:,}\n" in text


@pytest.mark.plan
@pytest.mark.parametrize("save", ["buffer", "copy", "redispatch"])
@pytest.mark.parametrize("pooled", [0, 1, 3])
def test_memory_of_layers_with_windows(save: str, pooled: int) -> None:
    """One window, and pooled buffers that hold the rows of as many layers."""
    config = one(hidden=64, save=save, pooled_buffers=pooled)
    purposes = WindowTransfer.nbytes(config, None)
    once, each = WindowTransfer.layers_nbytes(config, None)
    rows, routing = config.rows * (64 * 4 + 4), purposes[ROUTING]
    window = WindowTransfer.window_nbytes(config)
    window = max(window, 1 << 16)
    assert purposes["window, which the dispatchers of these ranks share"] == window
    if save == "redispatch":
        buffers = pooled * config.rows * 64 * 4
        assert (once, each) == (window + 2 * rows + buffers, routing)  # rows are there again in the backward
    else:
        assert (once, each) == (window + rows, rows + routing)


@pytest.mark.parametrize("one_sided", [True, False])
def test_num_sms_limits_programs(one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def rows_of(arguments: tuple[object, ...]) -> list[RowLaunch]:
        return [a for a in arguments if isinstance(a, RowLaunch)]

    for module, name in ((push, "push_rows"), (sendrecv, "push_rows"), (base, "combine_rows")):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, function=function, **b: launches.extend(rows_of(a)) or function(*a, **b)
        )
    d = VirtualTokenDispatcher(
        2, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32, num_sms=20, one_sided=one_sided
    )
    tokens = [[v] * 2 for v in (torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))]
    routed = d.dispatch(*tokens)
    d.combine([r.x for r in routed], routed)
    assert launches == [RowLaunch.for_rows(8, 4, 20)] * 4 and launches[0].programs == 20


@pytest.mark.plan
def test_splits_are_chosen_by_price() -> None:
    nodes = [rank // 8 for rank in range(16)]
    decode, train = (one(ranks=16, num_experts=64, hidden=7168, max_tokens=t) for t in (1, 4096))
    chosen, why = with_splits(decode, nodes)
    assert chosen.chunk_capacity == 2 and why.startswith("splits: fixed, the cheaper on 2 nodes by the links of NVLink")
    chosen, why = with_splits(train, nodes)
    assert chosen == train and why.startswith("splits: host, the cheaper")
    assert one(splits="fixed").chunk_capacity == 4 * 2 and one(splits="host") == one()
    assert one(splits="fixed", chunk_capacity=3).chunk_capacity == 3


@pytest.mark.plan
def test_settings_are_declared_alike() -> None:
    """The types for checkers, and torchtitan's config, follow DispatchConfig."""
    others = ("ranks", "nodes", "active_ranks")
    settings = {f.name: f for f in dataclasses.fields(DispatchConfig) if f.init and f.name not in others}
    tree = ast.parse(inspect.getsource(config_module))
    (declared,) = [node for node in ast.walk(tree) if getattr(node, "name", "") == "DispatchSettings"]
    types = {node.target.id: ast.unparse(node.annotation) for node in declared.body if isinstance(node, ast.AnnAssign)}
    assert types == {name: f.type for name, f in settings.items()}
    for f in dataclasses.fields(TorchtitanDispatcher.Config):
        if f.name in settings and f.name != "dtype":
            assert (f.type, f.default) == (settings[f.name].type, settings[f.name].default), f.name
    parameters = inspect.signature(TokenDispatcher).parameters
    assert {name: p.default for name, p in parameters.items() if name in settings} == {
        name: p.default for name, p in inspect.signature(DispatchConfig).parameters.items() if name in settings
    }


@pytest.mark.plan
def test_config_is_stable_under_replace() -> None:
    for given in ({"align": 8}, {"capacity": 1.25, "align": 4}, {"layout": "batched", "expert_capacity": 3, "align": 4},
                  {"splits": "fixed"}, {"nodes": ["b", "a"], "two_level": True},
                  {"chunk_capacity": 0.5}, {"expert_map": [[1, 0], [3, 2, 1]]}):  # fmt: skip
        config = one(**given)
        assert dataclasses.replace(config) == config
        assert dataclasses.replace(config).fingerprint(3) == config.fingerprint(3)


NAMED = {
    "transport": ("shared_memory", "process_group", "hierarchical", "symmetric_memory"),
    "reduction": ("ordered", "fast"),
    "overflow": ("raise", "drop"),
    "layout": ("grouped", "batched"),
    "save": ("buffer", "redispatch", "copy"),
    "splits": ("host", "fixed"),
    "quantize": ("fp8_row", "fp8_128", "mxfp8"),
    "quantize_output": ("fp8_row", "fp8_128", "mxfp8"),
    "scale_layout": ("blocked",),
    "topology": ("nvlink", "nvlink-infiniband"),
}


def names_in(hint: object) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(name for part in typing.get_args(hint) for name in names_in(part))


@pytest.mark.plan
def test_options_with_names_are_literals() -> None:
    """Type checkers know the names that a function takes."""
    public = [getattr(shardweave, name) for name in shardweave.__all__]
    hints = [
        (name, hint, vars(config_module))
        for name, hint in ((field.name, field.type) for field in dataclasses.fields(DispatchConfig))
    ]
    for one_of in public:
        if callable(one_of) and not dataclasses.is_dataclass(one_of):
            function = inspect.unwrap(one_of.__init__ if inspect.isclass(one_of) else one_of)
            annotations = getattr(function, "__annotations__", {})
            hints += [(name, hint, function.__globals__) for name, hint in annotations.items()]
    found = {name: [names_in(eval(hint, names)) for n, hint, names in hints if n == name] for name in NAMED}
    assert len(found["transport"]) > 5
    for name, allowed in NAMED.items():
        assert found[name] and set(found[name]) == {allowed}, name
        if name in {field.name for field in dataclasses.fields(DispatchConfig)}:
            with pytest.raises(ArgumentError, match=f"^{name}: 'other'.*'{allowed[-1]}'"):
                one(**{name: "other"})
