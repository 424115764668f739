"""Compiled redistributions on ranks of this machine, by stock DTensor and under `shardweave.install()`: the demo's
cases and the step of a transformer with tensor parallelism, compiled by Inductor; both in eager mode beside them.

Every side is on gloo, except "ours" in eager mode, which is on shared memory. Results are checked before they are
timed. Bytes are those in the graphs, of the rank that receives most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardweave
from shardweave.bench.baselines.graph_collectives import Collectives, collectives_of
from shardweave.bench.baselines.stock_dtensor import Case, Unsuitable, mesh_for
from shardweave.bench.harness.interleaved import time_sides
from shardweave.bench.harness.measure import Sink
from shardweave.bench.harness.ranks import Send, run_ranks
from shardweave.bench.suites.rank_rows import put, result
from shardweave.bench.workloads import Workload, load_workloads
from shardweave.bench.workloads.transformer import Sizes, Transformer, shard_tensors

RANKS = 4
SUITE = "compiled"
STEP = "transformer/step, tensor parallelism of 4"
SIDES = ("ours, compiled", "stock, compiled", "ours", "stock")
ROUNDS = {"full": 15, "quick": 7, "dry": 1}
_TURN_SECONDS = {"full": 0.03, "quick": 0.02, "dry": 0.0}
_BACKENDS = {"full": "inductor", "quick": "inductor", "dry": "aot_eager"}
_TOKENS = (4, 128)


def workloads(scale: str) -> list[Workload]:
    models = load_workloads()
    return {"full": models, "quick": models[::6], "dry": models[:1]}[scale]


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys([*[one.name for one in workloads(scale)], STEP], SIDES)


def test_compiled(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    config = {"names": list(names), "scale": scale}
    run_ranks(rank_main, RANKS, config, lambda case, by_rank: put(sink, by_rank, case, timed_if_wrong=["stock"]))


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    # Stock's graphs of different ranks differ in their slices and process groups, but not in their keys.
    torch.compiler.config.force_disable_caches = True
    for workload in workloads(config["scale"]):
        if workload.name not in config["names"]:
            continue
        mesh = init_device_mesh("cpu", mesh_for(size), mesh_dim_names=workload.mesh_names)
        try:
            outcome = redistribution(Case(workload, mesh), config["scale"])
        except Unsuitable as reason:
            outcome = result({}, absent=dict.fromkeys(SIDES, str(reason)))
        send({"case": workload.name, **outcome})
    if STEP in config["names"]:
        send({"case": STEP, **step(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), config["scale"])})


def settings() -> dict[str, AbstractContextManager[Any]]:
    return {"ours": shardweave.installed(), "stock": nullcontext()}


def redistribution(case: Case, scale: str) -> dict[str, Any]:
    x, placements = case.source, case.placements
    # Two functions, since torch keeps what it has compiled by their code.
    functions = {
        "ours": lambda x: x.redistribute(placements=placements),
        "stock": lambda x: x.redistribute(placements=placements),
    }
    sides: dict[str, Callable[[], Any]] = {}
    graphs: dict[str, Collectives] = {}
    faults: dict[str, str] = {}
    with torch.no_grad():
        for name, context in settings().items():
            with context:
                graphs[name] = collectives_of(functions[name], x)
        for name, context in settings().items():
            with context:
                compiled = torch.compile(functions[name], backend=_BACKENDS[scale], fullgraph=True)
                output = compiled(x)
            sides[f"{name}, compiled"] = lambda compiled=compiled: compiled(x)  # type: ignore[misc]
            if fault := case.fault(output.to_local(), pairwise=name == "stock"):
                faults[f"{name}, compiled"] = fault
        sides |= {"ours": lambda: shardweave.redistribute(x, placements), "stock": lambda: functions["stock"](x)}
        seconds = time_sides(sides, ROUNDS[scale], _TURN_SECONDS[scale])
    return result(seconds, faults=faults, **_counted(graphs))


def step(mesh: DeviceMesh, scale: str) -> dict[str, Any]:
    """Forward and backward of a model; the losses of all sides have to be equal within the rounding of sums."""
    torch.manual_seed(0)
    model = Transformer(Sizes())
    shard_tensors(model, mesh)
    tokens = torch.randint(Sizes().vocabulary, _TOKENS)
    losses: dict[str, torch.Tensor] = {}

    def ours(tokens: torch.Tensor) -> torch.Tensor:
        return model.forward(tokens, tokens)

    def stock(tokens: torch.Tensor) -> torch.Tensor:
        return model.forward(tokens, tokens)

    functions, graphs = {"ours": ours, "stock": stock}, {}
    for name, context in settings().items():
        with context:
            graphs[name] = collectives_of(functions[name], tokens, backward=True)
            model.zero_grad()

    def run(function: Callable[..., torch.Tensor], name: str) -> Callable[[], torch.Tensor]:
        def forward_and_backward() -> torch.Tensor:
            loss = function(tokens)
            loss.backward()
            model.zero_grad()
            losses[name] = loss.detach()
            return losses[name]

        return forward_and_backward

    sides: dict[str, Callable[[], Any]] = {}
    for name, context in settings().items():
        with context:
            side = f"{name}, compiled"
            compiled = torch.compile(functions[name], backend=_BACKENDS[scale], fullgraph=True)
            sides[side] = run(compiled, side)
            sides[side]()  # compiles the backward as well
    eager = run(stock, "stock")

    def eager_ours() -> torch.Tensor:
        with shardweave.installed():
            return run(stock, "ours")()

    sides |= {"ours": eager_ours, "stock": eager}
    seconds = time_sides(sides, ROUNDS[scale], _TURN_SECONDS[scale], warm_calls=1)
    expected = losses["stock"]
    faults = {
        side: f"loss {loss.item()}, stock's in eager mode is {expected.item()}"
        for side, loss in losses.items()
        if not torch.allclose(loss, expected, rtol=1e-5, atol=0)
    }
    return result(seconds, faults=faults, **_counted(graphs))


def _counted(graphs: dict[str, Collectives]) -> dict[str, Any]:
    most = {name: torch.tensor(of.received) for name, of in graphs.items()}
    for received in most.values():
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
    return {
        "bytes": {f"{name}, compiled": int(received) for name, received in most.items()},
        "detail": {f"collectives, {name}": str(of) for name, of in graphs.items()},
    }
