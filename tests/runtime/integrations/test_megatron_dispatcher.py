"""MegatronDispatcher by the calls of Megatron-core's MoELayer, and in its MoELayer if that is installed."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from moe_reference import assert_near, dense, expert, matrices_of, tokens_of
from rank_processes import run_ranks
from test_threads import advanced_in_turns
from torch import nn

from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.runtime.integrations.megatron import MegatronDispatcher, use_megatron_dispatchers
from shardweave.runtime.moe.options import DispatchOptions

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (pip install megatron-core)"
)
EXPERTS, K, HIDDEN = 8, 2, 8
COUNTS = [9, 0, 4, 7]


def groups(tensor_parallel: int) -> SimpleNamespace:
    """The groups of a mesh of expert-parallel x tensor-parallel ranks, of which the latter are consecutive."""
    size, rank, found = dist.get_world_size(), dist.get_rank(), {}
    lines = [list(range(i, i + tensor_parallel)) for i in range(0, size, tensor_parallel)]
    for name, each in (("expt_tp", lines), ("ep", list(zip(*lines, strict=True)))):
        for ranks in each:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                found[name] = group
    return SimpleNamespace(**found, tp_ep=dist.group.WORLD)


def multihot(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing map and the probabilities, [T, E], of ids without repeats."""
    chosen = torch.zeros(len(ids), EXPERTS + 1, dtype=torch.bool).scatter(1, ids % (EXPERTS + 1), True)
    probs = weights.new_zeros(len(ids), EXPERTS + 1).scatter(1, ids % (EXPERTS + 1), weights)
    return chosen[:, :EXPERTS], probs[:, :EXPERTS]


def distinct(t):
    """Tokens whose experts are distinct, as routers choose them; some without a second expert."""
    ids = torch.where(t.ids[:, :1] == t.ids[:, 1:], -1, t.ids[:, 1:])
    t.ids = torch.cat([t.ids[:, :1], ids], 1)
    return t


class Pass:
    """A forward pass of a layer with MegatronDispatcher; `steps` yields after each method."""

    def __init__(self, dispatcher: MegatronDispatcher, t, own: torch.Tensor, part: float = 1.0) -> None:
        self.dispatcher, self.t, self.part = dispatcher, t, part
        self.x, self.weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
        self.own = own.clone().requires_grad_()
        self.y = torch.empty(0)

    def steps(self) -> Iterator[None]:
        dispatcher = self.dispatcher
        chosen, probs = multihot(self.t.ids, self.weights)
        hidden, probs = dispatcher.dispatch_preprocess(self.x[:, None], chosen, probs)
        yield
        hidden, probs = dispatcher.token_dispatch(hidden, probs)
        yield
        rows, counts, probs = dispatcher.dispatch_postprocess(hidden, probs)
        yield
        assert counts.device.type == "cpu" and counts.sum() == len(rows) == len(probs)
        # A shard of an expert returns a part of its output.
        done = [expert(r, m) * self.part for r, m in zip(rows.split(counts.tolist()), self.own, strict=True)]
        output = dispatcher.combine_preprocess(torch.cat(done) * probs[:, None])
        yield
        output = dispatcher.token_combine(output)
        yield
        self.y = dispatcher.combine_postprocess(output)
        yield
        assert self.y.shape == (len(self.t.x), 1, HIDDEN)
        self.y.backward(self.t.gradient[:, None])

    def check(self, matrices: torch.Tensor) -> None:
        want, there = dense(self.t, matrices), self.t.ids >= 0
        assert_near(self.y.detach()[:, 0], want["y"], torch.float32, "y")
        assert_near(self.x.grad, want["x"], torch.float32, "x")
        assert_near(self.weights.grad[there], want["weights"][there], torch.float32, "weights")


