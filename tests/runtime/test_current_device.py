"""Every public entry point makes the device of its tensors current, whichever was current."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from pretended_gpus import PretendedGpus

import shardweave
from shardweave.kernels import launch
from shardweave.kernels.launch import Constants, Launches
from shardweave.planner import Mesh, Request
from shardweave.runtime.dtensor import batch, fsdp, local, plain_calls, redistribute_options
from shardweave.runtime.executor import call as calls
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.transports.streams import SideStream

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


class Noting:
    """Stands for what binds a request, and for the bound call: both note the current device."""

    bound = None

    def __init__(self, gpus: PretendedGpus) -> None:
        self.gpus, self.noted = gpus, list[int]()

    def bind(self, *args: Any) -> Noting:
        self.noted.append(self.gpus.current)
        return self

    def __call__(self, x: Any, async_op: bool = False) -> Any:
        self.noted.append(self.gpus.current)
        return x

    build = __call__


def test_redistribution_of_local_tensors(gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, spec, options = Noting(gpus), SimpleNamespace(placements=()), redistribute_options.default
    x: Any = torch.ones(3)
    monkeypatch.setattr(local, "_lookup", noting.bind)
    monkeypatch.setattr(local, "Call", Noting)
    with gpus:
        assert local.run_redistribution(x, spec, spec, options) is x  # type: ignore[arg-type]
        local.bind_redistribution(x, spec, spec, options)  # type: ignore[arg-type]
    assert noting.noted == [OTHER] * 4 and gpus.current == 0


class Spec:
    """A spec whose mesh, itself, has this rank."""

    def __init__(self) -> None:
        self.mesh = self

    def get_coordinate(self) -> tuple[int, ...]:
        return (0,)


def test_redistribute_batch(gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, spec = Noting(gpus), Spec()
    x: Any = SimpleNamespace(_local_tensor=torch.ones(3), _spec=spec)
    monkeypatch.setattr(batch, "_bind", noting.bind)
    monkeypatch.setattr(batch, "binding", nullcontext)  # that of a process group
    monkeypatch.setattr(batch, "as_dtensor", lambda local, target: local)
    with gpus:
        (y,) = batch._run([x], [spec], redistribute_options.default)  # type: ignore[list-item]
    assert y.equal(torch.ones(3)) and noting.noted == [OTHER] * 2 and gpus.current == 0


def test_fsdp(gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, x, group = Noting(gpus), torch.ones(3), object()
    monkeypatch.setattr(fsdp, "plain_call", noting.bind)
    monkeypatch.setattr(fsdp, "mesh_of_group", lambda group: None)
    with gpus:
        fsdp._redistribute_flat(torch.empty(3), x, group, 3, "S0", "R")  # type: ignore[arg-type]
    assert noting.noted == [OTHER] * 2 and gpus.current == 0


def test_redistribution_of_plain_tensors(gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, x, mesh = Noting(gpus), torch.ones(3), Mesh((2,))
    monkeypatch.setattr(plain_calls, "plain_call", noting.bind)
    with gpus:
        y = plain_calls.redistribute_plain(x, mesh, (3,), "R", "S0", redistribute_options.default, ())
    assert y.equal(x) and noting.noted == [OTHER] * 2 and gpus.current == 0


def test_choice_of_transport(gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new transport pins memory and makes a stream."""
    noted = []
    found = SimpleNamespace(choose=lambda *_: noted.append(gpus.current) or (None, ""))
    monkeypatch.setattr(calls, "transports_of", lambda *_: found)
    monkeypatch.setattr(calls, "binding", nullcontext)  # that of a process group
    monkeypatch.setattr(calls, "_chosen", {})
    with gpus:
        calls.transport_for((0, 1), torch.device("cuda", OTHER), None)
    assert noted == [OTHER] and gpus.current == 0


def test_side_stream_is_of_its_device(gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    with gpus:
        out, join = SideStream(torch.device("cuda", OTHER)).run(torch.ones(3), lambda: torch.zeros(3))
        join(out)  # where the tensor is used, which may be anywhere
    assert (
        out.equal(torch.zeros(3))
        and gpus.log == [("wait", OTHER), ("event", OTHER), ("wait", OTHER)]
        and gpus.current == 0
    )


class Compiled:
    """A kernel and what triton compiles it to, which is loaded on the device that is current when it is indexed."""

    arg_names = ("x", "n", "SIZE")

    def __init__(self, gpus: PretendedGpus) -> None:
        self.gpus, self.on = gpus, list[tuple[str, int]]()

    def warmup(self, *arguments: Any, **options: Any) -> Compiled:
        self.on.append(("compile", self.gpus.current))
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Compiled:
        self.on.append(("load", self.gpus.current))
        return self

    def __call__(self, *arguments: Any) -> None:
        self.on.append(("launch", self.gpus.current))


def test_kernels_are_loaded_on_the_device_of_their_tensors(
    gpus: PretendedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda kernel: False)
    kernel, x = Compiled(gpus), torch.ones(4)
    launches, constants = Launches(kernel), Constants(kernel, {"SIZE": 4})
    with gpus:
        for _ in range(2):
            launches((1, 1, 1), torch.device("cuda", OTHER), (x,), (3,), constants)
    assert kernel.on == [(what, OTHER) for what in ("compile", "load", "launch", "load", "launch")]
    assert gpus.current == 0
