"""Experts that process all rows of a buffer: with `zero_rows` their weights' gradients are those of a dense model,
whatever the receive buffers held; without, SHARDWEAVE_POISON_ROWS finds code that reads unused rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_reference import Tokens, assert_near, tokens_of
from rank_processes import run_ranks
from test_processes import poisoned
from torch import nn

from shardweave.errors import ArgumentError
from shardweave.runtime.integrations.torchtitan import TorchtitanDispatcher
from shardweave.runtime.moe.activation import silu_and_mul
from shardweave.runtime.moe.config import DispatchConfig
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.engine import TokenEngine
from shardweave.runtime.moe.parallel_style import ExpertParallel
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.transports.in_process import InProcessTransport

K, E, H, F = 2, 5, 16, 8
SETTINGS = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 9, "dtype": torch.float32, "zero_rows": True}
COUNTS = (9, 0, 4, 7, 0)


@pytest.fixture(autouse=True)
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill allocations of torch and of the transport with NaN."""

    def empty(self, shape, dtype, device):
        return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=device)

    monkeypatch.setattr(InProcessTransport, "empty", empty)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Gated(nn.Module):
    """One expert for all: linear layers with bias, which process all rows of a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, F), nn.Linear(H, F), nn.Linear(F, H)
        g = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=g) / 3).to(dtype)

    def forward(self, routed: Any) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate(routed.x), self.up(routed.x), routed))


def gradients(experts: Gated) -> list[torch.Tensor]:
    """Return the gradients of parameters, zeros for None."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in experts.parameters()]


def dense(tokens: list[Tokens], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return y of all ranks' tokens and the gradients of parameters, in float64."""
    experts, ys = Gated(dtype).double(), []
    for t in tokens:
        x = t.x.double()
        made = experts.down(nn.functional.silu(experts.gate(x)) * experts.up(x))
        ys.append(made * (t.weights.double() * (t.ids >= 0)).sum(1, keepdim=True))
        ys[-1].backward(t.gradient.double())
    return [y.detach() for y in ys], gradients(experts)


def rounds(ranks: int, number: int, dtype: torch.dtype = torch.float32, routing: str = "holes") -> list[Tokens]:
    return [tokens_of(r, COUNTS[(r + number) % 5], K, E, H, dtype, routing, number) for r in range(ranks)]


def trained(d: Any, experts: list[Gated], tokens: list[Tokens], weighted: bool, run: Any = None) -> list[torch.Tensor]:
    """Return y of all ranks; afterwards all receive buffers hold NaN."""
    xs, weights = [t.x.clone().requires_grad_() for t in tokens], [t.weights.clone().requires_grad_() for t in tokens]
    kept = []

    def layer(xs: list, ids: list, weights: list) -> list:
        routed = d.dispatch(xs, ids, weights)
        outputs = []
        for r, expert in zip(routed, experts, strict=True):
            with nullcontext() if run else r.kept():
                made = expert(r)
            outputs.append(made if weighted else made * r.weights.unsqueeze(-1).to(made.dtype))
        kept.extend([r.x for r in routed] if run is None else [])
        return d.combine(outputs, routed, weighted=weighted)

    ys = (run(layer) if run else layer)(xs, [t.ids for t in tokens], weights)
    torch.autograd.backward(ys, [t.gradient for t in tokens])
    for x in kept:
        x.detach().fill_(float("nan"))
    return [y.detach() for y in ys]


def compiled(layer: Any) -> Any:
    torch._dynamo.reset()  # earlier tests do not count as recompilations
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


ALGORITHMS: dict[str, dict] = {
    "pushed": {"align": 4},
    "exact chunks": {"one_sided": False},
    "chunks of one size": {"one_sided": False, "chunk_capacity": 18, "align": 8},
    "copy": {"save": "copy"},
    "copy of chunks": {"save": "copy", "one_sided": False, "align": 4},
    "redispatch": {"save": "redispatch"},
    "redispatch in chunks": {"save": "redispatch", "one_sided": False},
    "batched": {"layout": "batched", "align": 4},
    "replicated": {"expert_map": [[0, 1, 2], [3, 4], [2], [], []]},
    "bfloat16": {"dtype": torch.bfloat16, "align": 4},
}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "ranks, algorithm", [(2 + i % 4, algorithm) for i, algorithm in enumerate(ALGORITHMS)] + [(1, "pushed")]
)
def test_weight_gradients_with_zero_rows(ranks: int, algorithm: str, weighted: bool) -> None:
    given = {**SETTINGS, **ALGORITHMS[algorithm]}
    if "expert_map" in given:
        ranks = len(given["expert_map"])
    d, dtype = VirtualTokenDispatcher(ranks, **given), given["dtype"]
    for number in range(2):
        tokens, experts = rounds(ranks, number, dtype), [Gated(dtype) for _ in range(ranks)]
        ys = trained(d, experts, tokens, weighted)
        want_ys, want = dense(tokens, dtype)
        for y, want_y in zip(ys, want_ys, strict=True):
            assert_near(y, want_y, dtype, "y")
        for results, wanted in zip(zip(*map(gradients, experts), strict=True), want, strict=True):
            assert_near(sum(g.double() for g in results), wanted, dtype, "dparameter")


