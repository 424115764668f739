"""Calls from several threads of each rank: one at a time, right values, and an error where their orders differ."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_reference import tokens_of
from rank_processes import run_ranks
from test_agreement import environment_of, lives, outcome, sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from variants import crossed

import shardweave
from shardweave.errors import MeetingTimeoutError, TransportError
from shardweave.runtime.transports.call_lock import CallLock
from shardweave.runtime.transports.select import current_transports

TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")


@pytest.mark.plan
def test_lock_waits_for_other_thread_no_longer_than_its_timeout() -> None:
    lock, taken, done = CallLock(3, 0.2, lambda: "call 7 of ranks (0, 3): S0 → R"), threading.Event(), threading.Event()

    def hold() -> None:
        with lock, lock:
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(60)
    with pytest.raises(MeetingTimeoutError, match=r"rank 3: another thread .* for 0.2 s, at last in call 7 of ranks"):
        lock.acquire()
    done.set()
    holder.join()
    with lock:
        pass


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions on a thread each, all started at once, and return their results."""
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(i: int) -> None:
        start.wait()
        results[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def same_call(rank: int, transport: str, rounds: int) -> list[str]:
    """Three threads make the same call at once; the first one to arrive also binds it."""
    x, whole = sharded(DeviceMesh("cpu", list(range(dist.get_world_size()))), 8, 6, torch.float32)

    def many() -> bool:
        return all(
            shardweave.redistribute(x, [Replicate()], transport=transport).to_local().equal(whole)
            for _ in range(rounds)
        )

    return in_threads(*[partial(outcome, many)] * 3)


class Turns:
    """Runs the calls of several threads in one order."""

    def __init__(self) -> None:
        self._next, self._changed = 0, threading.Condition()

    def begin(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next == number, 120)

    def end(self) -> None:
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def run(self, number: int, call: Callable[[], Any]) -> Any:
        self.begin(number)
        try:
            return call()
        finally:
            self.end()


def advanced_in_turns(*generators: Iterator[Any]) -> None:
    """Advance generators by one step after the other, each on a thread of its own, until all have ended."""
    turns, count = Turns(), len(generators)

    def advance(i: int) -> None:
        ended = object()
        for step in itertools.count():
            if turns.run(step * count + i, lambda: next(generators[i], ended)) is ended:
                return

    in_threads(*[partial(advance, i) for i in range(count)])


def ordered(rank: int, transport: str, rounds: int) -> list[str]:
    """Four threads call in one order, alike on all ranks, on meshes that overlap; results of asynchronous calls are
    used on another thread, and backward runs on another thread than forward, between calls of others."""
    size, random, turns = dist.get_world_size(), Random(rounds), Turns()
    meshes = [DeviceMesh("cpu", list(range(size)), _init_backend=False)]
    meshes += [DeviceMesh("cpu", ranks, _init_backend=False) for ranks in ([0, 1], [0, 2], list(range(1, size)))]
    dispatcher = shardweave.TokenDispatcher(
        num_experts=5, top_k=2, hidden=8, max_tokens=9, dtype=torch.float32, transport=transport
    )
    begun: list[tuple[DTensor, torch.Tensor]] = []
    graphs: list[tuple[torch.Tensor, DTensor, DTensor]] = []
    wrong: list[str] = []

    def now(mesh: DeviceMesh, columns: int, seed: int) -> None:
        x, whole = sharded(mesh, 7, columns, torch.float32, seed)
        y = shardweave.redistribute(x, [Replicate()], transport=transport)
        if mesh.get_coordinate() is not None and not y.to_local().equal(whole):
            wrong.append(f"now {seed}")

    def begin(mesh: DeviceMesh, columns: int, seed: int) -> None:
        x, whole = sharded(mesh, 7, columns, torch.float32, seed)
        if mesh.get_coordinate() is not None:
            begun.append((shardweave.redistribute(x, [Replicate()], transport=transport, async_op=True), whole))

    def use(mesh: DeviceMesh, columns: int, seed: int) -> None:
        for y, whole in begun:
            if not (y.to_local() + 0).equal(whole):
                wrong.append(f"begun {seed}")
        begun.clear()

    def forward(mesh: DeviceMesh, columns: int, seed: int) -> None:
        x, _ = sharded(meshes[0], 7, columns, torch.float64, seed)
        leaf = DTensor(x._local_tensor, x._spec, requires_grad=True)
        graphs.append((x._local_tensor, leaf, shardweave.redistribute(leaf, [Replicate()], transport=transport)))

    def backward(mesh: DeviceMesh, columns: int, seed: int) -> None:
        if graphs:
            local, leaf, y = graphs.pop(0)
            (gradient,) = torch.autograd.grad(
                y, leaf, DTensor(2 * y._local_tensor.detach(), y._spec, requires_grad=False)
            )
            if not gradient._local_tensor.equal(2 * local):
                wrong.append(f"backward {seed}")

    def dispatch(mesh: DeviceMesh, columns: int, seed: int) -> None:
        t = tokens_of(rank, (3 * rank + seed) % 10, 2, 5, 8, torch.float32, "uniform", seed)
        x = t.x.requires_grad_()
        routed = dispatcher.dispatch(x, t.ids, t.weights)
        y = dispatcher.combine(routed.x, routed)
        y.sum().backward()
        if not torch.allclose(y, x * t.weights.sum(1, keepdim=True), atol=1e-5):
            wrong.append(f"dispatch {seed}")

    items = []
    for seed in range(rounds):
        kind = random.choice((now, now, begin, use, forward, backward, dispatch))
        items.append((random.randrange(4), partial(kind, random.choice(meshes), random.randint(0, 5), seed)))

    def thread(me: int) -> None:
        for number, (whose, item) in enumerate(items):
            if whose == me:
                turns.run(number, item)

    in_threads(*[partial(thread, me) for me in range(4)])
    return wrong or ["right"]


def different_orders(rank: int, transport: str) -> list[str]:
    """Two threads call on the same ranks in different orders on different ranks."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    shardweave.redistribute(sharded(mesh, 8, 6, torch.float32)[0], [Replicate()], transport=transport)
    results = []

    def call(columns: int, after: float) -> None:
        time.sleep(after)
        x, whole = sharded(mesh, 8, columns, torch.float32)
        results.append(
            outcome(lambda: shardweave.redistribute(x, [Replicate()], transport=transport).to_local().equal(whole))
        )

    late = rank == 1
    in_threads(partial(call, 3, 0.3 * late), partial(call, 5, 0.3 * (not late)))
    return results


def within_a_call(rank: int, transport: str) -> list[str]:
    """A call that is made while this thread is in one is refused, and both transports go on."""
    x, whole = sharded(DeviceMesh("cpu", list(range(dist.get_world_size()))), 8, 6, torch.float32)

    def right() -> bool:
        return shardweave.redistribute(x, [Replicate()], transport=transport).to_local().equal(whole)

    before = right()
    rendezvous = current_transports().rendezvous
    begin, texts = rendezvous.begin, []

    def interrupted(*call: Any) -> int:
        fingerprint = begin(*call)
        if not texts:
            texts.append("")
            try:
                right()
            except TransportError as error:
                texts.append(str(error))
        return fingerprint

    rendezvous.begin = interrupted  # type: ignore[method-assign]
    during = right()
    return [str(before), str(during), str(right()), *texts[1:]]


KINDS: dict[str, Callable[..., list[str]]] = {
    "same call": same_call, "ordered": ordered, "within a call": within_a_call, "different orders": different_orders,
}  # fmt: skip


def life(rank: int, kind: str, *arguments: Any) -> list[str]:
    return KINDS[kind](rank, *arguments)


def ends_of_lives(rank: int, transport: str, rounds: int) -> list[list[str]]:
    cases = [("same call", transport, 20), ("ordered", transport, rounds)]
    cases += [("within a call", transport), ("different orders", transport)]
    return lives(life, cases, rank)


def check_threads(transport: str, rounds: int, **options: Any) -> None:
    by_rank = run_ranks(ends_of_lives, 4, transport, rounds, environment=environment_of(transport), **options)
    for same, in_order, within, different in by_rank:
        assert same == ["right"] * 3 and in_order == ["right"]
        *values, text = within
        assert values == ["True"] * 3 and "a call within call 2 of ranks (0, 1, 2, 3)" in text
        assert len(different) == 2 and "wrong" not in different
    texts = [text for *_, different in by_rank for text in different]
    assert any(text.startswith("DisagreementError: ") for text in texts), texts


@pytest.mark.multi
@crossed(
    "transport, rounds",
    TRANSPORTS,
    [40, 1000],
    gate=lambda transport, rounds: (transport, rounds) == (TRANSPORTS[0], 40),
)
def test_threads(transport: str, rounds: int) -> None:
    check_threads(transport, rounds, timeout=500)


def destroyed(rank: int, transport: str) -> list[str]:
    """The group is destroyed while an asynchronous call is pending and another thread is in a call."""
    store = dist.distributed_c10d._get_default_store()
    x, whole = sharded(DeviceMesh("cpu", list(range(dist.get_world_size()))), 8, 6, torch.float32)
    later = shardweave.redistribute(x, [Replicate()], transport=transport, async_op=True)
    lock, taken, done, results = current_transports().rendezvous.lock, threading.Event(), threading.Event(), []

    def hold() -> None:
        with lock:
            taken.set()
            results.append("did not wait" if done.wait(30) else "waited for the other thread")

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    dist.destroy_process_group()
    done.set()
    thread.join()
    results.append(outcome(lambda: (later.to_local() + 0).equal(whole)))
    dist.init_process_group("gloo", store=dist.PrefixStore("next", store), rank=rank, world_size=2)
    return results


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "symmetric_memory"])
def test_destroyed_group_does_not_wait_for_call_of_other_thread(transport: str) -> None:
    by_rank = run_ranks(destroyed, 2, transport, environment=environment_of(transport))
    assert by_rank == [["did not wait", "right"]] * 2
