"""TokenDispatcher under torch.compile: bitwise equal to eager; no call is dropped, merged or reordered."""

from __future__ import annotations

import shutil

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import run_ranks
from torch.utils.checkpoint import checkpoint

from shardweave.errors import CapacityError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

T, K, E, H = 5, 2, 3, 8


@pytest.fixture(autouse=True)
def forgotten():
    """Reset Dynamo, so that earlier tests do not count as recompilations."""
    torch._dynamo.reset()


def virtual(**given) -> VirtualTokenDispatcher:
    settings = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 16, "dtype": torch.float32, "align": 4}
    return VirtualTokenDispatcher(2, **with_options(**{**settings, **given}))


def leaves(count: int, routing: str = "holes", dtype: torch.dtype = torch.float32):
    """Return x and weights of two ranks, which require gradients, their ids, and the gradients of results."""
    tokens = [tokens_of(r, count + r, K, E, H, dtype, routing) for r in range(2)]
    xs = [t.x.clone().requires_grad_() for t in tokens]
    weights = [t.weights.clone().requires_grad_() for t in tokens]
    return xs, weights, [t.ids for t in tokens], [t.gradient for t in tokens]


needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor on CPUs needs a C++ compiler"
)
# Inductor includes everything that aot_eager does.


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def same(got, want) -> bool:
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "one_sided, weighted, given, backend",
    [
        (True, False, {"layout": "batched", "expert_capacity": 6, "overflow": "drop"}, "aot_eager"),
        (True, True, {"quantize": "fp8_row", "dtype": torch.bfloat16}, "aot_eager"),
        pytest.param(
            False, True, {"nodes": [0, 1], "two_level": True, "save": "copy"}, "aot_eager", marks=pytest.mark.long
        ),
        pytest.param(True, True, {}, "inductor", marks=[needs_a_compiler, pytest.mark.long]),
        pytest.param(
            False,
            True,
            {"chunk_capacity": 3, "overflow": "drop"},
            "inductor",
            marks=[needs_a_compiler, pytest.mark.long],
        ),
    ],
    ids=str,
)
def test_compiled_equals_eager_for_any_number_of_tokens(one_sided, weighted, given, backend):
    """The experts are exact in any order of operations, so Inductor's code is bitwise equal."""
    d, dtype = virtual(one_sided=one_sided, **given), given.get("dtype", torch.float32)

    def layer(xs, weights, ids, adds):
        routed = d.dispatch(xs, ids, weights)
        rows = [r.x if r.scale is None else r.dequantized() for r in routed]
        outputs = [
            x.clamp(min=-0.5) * (1.0 if weighted else r.weights.unsqueeze(-1))
            for x, r in zip(rows, routed, strict=True)
        ]
        return d.combine(outputs, routed, add=adds, weighted=weighted), [(r.offsets, r.dropped) for r in routed]

    fast = compiled(layer, backend)
    for count in (5, 9, 3, 0):
        collected = []
        for function in (layer, fast):
            xs, weights, ids, gradients = leaves(count, dtype=dtype)
            adds = [torch.ones_like(x).requires_grad_() for x in xs]
            ys, ends = function(xs, weights, ids, adds)
            torch.autograd.backward(ys, gradients)
            collected.append([*ys, *[x.grad for x in (*xs, *weights, *adds)], *[x for pair in ends for x in pair]])
        assert same(*collected)
        assert any(y.any() for y in collected[0][:2]) and ("overflow" not in given or collected[0][-1] > 0 or count < 5)


def dispatches(d) -> int:
    """The number of dispatches so far, which the error about a bad id names."""
    xs, weights, ids, _ = leaves(1)
    ids[0][0, 0] = E
    with torch.no_grad(), pytest.raises(CapacityError) as raised:
        d.dispatch(xs, ids, weights)
        d.check()
    return int(str(raised.value).removeprefix("dispatch ").split(":")[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_a_compiler, pytest.mark.long])])
