"""Whole programs by kernels, all ranks on one device: exact; on a GPU without waiting for it, and replayed from graphs.

Where there is no GPU the exactness runs through the same kernels in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_guard import SyncGuard
from test_simulate import integers, oracle

import shardweave
from shardweave.kernels.addresses import AddressTables
from shardweave.kernels.launch import PreparedLaunch
from shardweave.runtime.executor.copies import Copies
from shardweave.runtime.executor.simulate import bind_in_process
from shardweave.runtime.transports.in_process import InProcessTransport

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KINDS: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((2, 2), "S0 S1", "S1 S0"),
    ((2, 2), "S0 R", "S1 R"),
    ((2, 2), "S0 S0", "R R"),
    ((2, 2), "S0 S0", "S0 S0 @ 0:1,0"),
    ((2, 2), "R R", "S0 S1"),
    ((2, 2), "P S0", "S0 S0"),
    ((2, 2), "P P", "R R"),
    ((2, 2), "Pmax R", "R S0"),
    ((2, 2), "R S0", "P S0"),
    ((2, 2), "S0 R", "Pavg S1"),
    ((3, 2), "P S1", "S1 R"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
TRANSPORTS: tuple[dict[str, Any], ...] = ({}, {"one_sided": False}, {"one_sided": False, "backend": "nccl"})

needs_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU, or TRITON_INTERPRET=1")


class Proof:
    """A program bound on the device, with inputs and expected outputs."""

    def __init__(self, kind: tuple[tuple[int, ...], str, str], shape: tuple[int, ...], dtype: torch.dtype,
                 transport: dict[str, Any], seed: str = "") -> None:  # fmt: skip
        self.mesh, self.source, self.target = kind
        self.shape, self.dtype = shape, dtype
        self.program = shardweave.plan(self.mesh, shape, dtype, self.source, self.target)
        self.locals, self.expected = self.made(seed)
        self.run = bind_in_process(self.program, self.locals, InProcessTransport(**transport))

    def made(self, seed: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        bits = self.dtype is torch.bool
        low, high, times = (0, 1, 1) if bits else (-2, 2, 1 if self.dtype.itemsize == 1 else 6)
        size = oracle.contribution_shape(self.mesh, self.shape, self.source)
        contributed = integers(size, self.source + self.target + seed, low, high, times)
        contributed = contributed.bool() if bits else contributed
        locals_ = oracle.local_shards(self.mesh, self.shape, self.source, contributed)
        whole = oracle.whole_of(self.mesh, self.source, contributed).reshape(*(1 for _ in self.mesh), *self.shape)
        expected = oracle.local_shards(self.mesh, self.shape, self.target, whole)
        return [x.to(self.dtype).to(DEVICE) for x in locals_], expected

    def check(self, outs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        wide = torch.bool if self.dtype is torch.bool else torch.complex128 if self.dtype.is_complex else torch.float64
        got = oracle.assembled(self.mesh, self.target, [out.cpu().to(wide) for out in outs])
        for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.equal(b.to(wide)), f"{self.program.explain()}\nrank {rank}: {a} instead of {b}"


def carries(dtype: torch.dtype, *layouts: str) -> bool:
    if any("avg" in layout for layout in layouts):
        return dtype.is_floating_point and dtype.itemsize > 1
    return not (dtype.is_complex and any("max" in layout for layout in layouts))


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checks that copies use kernels, not views copied by torch, and that calls upload nothing; poisons new memory."""
    made = Copies.__init__

    def checked(self: Copies, *args: Any) -> None:
        made(self, *args)
        assert self.empty or (self.table is not None and not self.table.cpu_path)

    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(Copies, "__init__", checked)
    monkeypatch.setattr(AddressTables, "_upload", lambda self, addresses: pytest.fail("addresses are uploaded"))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda w: " ".join(map(str, w.values())) or "one-sided")
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 3), (0, 4), (16, 64)], ids=str)
def test_programs_with_kernels(shape: tuple[int, ...], transport: dict[str, Any]) -> None:
    for number, kind in enumerate(KINDS):
        # The interpreter and compiling for a GPU are slow: dtypes are spread over the kinds.
        for dtype in (2 * DTYPES)[number % len(DTYPES) :][: 1 if INTERPRETED else 2]:
            if carries(dtype, *kind[1:]):
                proof = Proof(kind, shape, dtype, transport)
                proof.check(proof.run(proof.locals), proof.expected)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("transport", TRANSPORTS[:2], ids=["one-sided", "two-sided"])