@pytest.mark.parametrize("ranks, algorithm", [pytest.param(2, "pushed", marks=pytest.mark.long), (3, "copy of chunks")])
def test_weight_gradients_with_zero_rows_compiled(ranks: int, algorithm: str) -> None:
    d = VirtualTokenDispatcher(ranks, **{**SETTINGS, **ALGORITHMS[algorithm]})
    tokens, experts = rounds(ranks, 0), [Gated(torch.float32) for _ in range(ranks)]
    trained(d, experts, tokens, True, compiled)
    _, want = dense(tokens, torch.float32)
    for results, wanted in zip(zip(*map(gradients, experts), strict=True), want, strict=True):
        assert_near(sum(g.double() for g in results), wanted, torch.float32, "dparameter")


def test_weight_gradients_without_zero_rows_are_nan() -> None:
    """The NaN that these tests allocate reaches code that reads it."""
    d = VirtualTokenDispatcher(2, **{**SETTINGS, "zero_rows": False})
    experts = [Gated(torch.float32) for _ in range(2)]
    trained(d, experts, rounds(2, 0), True)
    assert all(g.isnan().any() for expert in experts for g in gradients(expert) if g.dim() == 2)


class Listed:
    """A dispatcher of one rank with a list interface."""

    def __init__(self, d: TokenDispatcher) -> None:
        self.d = d

    def dispatch(self, xs: list, ids: list, weights: list) -> list:
        return [self.d.dispatch(xs[0], ids[0], weights[0])]

    def combine(self, outputs: list, routed: list, weighted: bool) -> list:
        return [self.d.combine(outputs[0], routed[0], weighted=weighted)]


OF_TRANSPORTS: list[tuple[str, dict, Any]] = [
    ("shared_memory", {}, None),
    ("shared_memory", {"align": 4}, compiled),
    ("shared_memory", {"save": "copy", "align": 4}, None),
    ("shared_memory", {"save": "redispatch"}, None),
    ("process_group", {"align": 4}, None),
    ("process_group", {"chunk_capacity": 18}, None),
    ("hierarchical", {"align": 4}, None),
    ("symmetric_memory", {}, None),
    ("symmetric_memory", {}, compiled),
    ("symmetric_memory", {"pooled_buffers": 0, "align": 4}, None),
    ("symmetric_memory", {"save": "copy"}, None),
    ("symmetric_memory", {"save": "redispatch"}, None),
]


def of_each_transport(rank: int, compiling: int) -> list[list[list]]:
    """The first ranks compile what OF_TRANSPORTS compiles."""
    poisoned()
    torch.use_deterministic_algorithms(True)
    results = []
    for transport, given, run in OF_TRANSPORTS:
        d = TokenDispatcher(**SETTINGS, **given, transport=transport)
        for number in range(1 if run else 3):
            experts = Gated(torch.float32)
            tokens = [rounds(dist.get_world_size(), number)[rank]]
            trained(Listed(d), [experts], tokens, number != 2, run if rank < compiling else None)
            results.append([number, [g.tolist() for g in gradients(experts)]])
        d.check()
    return results


@pytest.mark.multi
# In the gate no rank compiles: test_weight_gradients_with_zero_rows_compiled does.
@pytest.mark.parametrize("size, compiling", [(3, 0), *(pytest.param(n, n, marks=pytest.mark.long) for n in (3, 5))])
def test_weight_gradients_with_zero_rows_on_all_transports(size: int, compiling: int) -> None:
    torch.set_num_threads(1)
    of_ranks = run_ranks(of_each_transport, size, compiling)
    want = [dense(rounds(size, number), torch.float32)[1] for number in range(3)]
    assert len(of_ranks[0]) == 3 * len(OF_TRANSPORTS) - 2 * 2
    for case, by_rank in enumerate(zip(*of_ranks, strict=True)):
        (number, *others), of_parameters = zip(*by_rank, strict=True)
        assert others == [number] * (size - 1)
        for results, wanted in zip(zip(*of_parameters, strict=True), want[number], strict=True):
            total = sum(torch.tensor(g, dtype=torch.float64) for g in results)
            assert_near(total, wanted, torch.float32, f"dparameter of case {case}")


