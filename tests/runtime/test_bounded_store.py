"""A store that does not answer: every operation ends in time, and the store is used again when it answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shardweave.errors import PeerError
from shardweave.runtime.bounded_store import BoundedStore
from shardweave.runtime.transports.rendezvous.rendezvous import Rendezvous

pytestmark = pytest.mark.plan


class Silent:
    """A store that answers only while `open` is set."""

    def __init__(self) -> None:
        self.open, self.done = threading.Event(), [0]

    def set(self, number: int) -> int:
        assert self.open.wait(30)
        self.done.append(number)
        return number


def test_late_operation_raises_and_is_completed_later() -> None:
    store: Any = Silent()
    bounded = BoundedStore(store)
    with pytest.raises(dist.DistStoreError, match=r"did not answer within 0\.05 s"):
        bounded.run(lambda s: s.set(1), 0.05)
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="not answered an earlier request"):
        bounded.run(lambda s: s.set(2), 20.0)
    assert time.monotonic() - start < 10 and store.done == [0]  # it has not waited
    store.open.set()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert bounded.run(lambda s: s.set(3), 20.0) == 3
            break
        except dist.DistStoreError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert store.done == [0, 1, 3]  # the second never began


def test_errors_of_the_store_are_passed_on() -> None:
    bounded = BoundedStore(dist.HashStore())
    bounded.run(lambda store: store.set("key", "value"), 10.0)
    assert bounded.run(lambda store: store.get("key"), 10.0) == b"value"
    with pytest.raises(ZeroDivisionError):
        bounded.run(lambda store: 1 // 0, 10.0)


def test_thread_ends_with_the_store() -> None:
    bounded = BoundedStore(dist.HashStore())
    bounded.run(lambda store: None, 10.0)
    thread, alive = bounded._thread, weakref.ref(bounded)
    assert thread is not None and thread.is_alive()
    del bounded
    thread.join(20)
    assert alive() is None and not thread.is_alive()


class CutOff:
    """A store that answers until its host is cut off."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.connected, self.end, self.asked = True, threading.Event(), 0

    def _answer(self) -> None:
        self.asked += 1
        assert self.connected or self.end.wait(30)

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, text: str) -> None:
        self._answer()
        self.values[key] = text

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return set(keys) <= set(self.values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._answer()
        return [self.values[key].encode() for key in keys]


def test_reads_and_writes_of_ranks_end_in_time() -> None:
    store: Any = CutOff()
    rendezvous = Rendezvous(store, 0, 0.2, lambda rank: False)
    rendezvous.write("a", "1")
    assert rendezvous.texts.get_all(["a", "b"]) is None
    rendezvous.write("b", "2")
    assert rendezvous.texts.get_all(["a", "b"]) == ["1", "2"]
    store.asked = 0
    assert rendezvous.read_each({rank: "ab"[rank % 2] for rank in range(100)}) == ["1", "2"] * 50
    assert store.asked == 2 and rendezvous.read_each({}) == []
    store.connected = False
    assert rendezvous.texts.get_all(["a", "b"]) is None
    with pytest.raises(PeerError, match="the store is gone"):
        rendezvous.write("c", "3")
    with pytest.raises(PeerError, match="the store is gone"):
        rendezvous.read("a", 1)
    store.end.set()


@contextlib.contextmanager
def far_store() -> Iterator[tuple[int, threading.Event]]:
    """The port of a store, and an event: what is sent through the port arrives only while it is set."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connected, ends = threading.Event(), []

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                assert connected.wait(60)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                pair = listener.accept()[0], socket.create_connection(("127.0.0.1", server.port))
                ends.extend(pair)
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=pass_on, args=(source, target), daemon=True).start()

    connected.set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1], connected
        finally:
            connected.set()
            listener.shutdown(socket.SHUT_RDWR)
            for end in ends:
                end.close()


def test_closing_ends_an_operation_in_progress() -> None:
    with far_store() as (port, connected):
        bounded = BoundedStore(dist.PrefixStore("of", dist.TCPStore("127.0.0.1", port, is_master=False)))
        other = bounded.with_own_connection(10.0)
        other.run(lambda store: store.set("key", "value"), 10.0)
        bounded.wait(["key"], 10.0)
        with pytest.raises(dist.DistStoreError, match=r"not written within 0\.01 s: key, other"):
            bounded.wait(["key", "other"], 0.01)
        connected.clear()
        with pytest.raises(dist.DistStoreError, match="did not answer"):
            bounded.run(lambda store: store.check(["key"]), 0.05)
        with pytest.raises(dist.DistStoreError, match="has not answered"):
            bounded.with_own_connection(1.0).run(lambda store: None, 1.0)
        for store in (bounded, other):
            store.close()
            assert store._thread is not None and not store._thread.is_alive()
            with pytest.raises(dist.DistStoreError, match="the process is ending"):
                store.run(lambda store: None, 1.0)
