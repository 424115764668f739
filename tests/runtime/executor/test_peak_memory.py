"""The memory that a rank allocates while a program runs never exceeds the program's `peak_bytes`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_simulate import integers, oracle, poison  # noqa: F401

import shardweave
from shardweave.errors import ArgumentError
from shardweave.planner import NVLINK_INFINIBAND, NVLINK_NODE, Mesh
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.transports.in_process import InProcessTransport, run_all

pytestmark = pytest.mark.plan

SLOW = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)


class CountingTransport(InProcessTransport):
    """Counts the live bytes that one rank got from `empty`; an address does not keep a buffer alive."""

    buffers: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def __init__(self, one_sided: bool) -> None:
        super().__init__(one_sided)
        self.held = self.most = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().empty(shape, dtype, device)
        nbytes = buffer.numel() * dtype.itemsize
        self.held += nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(buffer, self._let_go, nbytes)
        return buffer

    def address(self, buffer: torch.Tensor) -> Any:
        self.buffers[buffer.data_ptr()] = buffer
        return buffer.data_ptr()

    def open(self, address: Any, nbytes: int) -> torch.Tensor:
        return super().open(self.buffers[address], nbytes)

    def _let_go(self, nbytes: int) -> None:
        self.held -= nbytes


@pytest.mark.parametrize("topology", [None, NVLINK_NODE, replace(NVLINK_INFINIBAND, node_size=2, network=SLOW)])
@pytest.mark.parametrize(
    ("mesh", "shape"), [((4,), (24, 32)), ((2, 4), (48, 16)), ((4, 3), (48, 32)), ((3,), (60,))], ids=str
)
def test_peak_bytes_bound_allocated_memory(mesh: tuple[int, ...], shape: tuple[int, ...], topology: Any) -> None:
    tokens = ["R", "P", *(f"S{d}" for d in range(len(shape)))]
    texts = list(oracle.layout_texts(len(mesh), tokens))
    for source in texts[:: 1 + len(texts) // 9]:
        for target in texts[:: 1 + len(texts) // 13]:
            program = shardweave.plan(mesh, shape, "float32", source, target, topology=topology)
            if program.is_identity:
                continue
            contributed = integers(oracle.contribution_shape(mesh, shape, source), source)
            given = [x.float() for x in oracle.local_shards(mesh, shape, source, contributed)]
            transports = [CountingTransport(True) for _ in given]
            bound = [
                BoundProgram(program, r, x.stride(), transports[r], x.dtype, x.device) for r, x in enumerate(given)
            ]
            runs = {r: b.run(x, b.fingerprint) for r, (b, x) in enumerate(zip(bound, given, strict=True))}
            run_all(runs)
            for rank, (transport, x, peak) in enumerate(zip(transports, given, program.peak_bytes, strict=True)):
                assert transport.most + x.numel() * 4 <= peak, (rank, program.explain())


def test_identity_larger_than_max_bytes_raises() -> None:
    with pytest.raises(ArgumentError, match=r"max_bytes: 100; allowed: at least 175, the size of a shard of \(R\)"):
        shardweave.plan((4,), (5, 5, 7), "uint8", "R", "R", max_bytes=100)
    assert shardweave.plan((4,), (5, 5, 7), "uint8", "R", "R", max_bytes=175).is_identity


def test_peak_bytes_of_ranks_outside_a_step() -> None:
    mesh, other = Mesh((5, 3)), Mesh((3, 1), ranks=(19, 15, 4))
    program = shardweave.plan(mesh, (), "bfloat16", "Pmax R", "R Pmax", target_mesh=other)
    given = [torch.ones(program.source_shape(r)).bfloat16() for r in range(program.mesh.size)]
    for backend in (None, "gloo", "nccl"):
        outs = shardweave.simulate(program, given, one_sided=False, backend=backend)
        assert [out.numel() for out in outs] == [int(r in (19, 15, 4)) for r in program.mesh.rank_array.tolist()]