@pytest.mark.plan
def test_zero_rows_by_default() -> None:
    """The default depends on the capacity only, not on the number of ranks."""

    def of(ranks: int, **given: Any) -> bool | None:
        settings = {"num_experts": 16, "top_k": 2, "hidden": 8, "max_tokens": 10, **given}
        return DispatchConfig(ranks, **settings).zero_rows

    for ranks in (1, 2, 8, 64):
        assert of(ranks) is of(ranks, expert_capacity=1) is of(ranks, capacity=31) is of(ranks, capacity=1.6) is False
        assert of(ranks, capacity=30) is of(ranks, capacity=1.5) is of(ranks, capacity=1.25, align=16) is True
        assert of(ranks, zero_rows=True) is of(ranks, zero_rows=True, capacity=4.0) is True
        assert of(ranks, zero_rows=False, capacity=1.0) is False
        assert of(ranks, layout="batched") is of(ranks, layout="batched", zero_rows=False) is None
    configs = [DispatchConfig(2, num_experts=4, top_k=1, hidden=8, max_tokens=4, zero_rows=z) for z in (True, False)]
    assert configs[0].fingerprint(0) != configs[1].fingerprint(0)
    for wrong in (1, "yes", 0.0):
        with pytest.raises(ArgumentError, match=f"zero_rows: {wrong!r}; allowed: True, False, None"):
            of(2, zero_rows=wrong)


def test_zero_rows_of_expert_parallel_and_torchtitan() -> None:
    config = TorchtitanDispatcher.Config(
        num_experts=4, top_k=2, hidden_dim=8, num_max_tokens_per_rank=4, dtype="float32", zero_rows=True
    )
    titan = config.build()
    titan.wire_meshes(ep_mesh=None)
    assert titan.dispatcher is not None and titan.dispatcher.config.zero_rows is True
    assert "rows from num_rows on are zero" in titan.dispatcher.explain()
    assert ExpertParallel(top_k=2, hidden=8, max_tokens=4, zero_rows=True)._settings["zero_rows"] is True


@pytest.fixture
def sevens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill allocations of eager code with 7, never NaN."""

    def sevens_like(x: torch.Tensor) -> torch.Tensor:
        return torch.full(x.shape, 7, dtype=x.dtype, device=x.device)

    new_received = TokenEngine._new_received

    def new_sevens(*given: Any) -> list:
        return [tuple(map(sevens_like, pair)) for pair in new_received(*given)]

    monkeypatch.setattr(TokenEngine, "_new_received", new_sevens)
    monkeypatch.setattr(
        InProcessTransport, "empty", lambda self, shape, dtype, device: torch.full(tuple(shape), 7, dtype=dtype)
    )
    monkeypatch.setattr("shardweave.runtime.moe.activation._new", sevens_like)
    torch.use_deterministic_algorithms(False)


def rest(d: VirtualTokenDispatcher) -> list[torch.Tensor]:
    """Return the unused rows of all tensors of a layer and its backward."""
    tokens = rounds(2, 0)
    xs = [t.x.clone().requires_grad_() for t in tokens]
    routed, outputs = d.dispatch(xs, [t.ids for t in tokens], [t.weights for t in tokens]), []
    for r in routed:
        with r.kept():
            outputs.append(silu_and_mul(r.x, r.x, r))
    ys = d.combine(outputs, routed)
    gradients = torch.autograd.grad(ys, outputs, [t.gradient for t in tokens])
    again = [r._again.rows for r in routed if r._again is not None]
    results = [*[r.x for r in routed], *[r.weights[..., None] for r in routed], *outputs, *gradients, *again]
    of_rank = zip(results, [*routed] * 5, strict=False)
    return [x.detach().flatten(0, -2)[int(r.num_rows) :] for x, r in of_rank]


HELD: list[dict] = [{}, {"save": "copy"}, {"save": "redispatch"}, {"one_sided": False}]


@pytest.mark.parametrize("given", HELD, ids=str)
def test_unused_rows(given: dict, sevens: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero with zero_rows, else unchanged memory, or NaN with SHARDWEAVE_POISON_ROWS."""
    for poison in (None, "", "0", "1"):
        if poison is None:
            monkeypatch.delenv("SHARDWEAVE_POISON_ROWS", raising=False)
        else:
            monkeypatch.setenv("SHARDWEAVE_POISON_ROWS", poison)
        zeroed, plain = (VirtualTokenDispatcher(2, **{**SETTINGS, "zero_rows": z}, **given) for z in (True, False))
        assert all(len(rows) and (rows == 0).all() for rows in rest(zeroed))
        assert all(len(rows) and (rows.isnan() if poison == "1" else rows == 7).all() for rows in rest(plain))
    batched = VirtualTokenDispatcher(2, **{**SETTINGS, "zero_rows": False, "layout": "batched"})
    assert not any(len(rows) for rows in rest(batched))
    monkeypatch.setenv("SHARDWEAVE_POISON_ROWS", "yes")
    with pytest.raises(ArgumentError, match="SHARDWEAVE_POISON_ROWS: 'yes'; allowed: 0, 1"):
        VirtualTokenDispatcher(2, **{**SETTINGS, "zero_rows": False})


def test_poison_in_compiled_experts(sevens: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_POISON_ROWS", "1")
    d = VirtualTokenDispatcher(2, **{**SETTINGS, "zero_rows": False})
    experts = [Gated(torch.float32) for _ in range(2)]
    trained(d, experts, rounds(2, 0), True, compiled)
    assert all(g.isnan().any() for expert in experts for g in gradients(expert) if g.dim() == 2)
