"""Random sequences of calls on random meshes, with refusals, different orders and results that are not used.

Without a fault all values are exact. With a fault, each rank has exact values or a shardweave error, one of which gives
the reason; no rank has values of another call, and no rank waits forever.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_agreement import environment_of, misfit, outcome
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError
from shardweave.runtime.dtensor.fsdp import FSDPAllGather, FSDPReduceScatter

pytestmark = pytest.mark.multi

TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16)
LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))


@dataclass
class Given:
    """A DTensor on `mesh` and target placements."""

    x: DTensor
    target: tuple[Placement, ...]
    want: torch.Tensor


class Life:
    """The state of a sequence on one rank; all ranks draw the same random numbers."""

    def __init__(self, rank: int, size: int, transport: str, seed: int) -> None:
        self.rank, self.size, self.transport = rank, size, transport
        self.random, self.own = Random(seed), Random(f"{seed} {rank}")
        self.meshes = [DeviceMesh("cpu", list(range(size)), _init_backend=False)]
        for _ in range(3):
            ranks = sorted(self.random.sample(range(size), self.random.randint(2, size)))
            self.meshes.append(DeviceMesh("cpu", ranks, _init_backend=False))
        if size >= 4:
            self.meshes.append(DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False))
        self.group: Any = dist.distributed_c10d.GroupMember.WORLD
        self.later: list[tuple[DTensor, torch.Tensor]] = []
        self.gather, self.scatter = FSDPAllGather(), FSDPReduceScatter()

    def drawn(self, mesh: DeviceMesh) -> Given:
        random = self.random
        shape = tuple(random.choice((1, 2, 3, 5, 8, 13)) for _ in range(random.randint(1, 3)))
        dtype, at = random.choice(DTYPES), mesh.get_coordinate()
        options: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
        source = [random.choice([*options, Partial("max")]) for _ in range(mesh.ndim)]
        target = tuple(random.choice(options) for _ in range(mesh.ndim))
        base = random.randint(0, 100)
        whole = ((torch.arange(torch.Size(shape).numel()).view(shape) + base) % 127).to(dtype)
        local, want = whole, whole
        for dim, (p, q) in enumerate(zip(source, target, strict=True)):
            local = _held(local, p, mesh.size(dim), at[dim]) if at else whole[:0]
            want = _held(want, q, mesh.size(dim), at[dim]) if at else want
        x = DTensor.from_local(
            self.lying(local), mesh, source, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return Given(x, target, want)

    def lying(self, x: torch.Tensor) -> torch.Tensor:
        """The same values with random strides, which differ between ranks."""
        algorithm = self.own.randrange(4)
        if algorithm == 0 or not x.dim():
            return x.clone()
        if algorithm == 1:
            return x.repeat_interleave(2, -1)[..., ::2]
        if algorithm == 2:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        room = x.new_zeros(x.numel() + 3)
        room[3:] = x.reshape(-1)
        return room[3:].view(x.shape)

    def redistribute(self, given: Given, **options: Any) -> DTensor:
        return shardweave.redistribute(given.x, given.target, transport=self.transport, **options)

    def redistribute_forward(self, given: Given) -> bool:
        return self.check(self.redistribute(given), given.want)

    def check(self, y: DTensor, want: torch.Tensor) -> bool:
        got = y.to_local()
        return y.device_mesh.get_coordinate() is None or (got.shape == want.shape and bool((got == want).all()))

    # Each step is one call of all ranks and returns whether its values are correct.

    def now(self) -> bool:
        return self.redistribute_forward(self.drawn(self.random.choice(self.meshes)))

    def begun(self) -> bool:
        """An asynchronous call whose result is used once, twice, or never."""
        given = self.drawn(self.random.choice(self.meshes))
        y = self.redistribute(given, async_op=True)
        if self.random.random() < 0.7:
            self.later.append((y, given.want))
        return True

    def used(self) -> bool:
        results = [self.check(y, want) and self.check(y, want) for y, want in self.later[-2:]]
        self.later = self.later[-1:] if self.random.random() < 0.5 else []
        return all(results)

    def batch(self) -> bool:
        """A batch on several meshes; ranks outside of them call it as well."""
        several = [self.drawn(self.random.choice(self.meshes[1:])) for _ in range(self.random.randint(1, 4))]
        ys = shardweave.redistribute_batch(
            [g.x for g in several], [g.target for g in several], transport=self.transport
        )
        return all(self.check(y, g.want) for y, g in zip(ys, several, strict=True))

    def refused_by_all(self) -> bool:
        mesh = self.meshes[0]
        given = self.drawn(mesh)
        wrong = DTensor.from_local(
            torch.zeros(17, *given.want.shape[1:], dtype=given.x.dtype), mesh, [Shard(0)] * mesh.ndim,
            run_check=False, shape=given.x.shape, stride=given.x.stride(),
        )  # fmt: skip
        try:
            shardweave.redistribute(wrong, [Replicate()] * mesh.ndim, transport=self.transport)
        except ArgumentError:
            return True
        return False

    def fsdp(self) -> bool:
        """FSDP2's collectives of a flat tensor, with inputs of other strides on each rank."""
        n, dtype = self.random.choice((1, 4, 33)), self.random.choice((torch.float32, torch.bfloat16))
        base = self.random.randint(0, 50)
        whole = ((torch.arange(n * self.size) + base) % 64).to(dtype)
        out = torch.full((n * self.size,), 77, dtype=dtype)
        self.gather(out, self.lying(whole[self.rank * n : self.rank * n + n]), self.group)
        part = torch.full((n,), 77, dtype=dtype)
        self.scatter(part, self.lying(whole), self.group, dist.ReduceOp.SUM)
        mine = whole[self.rank * n : self.rank * n + n].double() * self.size
        return bool((out == whole).all()) and bool((part == mine.to(dtype)).all())


