"""Token dispatch under dispatch modes, on virtual ranks: one operator for each call, and results equal to the bit.

Modes are a dimension of random requests: none, selective checkpointing with several policies, counting and logging
modes, and fake tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import shardweave
from shardweave.errors import UnsupportedError
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
MM = torch.ops.aten.mm.default
OF_A_LAYER = [f"shardweave.{name}.default" for name in ("dispatch", "combine", "combine_backward", "dispatch_backward")]
LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
E, K, H = 5, 2, 8


class Log(TorchDispatchMode):
    """A user's mode, which notes the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@dataclass
class Case:
    """A layer of all virtual ranks: dispatch, experts, combine, with gradients of x and the weights."""

    counts: list[int]
    settings: dict[str, Any]
    seed: int = 0
    phases: bool = False
    weighted: bool = True
    weights_dtype: torch.dtype = torch.float32
    dispatcher: Any = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = self.made()

    def made(self) -> VirtualTokenDispatcher:
        sizes = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": max(self.counts) + 1}
        return VirtualTokenDispatcher(
            len(self.counts), **with_options(**{"dtype": torch.float32, **sizes, **self.settings})
        )

    @property
    def ranks(self) -> int:
        return len(self.counts)

    def given(self, seed: int | None = None, counts: list[int] | None = None) -> list[torch.Tensor]:
        """x of all ranks, then their weights, then their ids."""
        g = torch.Generator().manual_seed(self.seed if seed is None else seed)
        counts = self.counts if counts is None else counts
        dtype = self.settings.get("dtype", torch.float32)
        xs = [torch.randn(t, H, generator=g).to(dtype).requires_grad_() for t in counts]
        weights = [torch.rand(t, K, generator=g).to(self.weights_dtype).requires_grad_() for t in counts]
        return [*xs, *weights, *[torch.randint(-1, E, (t, K), generator=g) for t in counts]]

    def layer(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, d = self.ranks, self.dispatcher
        xs, weights, ids = given[:n], given[n : 2 * n], given[2 * n :]
        sent: Any = [x.sin() for x in xs]
        if d.config.payloads is not None:
            sent = [[x.detach(), x.detach()[:, :3].contiguous()] for x in sent]
        routed = d.dispatch_start(sent, ids, weights).finish() if self.phases else d.dispatch(sent, ids, weights)
        outputs = [self.experts(r) for r in routed]
        adds = [x * 2 for x in xs]
        if self.phases:
            return tuple(d.combine_start(outputs, routed, add=adds, weighted=self.weighted).finish())
        return tuple(d.combine(outputs, routed, add=adds, weighted=self.weighted))

    def experts(self, r: Any) -> torch.Tensor:
        dtype = self.settings.get("dtype", torch.float32)
        with r.kept():
            x = r.dequantized() if self.settings.get("quantize") else r.x
            matrix = (torch.arange(H * H, device=x.device, dtype=torch.float32).view(H, H) % 7 - 3).to(x.dtype)
            y = (torch.mm(x.flatten(0, -2), matrix).tanh()).view(*r.weights.shape, H).to(dtype)
            return y if self.weighted else (y * r.weights[..., None]).to(dtype)

    def step(self, wrap: Callable[..., Any] | None = None, mode: Any = None, between: Any = None) -> list[torch.Tensor]:
        """The results and gradients. `between`: called between forward and backward."""
        given = self.given()
        with nullcontext() if mode is None else mode:
            ys = self.layer(*given) if wrap is None else wrap(self.layer, *given)
            if between is not None:
                between()
            torch.autograd.backward(ys, [torch.full_like(y, 0.5) for y in ys])
        return [*(y.detach() for y in ys), *(x.grad for x in given[: 2 * self.ranks] if x.grad is not None)]


SETTINGS: dict[str, dict[str, Any]] = {
    "one-sided": {},
    "messages": {"one_sided": False},
    "fixed messages": {"one_sided": False, "chunk_capacity": 1 << 20},
    "two levels": {"one_sided": False, "nodes": [0, 1, 1], "two_level": True},
    "batched": {"layout": "batched", "expert_capacity": 7},
    "copied": {"save": "copy", "zero_rows": True},
    "redispatched": {"save": "redispatch"},
    "quantized": {"quantize": "fp8_row", "dtype": torch.bfloat16},
    "quantized output": {"quantize_output": "fp8_128"},
    "payloads": {"payloads": [(torch.float32, H), (torch.float32, 3)]},
    "replicas": {"expert_map": [[0, 1], [2, 3], [4, 0]]},
}
COUNTS = [4, 0, 3]


def settings_of(name: str, ranks: int = 3) -> dict[str, Any]:
    settings = dict(SETTINGS[name])
    if "nodes" in settings:
        settings["nodes"] = [0, 1, 1, 1][:ranks]
    if "expert_map" in settings:
        settings["expert_map"] = [[e for e in range(E) if e % ranks == r] + [r % E] * (r > 0) for r in range(ranks)]
    if settings.get("layout") == "batched":
        settings["overflow"] = "drop"
    return settings


def policies() -> dict[str, Callable[..., Any]]:
    """Of selective checkpointing."""
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    count = Counter[str]()

    def as_torchtitan(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count["matmuls"] += operator is MM
        return save if operator is ALL_TO_ALL or (operator is MM and count["matmuls"] % 2) else again

    return {
        "nothing": lambda *_, **__: again,
        "everything": lambda *_, **__: save,
        "matmuls": lambda _, operator, *__, **___: save if operator is MM else again,
        "exchanges": lambda _, operator, *__, **___: save if operator is ALL_TO_ALL else again,
        "exchanges, by bool": lambda _, operator, *__, **___: operator is ALL_TO_ALL,
        "as torchtitan": as_torchtitan,
    }


def region(policy: str, **options: Any) -> Callable[..., Any]:
    """`checkpoint` with a policy."""
    contexts = partial(create_selective_checkpoint_contexts, policies()[policy])
    return partial(checkpoint, use_reentrant=False, context_fn=contexts, **options)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True)
    )