def made(tensor_parallel: int) -> tuple[MegatronDispatcher, torch.Tensor, slice, int]:
    """A dispatcher, the matrices of all experts, the experts of this rank and its shard of them."""
    found, local = groups(tensor_parallel), EXPERTS * tensor_parallel // dist.get_world_size()
    first = dist.get_rank(found.ep) * local
    dispatcher = MegatronDispatcher(
        local, list(range(first, first + local)), SimpleNamespace(moe_router_topk=K), pg_collection=found, max_tokens=9,
        device="cpu",
    )  # fmt: skip
    own = slice(first, first + local)
    return dispatcher, matrices_of(EXPERTS, HIDDEN, torch.float32), own, dist.get_rank(found.expt_tp)


def tokens_of_all(step: int) -> list:
    return [
        distinct(tokens_of(r, COUNTS[r], K, EXPERTS, HIDDEN, torch.float32, "holes", step))
        for r in range(dist.get_world_size())
    ]


def by_the_seam(rank: int, tensor_parallel: int) -> None:
    dispatcher, matrices, own, shard = made(tensor_parallel)
    part = 0.25 + 0.5 * shard if tensor_parallel == 2 else 1.0
    for step in range(2):
        everyone = tokens_of_all(step)
        layer = Pass(dispatcher, everyone[rank], matrices[own], part)
        for _ in layer.steps():
            pass
        layer.check(matrices)
        total = sum(dense(o, matrices)["matrices"] for o in everyone)[own]
        assert_near(layer.own.grad, total * part, torch.float32, "matrices")
    dispatcher.dispatcher.check()


@pytest.mark.multi
@pytest.mark.parametrize("size, tensor_parallel", [(1, 1), (2, 1), (4, 2)])
def test_by_the_calls_of_the_layer(size, tensor_parallel):
    run_ranks(by_the_seam, size, tensor_parallel)


def several_passes(rank: int) -> None:
    """Each method of two passes in turn: on two threads right, on one thread refused."""
    dispatcher, matrices, own, _ = made(1)
    two = [Pass(dispatcher, tokens_of_all(step)[(rank + step) % 2], matrices[own]) for step in range(2)]
    advanced_in_turns(*[layer.steps() for layer in two])
    for layer in two:
        layer.check(matrices)
    for begun, what in ((1, "token_dispatch: probs"), (2, "dispatch_postprocess: hidden_states")):
        first, second = (layer.steps() for layer in two)
        for steps in (first, second):
            for _ in range(begun):
                next(steps)
        with pytest.raises(ArgumentError, match=f"{what}: not of this thread's last .*; allowed: after "):
            next(first)
        for _ in second:  # goes on
            pass
    # What a pass that raised has left behind does not matter.
    for steps in (two[0].steps(), two[1].steps()):
        next(steps)
    last = Pass(dispatcher, tokens_of_all(5)[rank], matrices[own])
    for _ in last.steps():
        pass
    last.check(matrices)


@pytest.mark.multi
def test_passes_of_several_threads():
    run_ranks(several_passes, 2)