def test_compile_keeps_unused_and_equal_calls(backend):
    """An unused dispatch; two equal ones, each with its combine, and their backward."""
    d = virtual()

    def unused(xs, weights, ids):
        d.dispatch(xs, ids, weights)
        return xs[0] + 1

    def twice(xs, weights, ids):
        first, second = d.dispatch(xs, ids, weights), d.dispatch(xs, ids, weights)
        ys = d.combine([r.x for r in first], first)
        return [a + b for a, b in zip(ys, d.combine([r.x for r in second], second), strict=True)]

    xs, weights, ids, gradients = leaves(5)
    fast = compiled(unused, backend)
    with torch.no_grad():
        for number in (1, 3):  # counting dispatches, too
            fast(xs, weights, ids)
            assert dispatches(d) == number
    collected = []
    for function in (twice, compiled(twice, backend)):
        xs, weights, ids, gradients = leaves(5)
        number = dispatches(d)
        ys = function(xs, weights, ids)
        torch.autograd.backward(ys, gradients)
        assert dispatches(d) == number + 3
        collected.append([*ys, *[x.grad for x in (*xs, *weights)]])
    assert same(*collected)


def doubled(d, xs, weights, ids, weighted: bool = True, graph_break: bool = False):
    """One layer, whose experts double their rows."""
    routed = d.dispatch(xs, ids, weights)
    if graph_break:
        torch._dynamo.graph_break()
    return d.combine([r.x * 2 for r in routed], routed, weighted=weighted)


def two_layers(d, wrap):
    first, second = wrap(lambda *given: doubled(d, *given)), wrap(lambda *given: doubled(d, *given, weighted=False))
    xs, weights, ids, gradients = leaves(4)
    ys = second(first(xs, weights, ids), weights, ids)
    torch.autograd.backward(ys, gradients)
    return [*ys, *[x.grad for x in (*xs, *weights)]]


def two_microbatches(d, wrap):
    layer = wrap(lambda *given: doubled(d, *given))
    batches = [leaves(count) for count in (4, 5)]
    ys = [layer(xs, weights, ids) for xs, weights, ids, _ in batches]
    for y, (*_, gradients) in zip(ys, batches, strict=True):
        torch.autograd.backward(y, gradients)
    return [*ys[0], *ys[1], *[x.grad for xs, weights, *_ in batches for x in (*xs, *weights)]]


def evaluation_between(d, wrap):
    layer = wrap(lambda *given: doubled(d, *given))
    xs, weights, ids, gradients = leaves(4)
    ys = layer(xs, weights, ids)
    with torch.no_grad():
        evaluated = layer(xs, weights, ids)
    torch.autograd.backward(ys, gradients)
    return [*ys, *evaluated, *[x.grad for x in (*xs, *weights)]]


def checkpointed_layers(d, wrap):
    """Checkpoints inside of compiled blocks, whose backward dispatches again."""
    kept = {"use_reentrant": False}
    layer = wrap(lambda *given: checkpoint(lambda *g: doubled(d, *g), *given, **kept))
    xs, weights, ids, gradients = leaves(4)
    ys = layer(layer(xs, weights, ids), weights, ids)
    torch.autograd.backward(ys, gradients)
    return [*ys, *[x.grad for x in (*xs, *weights)]]


def unused_gradients(d, wrap):
    """Two layers, of which no result of `combine_backward` is used."""
    layer = wrap(lambda xs, weights, ids: doubled(d, [x.round() for x in xs], weights, ids, weighted=False))
    xs, weights, ids, gradients = leaves(4)
    weights = [w.detach() for w in weights]
    ys = layer(layer(xs, weights, ids), weights, ids)
    torch.autograd.backward(ys, gradients)
    return [*ys, *[x.grad for x in xs]]


PROGRAMS = [two_layers, two_microbatches, evaluation_between, checkpointed_layers, unused_gradients]


@pytest.mark.parametrize(
    "program, backend",
    [
        *[(program, "aot_eager") for program in PROGRAMS],
        *[pytest.param(p, "inductor", marks=[needs_a_compiler, pytest.mark.long]) for p in PROGRAMS[-1:]],
    ],
)
def test_compiled_graphs_run_between_forward_and_backward(program, backend):
    """Calls of any compiled function on the same transport, in the order of the eager program."""
    d = virtual()
    assert same(program(d, lambda function: function), program(d, lambda function: compiled(function, backend)))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo fails at graph breaks while it holds RoutedTokens")
