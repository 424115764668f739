"""TokenDispatcher under torch.compile: bitwise equal to eager; no call is dropped, merged or reordered."""

from __future__ import annotations

import gc
import shutil

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import run_ranks
from torch.utils.checkpoint import checkpoint

from shardweave.errors import ArgumentError, CapacityError
from shardweave.runtime.moe import ops
from shardweave.runtime.moe.dispatch_record import Tokens
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.transports.in_process import InProcessTransport

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


class Runs:
    """Count the runs of a dispatcher."""

    def __init__(self, dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, run = 0, dispatcher.run

        def counted(what, runs):
            self.number += 1
            return run(what, runs)

        monkeypatch.setattr(dispatcher, "run", counted)


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
        pytest.param(True, True, {}, "aot_eager", marks=pytest.mark.long),  # test_processes_compiled has its settings
        pytest.param(False, True, {}, "aot_eager", marks=pytest.mark.long),
        # test_operators_pass_opcheck has chunks.
        pytest.param(False, True, {"chunk_capacity": 3, "overflow": "drop"}, "aot_eager", marks=pytest.mark.long),
        (True, False, {"layout": "batched", "expert_capacity": 6, "overflow": "drop"}, "aot_eager"),
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
def test_compiled_equals_eager_for_any_number_of_tokens(one_sided, weighted, given, backend, monkeypatch):
    """The experts are exact in any order of operations, so Inductor's code is bitwise equal."""
    d = virtual(one_sided=one_sided, **given)

    def layer(xs, weights, ids, adds):
        routed = d.dispatch(xs, ids, weights)
        outputs = [r.x.clamp(min=-0.5) * (1.0 if weighted else r.weights.unsqueeze(-1)) for r in routed]
        return d.combine(outputs, routed, add=adds, weighted=weighted), [(r.offsets, r.dropped) for r in routed]

    runs, fast = Runs(d, monkeypatch), compiled(layer, backend)
    for count in (5, 9, 3, 0):
        collected = []
        for function in (layer, fast):
            xs, weights, ids, gradients = leaves(count)
            adds = [torch.ones_like(x).requires_grad_() for x in xs]
            runs.number = 0
            ys, ends = function(xs, weights, ids, adds)
            assert runs.number == 2
            torch.autograd.backward(ys, gradients)
            assert runs.number == 4
            collected.append([*ys, *[x.grad for x in (*xs, *weights, *adds)], *[x for pair in ends for x in pair]])
        assert same(*collected)
        assert any(y.any() for y in collected[0][:2]) and (not given or collected[0][-1] > 0 or count < 5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_a_compiler, pytest.mark.long])])
def test_compile_keeps_unused_and_equal_calls(backend, monkeypatch):
    """An unused dispatch; two equal ones, each with its combine, and their backward."""
    d = virtual()

    def unused(xs, weights, ids):
        d.dispatch(xs, ids, weights)
        return xs[0] + 1

    def twice(xs, weights, ids):
        first, second = d.dispatch(xs, ids, weights), d.dispatch(xs, ids, weights)
        ys = d.combine([r.x for r in first], first)
        return [a + b for a, b in zip(ys, d.combine([r.x for r in second], second), strict=True)]

    runs = Runs(d, monkeypatch)
    xs, weights, ids, gradients = leaves(5)
    fast = compiled(unused, backend)
    with torch.no_grad():
        fast(xs, weights, ids)
        assert runs.number == 1
        fast(xs, weights, ids)
        assert runs.number == 2
    collected = []
    for function in (twice, compiled(twice, backend)):
        xs, weights, ids, gradients = leaves(5)
        runs.number = 0
        ys = function(xs, weights, ids)
        assert runs.number == 4
        torch.autograd.backward(ys, gradients)
        assert runs.number == 8
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


@pytest.mark.parametrize(
    "program", [two_layers, two_microbatches, evaluation_between, checkpointed_layers, unused_gradients]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_a_compiler, pytest.mark.long])])
def test_compiled_graphs_run_between_forward_and_backward(program, backend, monkeypatch):
    """Calls of any compiled function on the same transport, in the order of the eager program."""
    d = virtual()
    runs, collected, numbers = Runs(d, monkeypatch), [], []
    for wrap in (lambda function: function, lambda function: compiled(function, backend)):
        runs.number = 0
        collected.append(program(d, wrap))
        numbers.append(runs.number)
    assert same(*collected)
    # A compiled checkpoint needs no second combine in backward, nor, on torch 2.11, a second dispatch.
    least = 8 if torch.__version__ < "2.12" else 10
    assert numbers[0] == numbers[1] or (program is checkpointed_layers and numbers[1] >= least)


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


