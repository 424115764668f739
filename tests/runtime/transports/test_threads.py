"""Calls from several threads of each rank: one at a time, right values, and an error where their orders differ."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_agreement import environment_of, lives, outcome, sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
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
    "same call": same_call,
    "within a call": within_a_call,
    "different orders": different_orders,
}


def life(rank: int, kind: str, *arguments: Any) -> list[str]:
    return KINDS[kind](rank, *arguments)


def ends_of_lives(rank: int, transport: str) -> list[list[str]]:
    return lives(
        life, [("same call", transport, 20), ("within a call", transport), ("different orders", transport)], rank
    )


@pytest.mark.multi
@crossed("transport", TRANSPORTS, gate=lambda transport: transport == TRANSPORTS[0])
def test_threads(transport: str) -> None:
    by_rank = run_ranks(ends_of_lives, 4, transport, environment=environment_of(transport))
    for same, within, different in by_rank:
        assert same == ["right"] * 3
        *values, text = within
        assert values == ["True"] * 3 and "a call within call 2 of ranks (0, 1, 2, 3)" in text
        assert len(different) == 2 and "wrong" not in different
    texts = [text for *_, different in by_rank for text in different]
    assert any(text.startswith("DisagreementError: ") for text in texts), texts


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