def test_batches_with_kernels(transport: dict[str, Any]) -> None:
    kinds = KINDS[0], KINDS[1], KINDS[5]
    proofs = [Proof(kind, shape, torch.float32, transport) for kind in kinds for shape in ((8, 6), (7, 5))]
    batch = shardweave.plan_batch([(p.mesh, p.shape, p.dtype, p.source, p.target) for p in proofs])
    outs = shardweave.simulate(batch, [p.locals for p in proofs], **transport)
    for proof, results in zip(proofs, outs, strict=True):
        proof.check(results, proof.expected)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("one_sided", [True, False])
def test_several_exchanges_with_kernels(one_sided: bool) -> None:
    """Across nodes, where the receive buffers of both exchanges are read together."""
    slow = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)
    topology = replace(shardweave.NVLINK_INFINIBAND, node_size=2, network=slow)
    most = 0
    for source, target in (("S0 S0", "R R"), ("S0 S1", "R S0"), ("P P", "R R"), ("S0 S0", "S1 S1")):
        proof = Proof(((2, 2), source, target), (8, 12), torch.float32, {})
        program = shardweave.plan((2, 2), (8, 12), torch.float32, source, target, topology=topology)
        run = bind_in_process(program, proof.locals, InProcessTransport(one_sided=one_sided))
        proof.check(run(proof.locals), proof.expected)
        most = max(most, program.exchanges)
    assert most > 1


@pytest.mark.gpu
@needs_device
def test_strided_inputs_with_kernels() -> None:
    for kind in KINDS[:2]:
        for change in (lambda x: x.mT.contiguous().mT, lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:]):
            proof = Proof(kind, (7, 5), torch.bfloat16, {})
            given = [change(x).view(x.shape) for x in proof.locals]
            proof.check(bind_in_process(proof.program, given, InProcessTransport())(given), proof.expected)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda w: " ".join(map(str, w.values())) or "one-sided")
def test_call_reads_no_tensor_values(transport: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # the interpreter reads what a GPU would
        monkeypatch.setattr(PreparedLaunch, "__call__", lambda self, *arguments: None)
    for number, kind in enumerate(KINDS):
        proof = Proof(kind, (7, 5), DTYPES[number % 2], transport)
        with SyncGuard() as guard:
            proof.run(proof.locals)
        assert guard.seen["empty"] >= proof.program.mesh.size


@pytest.mark.interp
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.long
def test_programs_with_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None and int(passed[1]) >= 23, ran.stdout


# Tests that need a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda w: " ".join(map(str, w.values())) or "one-sided")
def test_call_returns_while_device_is_busy(transport: dict[str, Any]) -> None:
    for number, kind in enumerate(KINDS):
        dtype = DTYPES[number % 2]
        proof = Proof(kind, (1023, 129), dtype, transport)
        proof.run(proof.locals)  # the allocator's first blocks of these sizes
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(int(4e8))  # some 200 ms
        done.record()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs = proof.run(proof.locals)
            pending = not done.query()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert pending, f"the call waited for the device: {proof.program.explain()}"
        torch.cuda.synchronize()
        proof.check(outs, proof.expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda w: " ".join(map(str, w.values())) or "one-sided")
def test_graph_replay_with_new_data(transport: dict[str, Any], uses: int) -> None:
    for number, kind in enumerate(KINDS):
        proof = Proof(kind, (67, 33), DTYPES[number % 2], transport)
        inputs = [[x.clone() for x in proof.locals] for _ in range(uses)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the very first call: binding has compiled and uploaded all
            outs = [proof.run(given) for given in inputs]
        # A graph keeps what it reads: other tensors are freed, and their memory is overwritten.
        del proof.run
        gc.collect()
        torch.cuda.empty_cache()
        poison = torch.full((1 << 20,), -1, dtype=torch.int64, device=DEVICE)
        for replay in range(3):
            expected = []
            for use, given in enumerate(inputs):
                values, wanted = proof.made(f"{replay} {use}")
                expected.append(wanted)
                for into, value in zip(given, values, strict=True):
                    into.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            for results, wanted in zip(outs, expected, strict=True):
                proof.check(results, wanted)
        del poison