def _held(x: torch.Tensor, placement: Placement, size: int, at: int) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return x
    chunks = x.chunk(size, placement.dim)
    return chunks[at] if at < len(chunks) else x.narrow(placement.dim, 0, 0)


STEPS = ("now", "now", "now", "begun", "begun", "used", "batch", "batch", "refused_by_all", "fsdp")


def without_faults(rank: int, transport: str, first: int, count: int) -> int:
    """Sequences of six calls each; FSDP2's collectives use the transport that the environment requests."""
    os.environ["SHARDWEAVE_TRANSPORT"] = transport
    size, life = dist.get_world_size(), None
    for seed in range(first, first + count):
        if life is None or seed % 10 == 0:
            life = Life(rank, size, transport, seed)
        for _ in range(6):
            step = life.random.choice(STEPS)
            assert getattr(life, step)(), f"seed {seed}, rank {rank}: {step} is wrong"
    return count


def drawn_to_move(life: Life) -> Given:
    """Whether a call changes the layout; if not, the input itself is returned."""
    while True:
        given = life.drawn(life.meshes[0])
        if tuple(given.target) != tuple(given.x.placements):
            return given


def with_a_fault(rank: int, transport: str, first: int, count: int, kinds: tuple[str, ...]) -> list[list[str]]:
    """Sequences in which one rank refuses, omits or changes a call, and continues. Returns the outcome of each call."""
    os.environ["SHARDWEAVE_TRANSPORT"] = transport
    store, size, results = dist.distributed_c10d._get_default_store(), dist.get_world_size(), []
    for seed in range(first, first + count):
        dist.destroy_process_group()
        prefixed = dist.PrefixStore(f"life/{seed}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        random, life = Random(seed), Life(rank, size, transport, seed)
        odd, kind, at = random.randrange(size), random.choice(kinds), random.randint(1, 2)
        several = [drawn_to_move(life) for _ in range(2)]
        calls = [several[random.randrange(2)] for _ in range(5)]
        if kind == "swap":
            calls[at : at + 2] = several
        messages = []
        order = list(range(5))
        if kind == "swap" and rank == odd:
            order[at], order[at + 1] = order[at + 1], order[at]
        for i in order:
            if i == at and rank == odd and kind == "skip":
                continue
            given = calls[i]
            if i == at and rank == odd and kind == "refuse":
                given = Given(misfit_of(given.x), given.target, given.want)
            messages.append(outcome(partial(life.redistribute_forward, given)))
        results.append([f"{kind} by rank {odd} at {at}", *messages])
        store.set(f"ended/{seed}/{rank}", "")
        store.wait([f"ended/{seed}/{other}" for other in range(size)])
    return results


def misfit_of(x: DTensor) -> DTensor:
    if x.dim() == 2:
        return misfit(x)
    local = torch.zeros(*[n + 1 for n in x._local_tensor.shape], dtype=x.dtype)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def check_faults(ranks: int, transport: str, first: int, count: int, kinds: tuple[str, ...]) -> None:
    environment = environment_of(transport, SHARDWEAVE_TIMEOUT="20")
    by_rank = run_ranks(with_a_fault, ranks, transport, first, count, kinds, environment=environment, timeout=900)
    for number in range(count):
        messages = [results[number] for results in by_rank]
        texts = [text for steps in messages for text in steps[1:]]
        # No output has values of another call.
        assert "wrong" not in texts, (first + number, messages)
        errors = [text for text in texts if not text.startswith(("right", "ArgumentError"))]
        late = [text for text in errors if text.startswith("MeetingTimeoutError")]
        # A rank that needs no data of a call does not notice it, and a rank that skipped the last calls has exited.
        assert not late or transport == "symmetric_memory" or "skip" in messages[0][0], (first + number, messages)


@crossed("transport", TRANSPORTS, gate=lambda transport: transport in ("shared_memory", "hierarchical"))
def test_random_sequences(transport: str) -> None:
    ranks = 3 if transport != "hierarchical" else 5
    environment = environment_of(transport)
    assert run_ranks(without_faults, ranks, transport, 0, 12, environment=environment) == [12] * ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_faults(transport: str) -> None:
    check_faults(3 if transport != "hierarchical" else 4, transport, 0, 4, ("refuse", "swap"))


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS * 4 // 10))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_sequences_at_length(transport: str, part: int) -> None:
    ranks, first, environment = 2 + part % 4, 1000 + 1000 * part, environment_of(transport)
    results = run_ranks(without_faults, ranks, transport, first, 100, environment=environment, timeout=1800)
    assert results == [100] * ranks


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS * 4 // 10))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_faults_at_length(transport: str, part: int) -> None:
    check_faults(2 + part % 4, transport, 1000 + 1000 * part, 8, ("refuse", "swap", "skip"))
