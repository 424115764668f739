"""Random sequences of calls by threads that take turns, in process groups that are destroyed and made anew.

Threads take turns in one order, drawn alike on all ranks. What one thread has begun others use, also two at once:
results of asynchronous calls, graphs of backward, dispatches, calls of a module of experts. Some sequences end with two
calls in another order on one rank; then no rank has values of another call, and the next group works.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_reference import tokens_of
from rank_processes import run_ranks
from test_agreement import environment_of, outcome
from test_fuzz_sequences import LONG_PARTS, STEPS, TRANSPORTS, Life, drawn_to_move
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from variants import crossed

import shardweave

pytestmark = pytest.mark.multi

EXPERTS, K, HIDDEN, MOST = 5, 2, 8, 9


class Experts(nn.Module):
    """Multiplies by 2, in the call of another thread's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.full((EXPERTS,), 2.0))
        self.suspended = threading.local()

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        self.suspended.here.put(None)
        self.suspended.resumed.get(timeout=120)
        return x * 2


class ModuleCall:
    """A call of a module on a thread of its own, suspended between dispatch and combine until `finish`."""

    def __init__(self, module: Experts, t: Any) -> None:
        here: queue.Queue = queue.Queue()
        self._resumed: queue.Queue = queue.Queue()

        def call() -> torch.Tensor:
            module.suspended.here, module.suspended.resumed = here, self._resumed
            try:
                return module(t.x, t.ids, t.weights)
            finally:
                here.put(None)

        self._thread = ThreadPoolExecutor(1)
        self._result: Future[torch.Tensor] = self._thread.submit(call)
        here.get(timeout=120)
        self._want = 2 * t.x * t.weights.sum(1, keepdim=True)

    def finish(self) -> bool:
        self._resumed.put(None)
        y = self._result.result(120)
        self._thread.shutdown()
        return torch.allclose(y, self._want, atol=1e-5)


class ThreadedLife(Life):
    """A life whose steps run on the threads that `on` draws; `recovers`: in new groups, since a call has failed."""

    def __init__(self, rank: int, size: int, transport: str, seed: int, recovers: bool) -> None:
        super().__init__(rank, size, transport, seed)
        self.threads = [ThreadPoolExecutor(1) for _ in range(3)]
        self.groups: list[Any] = []
        self.graphs: list[tuple[DTensor, DTensor]] = []
        self.dispatched: list[tuple[Any, Any]] = []
        self.calls: list[ModuleCall] = []
        world = DeviceMesh("cpu", list(range(size)))
        if recovers:
            self.group = dist.new_group(list(range(size)))
            world = DeviceMesh.from_group(self.group, "cpu", list(range(size)))
            self.meshes = []
        self.meshes[:1] = [world]
        self.make_groups(recovers)
        self.dispatcher = shardweave.TokenDispatcher(
            world, num_experts=EXPERTS, top_k=K, hidden=HIDDEN, max_tokens=MOST, dtype=torch.float32,
            transport=transport,
        )  # fmt: skip
        style = shardweave.moe.ExpertParallel(
            top_k=K, hidden=HIDDEN, max_tokens=MOST, dtype=torch.float32, transport=transport
        )
        self.module = parallelize_module(Experts(), world, style)

    def make_groups(self, of_all: bool) -> None:
        """Groups of the same ranks as earlier ones, or overlapping ones, and meshes of them; `of_all`: of all ranks."""
        for _ in range(self.random.randint(int(of_all), 2)):
            # On a rank outside its group a mesh has no group but the default one.
            number = self.size if of_all else self.random.randint(2, self.size)
            ranks = sorted(self.random.sample(range(self.size), number))
            self.groups.append(dist.new_group(ranks))
            if self.rank in ranks:
                self.meshes.append(DeviceMesh.from_group(self.groups[-1], "cpu", ranks))
            else:
                self.meshes.append(DeviceMesh("cpu", ranks, _init_backend=False))

    def on(self, call: Callable[[], Any]) -> Any:
        """The result of a call on one of the threads."""
        return self.random.choice(self.threads).submit(call).result(120)

    def together(self, *calls: Callable[[], bool]) -> bool:
        """Whether all of several calls, made on a thread each at once, return True."""
        started = [thread.submit(call) for thread, call in zip(self.threads, calls, strict=False)]
        results = [each.result(120) for each in started]
        return all(results)

    def used_together(self) -> bool:
        if not self.later:
            return True
        y, want = self.later.pop(self.random.randrange(len(self.later)))
        return self.together(*[lambda: self.check(y, want)] * self.random.randint(2, 3))

    def forward(self) -> bool:
        given = self.drawn(self.meshes[0])
        leaf = DTensor.from_local(
            given.x._local_tensor.double(), given.x.device_mesh, given.x.placements, run_check=False,
            shape=given.x.shape, stride=given.x.stride(),
        ).requires_grad_()  # fmt: skip
        self.graphs.append((leaf, shardweave.redistribute(leaf, given.target, transport=self.transport)))
        return True

    def backward(self) -> bool:
        if not self.graphs:
            return True
        leaf, y = self.graphs.pop(self.random.randrange(len(self.graphs)))
        ones = DTensor(torch.ones_like(y._local_tensor), y._spec, requires_grad=False)
        (gradient,) = torch.autograd.grad(y, leaf, ones)
        return bool((gradient._local_tensor == 1).all()) or any(p.is_partial() for p in leaf.placements)

    def tokens(self) -> Any:
        seed = self.random.randrange(1000)
        return tokens_of(
            self.rank, (3 * self.rank + seed) % (MOST + 1), K, EXPERTS, HIDDEN, torch.float32, "uniform", seed
        )

    def dispatch(self) -> bool:
        t = self.tokens()
        self.dispatched.append((t, self.dispatcher.dispatch(t.x, t.ids, t.weights)))
        return True

    def combine(self) -> bool:
        if not self.dispatched:
            return True
        t, routed = self.dispatched.pop(self.random.randrange(len(self.dispatched)))
        y = self.dispatcher.combine(routed.x, routed)
        return torch.allclose(y, t.x * t.weights.sum(1, keepdim=True), atol=1e-5)

    def enter_module(self) -> bool:
        self.calls.append(ModuleCall(self.module, self.tokens()))
        return True

    def leave_module(self) -> bool:
        return not self.calls or self.calls.pop(self.random.randrange(len(self.calls))).finish()

    def step(self) -> tuple[str, bool]:
        """Make one random call; return its name and whether its values are correct."""
        name = self.random.choice(THREADED_STEPS)
        call = getattr(self, name)
        return name, call() if name in OWN_THREADS else self.on(call)

    def end_calls(self) -> bool:
        results = [call.finish() for call in self.calls]
        return all(results)

    def end_threads(self) -> None:
        for thread in self.threads:
            thread.shutdown()