def refused(rank: int) -> None:
    found, config = groups(1), SimpleNamespace(moe_router_topk=K)
    with pytest.raises(ArgumentError, match=r"local_expert_indices: \[0, 2\]; allowed: \[0, 1\]"):
        MegatronDispatcher(2, [0, 2], config, found)
    with pytest.raises(ArgumentError, match="expert_map: .*; allowed here: None, since Megatron's experts"):
        MegatronDispatcher(2, [0, 1], config, found, options=DispatchOptions(expert_map=[[0, 1]]))
    dispatcher = MegatronDispatcher(2, [0, 1], config, found)
    with pytest.raises(UnsupportedError, match="moe_shared_expert_overlap: True; allowed .*: False"):
        dispatcher.set_shared_experts(None)
    with pytest.raises(ArgumentError, match="allowed: after dispatch_preprocess"):
        dispatcher.token_dispatch(torch.zeros(1, 8), torch.zeros(1, 2))
    with pytest.raises(ArgumentError, match="nothing has been dispatched"):
        dispatcher.combine_preprocess(torch.zeros(1, 8))
    with pytest.raises(ArgumentError, match=r"routing_map: \(1, 3\) with probs \(1, 3\); allowed: both \[T, 2\]"):
        dispatcher.dispatch_preprocess(torch.zeros(1, 8), torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(ArgumentError, match="model: Linear without MoELayer"):
        use_megatron_dispatchers(nn.Linear(1, 1))


@pytest.mark.multi
def test_refused_arguments():
    run_ranks(refused, 1)


@needs_megatron
@pytest.mark.multi
def test_has_the_methods_of_megatron():
    """Every abstract method of 0.19, with the parameters that MoELayer passes by position."""
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    assert issubclass(MegatronDispatcher, MoETokenDispatcher)
    abstract = [n for n, f in vars(MoETokenDispatcher).items() if getattr(f, "__isabstractmethod__", False)]
    assert len(abstract) == 6
    for name in abstract:
        theirs = inspect.signature(getattr(MoETokenDispatcher, name)).parameters
        ours = inspect.signature(getattr(MegatronDispatcher, name)).parameters
        assert name in vars(MegatronDispatcher) and len(ours) == len(theirs), name


def in_megatrons_layer(rank: int) -> None:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: "cpu"  # to which the router moves its weight
    alone = next(g for g in [dist.new_group([r]) for r in range(dist.get_world_size())] if dist.get_rank(g) >= 0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=K,
        moe_ffn_hidden_size=12, ffn_hidden_size=12, use_cpu_initialization=True, add_bias_linear=False,
        moe_token_dispatcher_type="allgather", moe_router_load_balancing_type="none", gated_linear_unit=True,
        activation_func=nn.functional.silu,
    )  # fmt: skip
    results = {}
    for name, ep in (("theirs", alone), ("ours", dist.group.WORLD)):
        pgs = ProcessGroupCollection()
        for field in ("tp", "cp", "tp_cp", "expt_tp", "expt_dp", "dp", "dp_cp", "tp_dp_cp"):
            setattr(pgs, field, alone)
        pgs.ep = pgs.tp_ep = ep
        layer = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)(
            config, pg_collection=pgs
        )
        local = layer.num_local_experts
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=g))
            up, down = torch.randn(EXPERTS, 24, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, 12, generator=g)
            for i, e in zip(range(local), layer.local_expert_indices, strict=True):
                layer.experts.local_experts[i].linear_fc1.weight.copy_(up[e] / HIDDEN**0.5)
                layer.experts.local_experts[i].linear_fc2.weight.copy_(down[e] / 12**0.5)
        if name == "ours":
            assert use_megatron_dispatchers(layer, max_tokens=20) == 1
            assert isinstance(layer.token_dispatcher, MegatronDispatcher)
        g = torch.Generator().manual_seed(10 + rank)
        x = torch.randn(3 + rank, 2, HIDDEN, generator=g).requires_grad_()
        y, bias = layer(x)
        assert bias is None
        y.backward(torch.randn(y.shape, generator=g))
        of_experts = {}
        for i, e in zip(range(local), layer.local_expert_indices, strict=True):
            mlp = layer.experts.local_experts[i]
            of_experts[e] = [
                torch.zeros_like(p) if p.grad is None else p.grad
                for p in (mlp.linear_fc1.weight, mlp.linear_fc2.weight)
            ]
        results[name] = {"y": y.detach(), "x": x.grad, "router": layer.router.weight.grad}, of_experts
    (theirs, all_experts), (ours, own_experts) = results["theirs"], results["ours"]
    for key, want in theirs.items():
        torch.testing.assert_close(ours[key], want, rtol=1e-5, atol=1e-5)
    for e, wanted in all_experts.items():
        for i, gradient in enumerate(wanted):
            dist.all_reduce(gradient)
            if e in own_experts:
                torch.testing.assert_close(own_experts[e][i], gradient, rtol=1e-5, atol=1e-5)


@needs_megatron
@pytest.mark.multi
@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_megatrons_layer(size):
    run_ranks(in_megatrons_layer, size)