def test_compiled_overflow_is_raised_and_results_are_fresh(monkeypatch):
    d = virtual()
    dispatched = []
    send = type(d.transfers[0])._empty

    def empty(self, shape, dtype):
        dispatched.append(send(self, shape, dtype))
        return dispatched[-1]

    monkeypatch.setattr(type(d.transfers[0]), "_empty", empty)

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
        transport = {x.untyped_storage().data_ptr() for x in dispatched}
        assert len(transport) > 2 and not transport & {x.untyped_storage().data_ptr() for x in rows}
        ids[0][0, 0] = E
        fast(xs, weights, ids, out)
        with pytest.raises(CapacityError, match="^dispatch 2: 1 ids were outside"):
            d.check()


def arguments_of_operators(**given_settings):
    """Yield each operator with the arguments of a dispatch and its combine."""
    d = virtual(**given_settings)
    xs, weights, ids, gradients = [[x.detach() for x in given] for given in leaves(4)]
    received = d._run_dispatch([Tokens(*item) for item in zip(xs, ids, weights, strict=True)])
    values, row_weights = [rows for rows, _ in received], [record.weights for _, record in received]
    for x in values:
        x.nan_to_num_(0.0)  # unused rows
    records = [tensor for _, record in received for tensor in record.tensors()]
    dispatched = [tensor for rows, record in received for tensor in (rows, *record.tensors())]
    for operator, outs, given in (
        (ops._dispatch_op, dispatched, (xs, ids, weights)),
        (ops._combine_op, xs, (records, values, weights, [None] * len(xs))),
        (ops._dispatch_backward_op, [*xs, *weights], (records, values, row_weights)),
        (ops._combine_backward_op, [*values, *row_weights], (records, gradients, values)),
    ):
        yield d, operator, (d.state.tensor, [torch.zeros_like(x) for x in outs], d.handle, *given)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        pytest.param({"one_sided": False}, marks=pytest.mark.long),
        pytest.param({"one_sided": False, "chunk_capacity": 3.0}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_operators_pass_opcheck(algorithm, monkeypatch):
    """The transport allocates zeros here, so that unused rows compare equal."""

    def zeros(self, shape, dtype, device):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    monkeypatch.setattr(InProcessTransport, "empty", zeros)
    # Keep `d` alive while its operators run.
    for _d, operator, given in arguments_of_operators(**algorithm):
        assert set(torch.library.opcheck(operator, given).values()) == {"SUCCESS"}


def test_compile_refuses_redispatch():
    d = virtual(save="redispatch")
    xs, weights, ids, _ = leaves(2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="redispatch"):
        compiled(lambda: d.dispatch(xs, ids, weights)[0].x)()


@pytest.mark.plan
def test_operators_are_cudagraph_unsafe():
    for name in ("dispatch_tokens", "combine_tokens", "dispatch_tokens_backward", "combine_tokens_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.shardweave, name).default.tags


def test_operator_of_destroyed_dispatcher_raises():
    d = virtual()
    xs, weights, ids, _ = leaves(2)
    ys = [r.x for r in d.dispatch(xs, ids, weights)]
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])  # eager code holds the dispatcher
    state, handle = d.state.tensor, d.handle
    del d, ys
    gc.collect()
    with pytest.raises(ArgumentError, match=f"token dispatcher {handle}: destroyed"):
        ops._dispatch_op(state, [], handle, xs, ids, weights)


def as_one_rank(rank: int, backend: str | None, compiling: int, layers: int) -> list:
    """Layers of one dispatcher, T differs by rank, compiled on the first ranks; returns results and gradients."""
    d = TokenDispatcher(
        num_experts=E, top_k=K, hidden=H, max_tokens=16, dtype=torch.float32, options=DispatchOptions(align=4)
    )

    def layer(x, weights, ids):
        for _ in range(layers):
            routed = d.dispatch(x, ids, weights)
            x = d.combine(routed.x.clamp(min=-0.5) * 2, routed, add=x)
        return x

    t = tokens_of(rank, 5 + rank, K, E, H, torch.float32, "holes")
    x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
    y = (compiled(layer, backend) if backend and rank < compiling else layer)(x, weights, t.ids)
    y.backward(t.gradient)
    d.check()
    return [y.tolist(), x.grad.tolist(), weights.grad.tolist()]


# Virtual ranks compile in the gate. Ranks of an SPMD program compile it alike, or one of them beside one that does not.
@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize(("compiling", "layers"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_a_compiler)])
def test_processes_compiled(backend, compiling, layers):
    assert run_ranks(as_one_rank, 2, backend, compiling, layers) == run_ranks(as_one_rank, 2, None, 0, layers)


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
