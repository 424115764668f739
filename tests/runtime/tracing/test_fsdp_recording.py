"""Recording of FSDP2's own collectives: their entries and counts, and that the hooks are removed."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as seam
from rank_processes import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave
from shardweave.runtime.tracing.merge import merge_traces
from shardweave.runtime.tracing.trace_file import FSDP_COLLECTIVES, Cost, Trace

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Model(torch.nn.Module):
    """Odd sizes, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(7, 13), torch.nn.Linear(13, 7)])
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def padded(n: int, *sizes: tuple[int, ...]) -> int:
    """The number of elements of a flat buffer, with the rows of each parameter padded to a multiple of n."""
    return sum(-(-size[0] // n) * n * math.prod(size[1:]) for size in sizes)


FIRST, SECOND, LAST = ((13, 7), (13,)), ((7, 13), (7,)), ((3, 7), (3,))


def expected(n: int, hybrid: bool) -> dict[tuple[int, str, str, str, str], int]:
    """The expected calls of a step by elements, dtype, layouts and calling line, with n shards."""
    found: Counter[tuple[int, str, str, str, str]] = Counter()
    for sizes, where in ((FIRST, "layers.*"), (SECOND, "layers.*"), (LAST, "last")):
        numel, what = padded(n, *sizes), f"{where} (2 parameters)"
        found[numel, "bfloat16", "S0", "R", f"FSDP gathers {what}"] += 1
        if where != "last":
            found[numel, "bfloat16", "S0", "R", f"FSDP gathers {what}, backward"] += 1
        found[numel, "float32", "P", "S0", f"FSDP reduces {what}"] += 1
        if hybrid:
            found[numel, "float32", "P S0", "R S0", f"FSDP sums replicas of {what}"] += 1
    return dict(found)


def made(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def step(mesh: DeviceMesh, adapt: bool, sum_only: bool) -> None:
    model = Model()
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    for part in model.modules():
        if isinstance(part, FSDPModule) and sum_only:
            part.set_force_sum_reduction_for_comms(True)  # gloo has no AVG
    if adapt:
        shardweave.fsdp.adapt_fsdp(model)
    model(torch.randn(5, 7)).sum().backward()


def recorded_step(rank: int, path: str, shape: tuple[int, ...], adapt: bool) -> None:
    stock = seam.foreach_all_gather, seam.foreach_reduce
    with shardweave.tracing.record(path):
        step(made(shape), adapt, True)
    assert (seam.foreach_all_gather, seam.foreach_reduce) == stock


def calls(trace: Trace) -> dict[tuple[int, str, str, str, str], int]:
    fsdp = {entry: cost for entry, cost in trace.redistributions.items() if entry.where.startswith("FSDP")}
    found = {(*e.shape, e.dtype, e.source, e.target, e.where): cost.calls for e, cost in fsdp.items()}
    assert len(found) == len(fsdp)
    assert all(
        e.fsdp == (e in fsdp) and (not e.fsdp or (e.source, e.target) in FSDP_COLLECTIVES)
        for e in trace.redistributions
    )
    return found


@pytest.mark.multi
@pytest.mark.parametrize(("shape", "adapt"), [((4,), False), ((2, 2), False), ((2, 2), True)], ids=str)
def test_recorded_fsdp_collectives(tmp_path: Path, shape: tuple[int, ...], adapt: bool) -> None:
    run_ranks(recorded_step, 4, str(tmp_path / "trace.json"), shape, adapt)
    traces = [Trace.read(file) for file in sorted(tmp_path.iterdir())]
    for rank, trace in enumerate(traces):
        assert calls(trace) == expected(shape[-1], len(shape) > 1) and not trace.left_out
        for entry in trace.redistributions:
            assert rank in entry.mesh.rank_array, "the groups of this rank"
            assert entry.mesh.names == ("replicas", "shards")[-len(shape) :][-entry.mesh.ndim :]
    # a rank receives 3 of 4 shards, or 1 of 2
    gathered = next(c for e, c in traces[0].redistributions.items() if e.where == "FSDP gathers last (2 parameters)")
    n = shape[-1]
    assert gathered == Cost(1, padded(n, *LAST) * 2 * (n - 1) // n)
    assert merge_traces(traces).redistributions.keys() >= traces[0].redistributions.keys()


@pytest.mark.plan
def test_recording_in_a_fake_process_group(tmp_path: Path) -> None:
    """Averages, which gloo does not support, and a very large group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    try:
        mesh = made((512,))
        with shardweave.tracing.record(tmp_path / "trace.json"), FakeTensorMode():
            step(mesh, False, False)
    finally:
        dist.destroy_process_group()
    trace = Trace.read(tmp_path / "trace.rank0.json")
    assert trace.alive == (0, 0), "its other ranks may be recorded at any time"
    averaged = {(n, dtype, s.replace("P", "Pavg"), t, w): c for (n, dtype, s, t, w), c in expected(512, False).items()}
    assert calls(trace) == averaged
    ((_, cost),) = ((e, c) for e, c in trace.redistributions.items() if e.where.startswith("FSDP reduces last"))
    assert cost.bytes_received == 511 * padded(512, *LAST) // 512 * 4