OWN_THREADS = ("used_together", "enter_module", "leave_module")
THREADED_STEPS = (*STEPS, "begun", "used_together", "used_together", "forward", "backward", "dispatch", "combine",
                  "enter_module", "enter_module", "leave_module")  # fmt: skip


def different_orders(life: ThreadedLife) -> list[str]:
    """Two calls, each on a thread, of which one rank makes the second one first."""
    two = [drawn_to_move(life) for _ in range(2)]
    if life.rank == life.random.randrange(life.size):
        two.reverse()
    return [life.on(partial(outcome, partial(life.redistribute_forward, given))) for given in two]


def lives_of_threads(rank: int, transport: str, first: int, count: int) -> int:
    """Sequences of twelve calls, some of which end with a failed call. Between them the default group is destroyed and
    initialised again, or groups of some ranks are."""
    os.environ["SHARDWEAVE_TRANSPORT"] = transport
    store, size, failed = dist.distributed_c10d._get_default_store(), dist.get_world_size(), True
    groups: list[Any] = []

    def meet(what: str, seed: int) -> None:
        store.set(f"{what}/{seed}/{rank}", "")
        store.wait([f"{what}/{seed}/{other}" for other in range(size)])

    for seed in range(first, first + count):
        random = Random(f"life {seed}")
        recovers = failed and seed > first and random.random() < 0.5
        if not recovers and (failed or random.random() < 0.5):
            failed = False
            dist.destroy_process_group()
            prefixed = dist.PrefixStore(f"life/{seed}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        elif not recovers:
            for group in groups:
                if random.random() < 0.5 and group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
        life = ThreadedLife(rank, size, transport, seed, recovers)
        groups = life.groups
        for number in range(12):
            name, right = life.step()
            assert right, f"seed {seed}, rank {rank}: {name}, call {number}, is wrong"
        assert life.end_calls(), f"seed {seed}, rank {rank}: a call of the module is wrong"
        if random.random() < 0.3:
            failed = True  # until the default group is another one
            meet("right", seed)  # on symmetric memory a failure also ends a call that a peer has not finished
            outcomes = different_orders(life)
            assert "wrong" not in outcomes, f"seed {seed}, rank {rank}: {outcomes}"
        life.end_threads()
        meet("ended", seed)  # connections that close are those of this life
    return count


def check_threads(transport: str, ranks: int, first: int, count: int, **options: Any) -> None:
    environment = environment_of(transport)
    by_rank = run_ranks(lives_of_threads, ranks, transport, first, count, environment=environment, **options)
    assert by_rank == [count] * ranks


@crossed("transport", TRANSPORTS, gate=lambda transport: transport != "symmetric_memory")
def test_random_threads(transport: str) -> None:
    check_threads(transport, 4 if transport == "hierarchical" else 3, 0, 3)


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS * 4 // 10))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_threads_at_length(transport: str, part: int) -> None:
    check_threads(transport, 2 + part % 4, 1000 + 1000 * part, 25, timeout=1800)
