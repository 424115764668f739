"""`python -m shardweave.bench.workloads.record_workloads [NAME …]`: the traces in `bench/workloads/recorded`, from
model code.

Whole models, all of their layers at full width, for one step, forward and backward, on fake tensors in a process group
that moves nothing: rank 0's view of a mesh of any size, in one process without the memory for it. The `calls` of a
trace are those of a step.

A batch is one sequence for each rank of data parallelism, in bfloat16 with gradients reduced in float32.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave

from ...errors import ArgumentError
from ...runtime.tracing.trace_file import Trace
from . import solver_program, transformer
from .solver_program import SolverSizes
from .transformer import Sizes, Transformer

RECORDED = Path(__file__).parent / "recorded"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

LLAMA_3_8B = Sizes(32, 4096, 32, 8, 14336, 128256, 500_000.0)
LLAMA_3_70B = Sizes(80, 8192, 64, 8, 28672, 128256, 500_000.0)


@dataclass(frozen=True)
class Workload:
    """A program, and the mesh that it is recorded on.

    Attributes:
        about: what it is.
        program: what is recorded, given the mesh.
        mesh: sizes of mesh dims by name; the last one's ranks are neighbours.
    """

    about: str
    program: Callable[[DeviceMesh], None]
    mesh: Mapping[str, int]


def step(model: Transformer, length: int) -> None:
    """Forward and backward of one sequence, of a model that is placed on a mesh, with its parameters on "meta"."""
    model.to_empty(device="cpu")
    tokens = torch.zeros(1, length, dtype=torch.int64)
    model(tokens, tokens).backward()


def llama(mesh: DeviceMesh, sizes: Sizes, length: int) -> None:
    """FSDP2 with replicas, tensor and sequence parallelism."""
    with torch.device("meta"):
        model = Transformer(sizes)
    transformer.share(model, mesh["replicas", "dp"], mesh["tp"], POLICY)
    with FakeTensorMode(allow_non_fake_inputs=True):
        step(model, length)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def solver(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        solver_program.run(mesh, sizes)


WORKLOADS = {
    "llama3_8b": Workload(
        "Llama-3-8B, FSDP × TP × SP, a sequence of 8192 a rank",
        lambda mesh: llama(mesh, LLAMA_3_8B, 8192),
        {"replicas": 2, "dp": 8, "tp": 8},
    ),
    "llama3_70b": Workload(
        "Llama-3-70B, FSDP × TP × SP, a sequence of 8192 a rank",
        lambda mesh: llama(mesh, LLAMA_3_70B, 8192),
        {"replicas": 2, "dp": 16, "tp": 8},
    ),
    "solver": Workload(
        "layers as a sharding solver places them, in canonical and in FSDP2's order",
        lambda mesh: solver(mesh, SolverSizes()),
        {"dp": 8, "tp": 8},
    ),
}


def recorded(program: Callable[[DeviceMesh], None], sizes: Mapping[str, int]) -> Trace:
    """The redistributions of rank 0 of a mesh in a program; no other rank is needed.

    Raises:
        ArgumentError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise ArgumentError("record_workloads: this process is in a process group; allowed: a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    try:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        with tempfile.TemporaryDirectory() as folder:
            with shardweave.tracing.record(Path(folder) / "trace.json"):
                program(mesh)
            (path,) = Path(folder).iterdir()
            return Trace.read(path)
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--out", type=Path, default=RECORDED, metavar="DIR", help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        for name in arguments.names or WORKLOADS:
            if name not in WORKLOADS:
                raise ArgumentError(f"NAME: {name!r}; allowed: {', '.join(WORKLOADS)}")
            workload = WORKLOADS[name]
            trace = recorded(workload.program, workload.mesh)
            path = arguments.out / f"{name}.json"
            path.write_text(trace.to_json(), encoding="utf-8")
            calls = sum(cost.calls for cost in trace.redistributions.values())
            print(f"{path}: {len(trace.redistributions)} redistributions, {calls} calls; {workload.about}")
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
