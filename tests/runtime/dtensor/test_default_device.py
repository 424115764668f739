"""The library ignores torch's default device."""

from __future__ import annotations

import copy

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

SETTINGS = {"num_experts": 5, "top_k": 2, "hidden": 6, "max_tokens": 9, "dtype": torch.float32, "align": 4}
WAYS = [
    ("shared_memory", {}),
    ("process_group", {}),
    ("process_group", {"chunk_capacity": 2.0}),
    ("hierarchical", {}),
    ("symmetric_memory", {}),
]


def layer(d, tokens: list, rounds: int = 2) -> list[torch.Tensor]:
    """Results and gradients of all ranks of a virtual dispatcher."""
    found = []
    for _ in range(rounds):
        xs, weights = [
            [x.clone().requires_grad_() for x in of] for of in zip(*[(t.x, t.weights) for t in tokens], strict=True)
        ]
        routed = d.dispatch(xs, [t.ids for t in tokens], weights)
        ys = d.combine([r.x * 2 for r in routed], routed)
        torch.autograd.backward(ys, [t.gradient for t in tokens])
        found += [*ys, *[x.grad for x in (*xs, *weights)]]
    d.check()
    return found


class Listed:
    """A dispatcher of one rank with the interface of a virtual one."""

    def __init__(self, d: TokenDispatcher) -> None:
        self.d, self.check = d, d.check

    def dispatch(self, xs, ids, weights):
        return [self.d.dispatch(xs[0], ids[0], weights[0])]

    def combine(self, outputs, routed):
        return [self.d.combine(outputs[0], routed[0])]


def given(rank: int):
    return tokens_of(rank, 4 + rank, 2, 5, 6, torch.float32, "holes")


def everything(rank: int, default: str) -> list[list]:
    mesh = init_device_mesh("cpu", (2,))
    tokens, whole = [given(rank)], torch.arange(35.0).view(7, 5)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    summands = DTensor.from_local(whole + rank, mesh, [Partial()])
    found = []
    with torch.device(default):
        for transport, more in WAYS:
            found += layer(Listed(TokenDispatcher(**with_options(**SETTINGS, **more, transport=transport))), tokens)
        for transport in dict(WAYS):
            for target in (Shard(1), Replicate(), Partial()):
                found.append(shardweave.redistribute(x, [target], transport=transport).to_local())
            found.append(shardweave.redistribute(summands, [Shard(0)], transport=transport).to_local())
    return [f.tolist() for f in found]


@pytest.mark.multi
def test_ranks_ignore_the_default_device():
    assert run_ranks(everything, 2, "meta") == run_ranks(everything, 2, "cpu")


@pytest.mark.parametrize("one_sided", [True, False])
def test_virtual_ranks_ignore_the_default_device(one_sided):
    tokens = [given(rank) for rank in range(3)]
    want = layer(VirtualTokenDispatcher(3, **with_options(**SETTINGS, one_sided=one_sided)), tokens)
    with torch.device("meta"):
        got = layer(VirtualTokenDispatcher(3, **with_options(**SETTINGS, one_sided=one_sided)), tokens)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_copied_model_shares_the_dispatcher():
    d = VirtualTokenDispatcher(2, **with_options(**SETTINGS))
    module = torch.nn.Linear(2, 2)
    module.dispatcher = d
    assert copy.deepcopy(module).dispatcher is d
