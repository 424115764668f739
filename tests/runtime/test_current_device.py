"""Every public entry point makes the device of its tensors current, whichever was current."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from pretended_gpus import PretendedGpus

import shardweave
from shardweave.planner import Mesh, Request
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

pytestmark = pytest.mark.plan
OTHER = 3
SETTINGS = {"num_experts": 5, "top_k": 2, "hidden": 6, "max_tokens": 9, "dtype": torch.float32}


@pytest.fixture
def gpus() -> PretendedGpus:
    return PretendedGpus(OTHER)


def layer(**settings: Any) -> list[torch.Tensor]:
    d = VirtualTokenDispatcher(2, **with_options(**SETTINGS, **settings))
    tokens = [tokens_of(rank, 4 + rank, 2, 5, 6, torch.float32, "holes") for rank in range(2)]
    xs, weights = (
        [x.clone().requires_grad_() for x in of] for of in ([t.x for t in tokens], [t.weights for t in tokens])
    )
    found = []
    for _ in range(4):
        routed = d.dispatch(xs, [t.ids for t in tokens], weights)
        ys = d.combine([r.x * 2 for r in routed], routed)
        # Not torch.autograd.backward, which leaves function modes.
        gradients = tuple(t.gradient for t in tokens)
        torch.autograd.Variable._execution_engine.run_backward(tuple(ys), gradients, False, False, (), True, True)
        found += [*ys, *[x.grad.clone() for x in (*xs, *weights) if x.grad is not None]]
    d.check()
    return found


@pytest.mark.parametrize("options", [{}, {"one_sided": False}, {"one_sided": False, "chunk_capacity": 2.0}], ids=str)
def test_token_dispatcher(gpus: PretendedGpus, options: dict[str, Any]) -> None:
    want = layer(**options)
    with gpus:
        got = layer(**options, device=f"cuda:{OTHER}")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # Events are recorded behind the copies to the host that they stand for.
    assert {"event", "capturing"} <= {name for name, _ in gpus.log}
    assert {index for _, index in gpus.log} == {OTHER} and gpus.current == 0


def test_simulate(gpus: PretendedGpus) -> None:
    program = shardweave.plan((2, 2), (4, 6), "float32", "P S1", "S1 R")
    layouts = shardweave.Layout.parse("P S1"), shardweave.Layout.parse("S1 R")
    several = shardweave.plan_batch([Request(Mesh((2, 2)), (4, 6), "float32", *layouts)] * 2)
    inputs = [torch.randn(4, 3) for _ in range(4)]
    want = shardweave.simulate(program, inputs)
    with gpus:
        got = [shardweave.simulate(program, inputs), *shardweave.simulate(several, [inputs] * 2)]
    assert all(torch.equal(a, b) for outs in got for a, b in zip(outs, want, strict=True))
    assert gpus.log and {index for _, index in gpus.log} == {OTHER} and gpus.current == 0