def test_compile_with_graph_break_between_dispatch_and_combine():
    d, collected = virtual(), []
    broken = torch.compile(doubled, backend="aot_eager")
    for function in (doubled, broken):
        xs, weights, ids, gradients = leaves(4)
        ys = function(d, xs, weights, ids, graph_break=function is broken)
        torch.autograd.backward(ys, gradients)
        collected.append([*ys, *[x.grad for x in (*xs, *weights)]])
    assert same(*collected)


def test_compiled_overflow_is_raised_and_results_are_fresh():
    d = virtual()

    def layer(xs, weights, ids, out):
        routed = d.dispatch(xs, ids, weights)
        return d.combine([r.x for r in routed], routed, out=out), [r.x for r in routed]

    fast = compiled(layer)
    with torch.no_grad():
        xs, weights, ids, _ = leaves(5)
        out = [torch.full_like(x, float("nan")) for x in xs]
        ys, rows = fast(xs, weights, ids, out)
        assert all(y is o for y, o in zip(ys, out, strict=True))
        assert same(ys, layer(xs, weights, ids, None)[0])
        kept = [x.clone() for x in rows]
        ids[0][0, 0] = E
        fast([x + 1 for x in xs], weights, ids, out)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(rows, kept, strict=True))
        with pytest.raises(CapacityError, match="^dispatch 2: 1 ids were outside"):
            d.check()


def test_compile_refuses_redispatch():
    d = virtual(save="redispatch")
    xs, weights, ids, _ = leaves(2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="redispatch"):
        compiled(lambda: d.dispatch(xs, ids, weights)[0].x)()


@pytest.mark.plan
def test_operators_are_cudagraph_unsafe():
    for name in ("dispatch_tokens", "combine_tokens", "dispatch_tokens_backward", "combine_tokens_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.shardweave, name).default.tags


def blocks_of_one_rank(rank: int, backend: str | None) -> list:
    """Two blocks, each compiled, and two microbatches, whose backward follows both; returns results and gradients."""
    d = TokenDispatcher(
        num_experts=E, top_k=K, hidden=H, max_tokens=16, dtype=torch.float32, options=DispatchOptions(align=4)
    )

    def block(x, weights, ids):
        routed = d.dispatch(x, ids, weights)
        return d.combine(routed.x * 2, routed, add=x)

    blocks = [compiled(lambda *given: block(*given), backend) if backend else block for _ in range(2)]
    batches = [tokens_of(rank, count + rank, K, E, H, torch.float32, "holes") for count in (5, 3)]
    xs = [t.x.clone().requires_grad_() for t in batches]
    ys = [blocks[1](blocks[0](x, t.weights, t.ids), t.weights, t.ids) for x, t in zip(xs, batches, strict=True)]
    for y, t in zip(ys, batches, strict=True):
        y.backward(t.gradient)
    d.check()
    return [x.tolist() for x in (*ys, *[x.grad for x in xs])]


@pytest.mark.multi
def test_processes_compile_each_block():
    assert run_ranks(blocks_of_one_rank, 2, "aot_eager") == run_ranks(blocks_of_one_rank, 2, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("one_sided", [True, False])
def test_compiled_equals_eager_on_gpu(one_sided, backend):
    """The experts are exact in any order of operations, so Inductor's code is bitwise equal."""
    d = virtual(one_sided=one_sided, device="cuda")

    def layer(xs, weights, ids):
        routed = d.dispatch(xs, ids, weights)
        return d.combine([r.x * 2 for r in routed], routed)

    collected = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        xs, weights, ids, gradients = leaves(5)
        xs, weights = [[x.detach().cuda().requires_grad_() for x in given] for given in (xs, weights)]
        ys = function(xs, weights, [i.cuda() for i in ids])
        torch.autograd.backward(ys, [g.cuda() for g in gradients])
        collected.append([*ys, *[x.grad for x in (*xs, *weights)]])
    assert same(*collected) and all(y.any() for y in collected[0])
    d.check()