class Hidden(torch.autograd.Function):
    """(rows, values) to values, with the gradient of the rows; modes see nothing."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


@pytest.mark.parametrize("phases", [False, True], ids=["", "phases"])
@pytest.mark.parametrize("name", SETTINGS)
def test_modes_see_one_operator_for_each_call(name: str, phases: bool) -> None:
    """In the first call of a dispatcher as in later ones, and nothing besides but what autograd does to accumulate."""
    case = Case(COUNTS, settings_of(name), phases=phases, weights_dtype=torch.float64)
    d, n = case.dispatcher, case.ranks
    for _ in range(2):
        given = case.given()
        xs, weights, ids = given[:n], given[n : 2 * n], given[2 * n :]
        adds, gradients = [x.detach() for x in xs], [torch.ones_like(x) for x in xs]
        sent = [[x, x[:, :3]] for x in xs] if d.config.payloads is not None else xs
        log = Log()
        with log:
            routed = d.dispatch_start(sent, ids, weights).finish() if phases else d.dispatch(sent, ids, weights)
        rows = [r.x if r.grad_rows is None else r.grad_rows for r in routed]
        outputs = [
            Hidden.apply(x, torch.ones(*r.weights.shape, H).to(x.dtype)) for x, r in zip(rows, routed, strict=True)
        ]
        with log:
            loads = [r.load() for r in routed]
            buffers = [r.output_buffer() for r in routed]
            ys = d.combine_start(outputs, routed, add=adds).finish() if phases else d.combine(outputs, routed, add=adds)
            d.check()
            torch.autograd.backward(ys, gradients)
        assert [name for name in log.seen if name.startswith("shardweave")] == OF_A_LAYER
        assert {*log.seen} == {*OF_A_LAYER, "aten.detach.default"}  # which accumulating a gradient calls
        assert [b.shape for b in buffers] == [o.shape for o in outputs]
        assert all(torch.equal(load.per_rank, loads[0].per_rank) for load in loads)


def forms(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors]


def fake_forms(case: Case) -> list[tuple[Any, ...]]:
    """The shapes, strides and dtypes of a step with fake tensors."""
    with FakeTensorMode() as fake:
        given = [fake.from_tensor(x) for x in case.given()]
        ys = case.layer(*given)
        torch.autograd.backward(ys, [torch.full_like(y, 0.5) for y in ys])
        assert all(type(x).__name__ == "FakeTensor" for x in ys)
    return forms([*(y.detach() for y in ys), *(x.grad for x in given[: 2 * case.ranks] if x.grad is not None)])


@pytest.mark.parametrize("name", SETTINGS)
def test_fake_tensors_have_the_form_of_results(name: str) -> None:
    case = Case(COUNTS, settings_of(name))
    want = forms(case.step())
    assert fake_forms(case) == want and fake_forms(case) == forms(case.step())
    n, d = case.ranks, case.dispatcher
    with FakeTensorMode() as fake:
        given = [fake.from_tensor(x) for x in case.given()]
        sent: Any = [[x.detach(), x.detach()[:, :3]] for x in given[:n]] if d.config.payloads else given[:n]
        routed = d.dispatch(sent, given[2 * n :], given[n : 2 * n])
        buffers = [r.output_buffer() for r in routed]
    real = case.given()
    sent = [[x.detach(), x.detach()[:, :3]] for x in real[:n]] if d.config.payloads else real[:n]
    for fakes, r, buffer in zip(routed, d.dispatch(sent, real[2 * n :], real[n : 2 * n]), buffers, strict=True):
        for of in (fakes, r):
            of.fields = [*of.payloads, of.weights, of.topk_weights, of.offsets, of.counts, of.num_rows, of.dropped]
        assert forms(fakes.fields) == forms(r.fields)
        assert forms([buffer]) == forms([r.output_buffer()])


MODES: dict[str, Callable[[], Any]] = {
    "FlopCounterMode": partial(FlopCounterMode, display=False),
    "MemTracker": MemTracker,
    "CommDebugMode": CommDebugMode,
    "a user's": Log,
}
REGIONS = ["nothing", "everything", "matmuls", "exchanges", "exchanges, by bool", "as torchtitan"]
WAYS = ["none", "fake tensors", *MODES, *REGIONS, "nested", "plain checkpoint", "counted region"]
"""How a layer runs: below a mode, or as a checkpointed region with a policy."""


def check(case: Case, way: str, random: Random) -> None:
    """The results of a step are those without modes, to the bit, whether the dispatcher is new or used."""
    want = case.step()
    if random.random() < 0.5:
        case.dispatcher = case.made()

    def between() -> None:
        """Other calls of the dispatcher, so that the recomputation finds other caches than the forward."""
        for _ in range(random.randint(0, 2)):
            counts = [random.randint(0, max(case.counts)) for _ in case.counts]
            with torch.no_grad():
                case.layer(*case.given(random.randint(0, 99), counts))

    early = {"early_stop": random.random() < 0.5}
    if way == "none":
        got = case.step()
    elif way == "fake tensors":
        got = want
        assert fake_forms(case) == forms(want)
    elif way in MODES:
        got = case.step(mode=MODES[way](), between=between)
    elif way == "nested":
        inner, outer = region(random.choice(REGIONS), **early), region(random.choice(REGIONS))
        got = case.step(lambda layer, *given: outer(lambda *x: inner(layer, *x), *given), between=between)
    elif way == "plain checkpoint":
        got = case.step(partial(checkpoint, use_reentrant=False, **early), between=between)
    elif way == "counted region":
        mode = MODES[random.choice([*MODES])]()
        got = case.step(region(random.choice(REGIONS), **early), mode, between)
    else:
        got = case.step(region(way, **early), between=between)
    assert same(got, want), (case, way)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("none", "fake tensors")])
@pytest.mark.parametrize("name", ["one-sided", "two levels", "redispatched", "quantized"])
def test_results_are_those_without_modes(name: str, way: str) -> None:
    for phases in (False, True):
        check(Case(COUNTS, settings_of(name), 7, phases, weights_dtype=torch.bfloat16), way, Random(f"{name} {way}"))


def drawn(seed: int) -> tuple[Case, str, Random]:
    """A random case and how it runs."""
    random = Random(seed)
    counts = [random.choice((0, 1, 2, 3, 5)) for _ in range(random.randint(1, 4))]
    name = random.choice([*SETTINGS])
    if name == "two levels" and len(counts) < 2:
        name = "messages"
    settings = settings_of(name, len(counts))
    settings["align"] = random.choice((1, 1, 4))
    if "dtype" not in settings and "payloads" not in settings:
        settings["dtype"] = random.choice((torch.float32, torch.bfloat16, torch.float16))
    if "save" not in settings:
        settings["save"] = random.choice(("buffer", "copy"))
    if random.random() < 0.3:
        settings["zero_rows"] = True
    if settings.get("layout") == "batched":
        settings.pop("zero_rows", None)
    dtype = random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
    case = Case(counts, settings, seed, random.random() < 0.3, random.random() < 0.7, dtype)
    return case, random.choice(WAYS), random


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_random_dispatches_under_modes(first: int) -> None:
    for seed in range(first, first + 100):
        check(*drawn(seed))


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_random_dispatches_under_modes_at_length(part: int) -> None:
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        check(*drawn(seed))


def test_policies_are_asked_for_an_all_to_all() -> None:
    """Once for each call, with its tensor, and a stand-in for the result; never for an operator of ours."""
    case = Case(COUNTS, settings_of("one-sided"))
    asked: list[Any] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        assert operator.namespace != "shardweave"
        if operator is ALL_TO_ALL:
            asked.append((context, args))
        return CheckpointPolicy.PREFER_RECOMPUTE

    given = case.given()
    made = create_selective_checkpoint_contexts(policy)
    with made[0] as of_region:
        case.layer(*given)
    assert of_region.policy_fn is policy and len(asked) == 2
    for (context, (x, output_sizes, input_sizes, group)), shape in zip(
        asked, ([4, H], [case.dispatcher.config.rows, H]), strict=True
    ):
        assert list(x.shape) == shape and len(output_sizes) == len(input_sizes) == case.ranks and group == ""
        assert not context.is_recompute and context.op_output.shape[1] == H


def test_tensors_with_the_negative_bit() -> None:
    """They are copied below modes."""
    case = Case(COUNTS, settings_of("one-sided"))
    given, n = case.given(), case.ranks
    xs = [x.detach() for x in given[:n]]
    routed = case.dispatcher.dispatch(xs, given[2 * n :], given[n : 2 * n])
    want = case.dispatcher.combine([r.x for r in routed], routed, add=xs)
    negative = [torch._neg_view(-x) for x in xs]
    with Log() as log:
        routed = case.dispatcher.dispatch(negative, given[2 * n :], given[n : 2 * n])
        rows = [r.x for r in routed]
        got = case.dispatcher.combine(rows, routed, add=negative)
    assert same(got, want) and log.seen == OF_A_LAYER[:2]


def test_flops_and_memory_are_counted_as_without_modes() -> None:
    case = Case(COUNTS, settings_of("one-sided"))
    with FlopCounterMode(display=False) as flops:
        case.step()
    rows = case.dispatcher.config.rows
    assert flops.get_total_flops() == 2 * case.ranks * 2 * rows * H * H  # a matmul, and its gradient of the rows
    given, n = case.given(), case.ranks
    with MemTracker() as memory, torch.no_grad():
        total = lambda: memory.get_tracker_snapshot("current").get(torch.device("cpu"), {}).get("Total", 0)  # noqa: E731
        before = total()
        routed = case.dispatcher.dispatch(given[:n], given[2 * n :], given[n : 2 * n])
        assert total() - before >= sum(r.x.nbytes + r.weights.nbytes for r in routed)


def test_calls_without_results_of_their_own_are_hidden_or_refused() -> None:
    """Simulated programs, and the construction of a dispatcher."""
    program = shardweave.plan((2,), (4,), "float32", "S0", "R")
    shards = [torch.arange(2.0), torch.arange(2.0, 4)]
    with Log() as log:
        outs = shardweave.simulate(program, shards)
        Case(COUNTS, settings_of("replicas"))
    assert not log.seen and all(x.tolist() == [0, 1, 2, 3] for x in outs)
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="a fake tensor mode is active"):
        shardweave.simulate(program, shards)


@pytest.mark.parametrize("layout", ["grouped", "batched"])
def test_silu_and_mul_is_one_operator(layout: str) -> None:
    case = Case(COUNTS, settings_of("batched" if layout == "batched" else "one-sided"))
    given, n = case.given(), case.ranks
    routed = case.dispatcher.dispatch(given[:n], given[2 * n :], given[n : 2 * n])[0]
    gate, up = (torch.rand(*routed.weights.shape, 6).requires_grad_() for _ in range(2))
    gradient = torch.ones(*routed.weights.shape, 6)
    want = shardweave.moe.silu_and_mul(gate, up, routed)
    of_want = torch.autograd.grad(want, (gate, up), gradient)
    with Log() as log:
        got = shardweave.moe.silu_and_mul(gate, up, routed)
        of_got = torch.autograd.grad(got, (gate, up), gradient)
    assert log.seen == ["shardweave.silu_and_mul.default", "shardweave.silu_and_mul_backward.default"]
    number = int(routed.num_rows) if layout == "grouped" else len(want)
    assert torch.equal(got[:number], want[:number])
    assert all(torch.equal(a, b) for a, b in zip(of_got, of_want, strict=True))
