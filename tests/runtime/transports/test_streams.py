"""Order of calls on streams, with fakes of CUDA's streams that record which waits for which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardweave.runtime.executor.async_work import AsyncRun
from shardweave.runtime.executor.call import Call
from shardweave.runtime.transports.buffer_pool import BufferPool
from shardweave.runtime.transports.call_lock import CallLock
from shardweave.runtime.transports.streams import StreamOrder, captured, current_stream, order_on

pytestmark = pytest.mark.plan


class Cuda:
    """Fake streams by name, and a log of their operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current, self.capturing = "a", False
        self.names: dict[str, int] = {}
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: Stream(self, self.current).raw, raising=False
        )
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.raw = self.cuda_stream = cuda.names.setdefault(name, len(cuda.names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.cuda.log.append(f"event on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.cuda.log.append(f"{self.name} waits for {event}")


def test_lent_piece_follows_the_stream_that_waited_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts on stream a may write it once stream b, on which a later call was made, has waited for its readers."""
    cuda, pool = Cuda(monkeypatch), BufferPool(0, {0: torch.zeros(64, dtype=torch.uint8)}, 64, 1)
    pool._device = torch.device("cuda", 0)
    first = pool.take(lend=True)
    assert first is not None
    with cuda.stream(Stream(cuda, "b")):
        pool.follow(first)
    del first
    second = pool.take(lend=True)
    assert second is not None and cuda.log == ["a waits for b"]
    cuda.capturing = True  # nothing is enqueued
    with cuda.stream(Stream(cuda, "b")):
        pool.follow(second)
    cuda.capturing = False
    del second
    assert pool.take() is not None and cuda.log == ["a waits for b"]


def test_stream_order_waits_for_last_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, order = Cuda(monkeypatch), StreamOrder(torch.device("cuda", 0))
    for cuda.current in "aabbca":
        order.join()
    assert cuda.log == ["b waits for a", "c waits for b", "a waits for c"]
    cuda.current, cuda.capturing = "captured", True
    order.join(owner := object())
    cuda.current, cuda.capturing = "a", False
    order.join(object())
    assert len(cuda.log) == 3 and owner in captured
    captured.discard(owner)
    # The call on the side stream is the last one, whichever stream it was made on.
    order.moved_to(Stream(cuda, "side"))
    order.join()
    assert cuda.log[3:] == ["a waits for side"]


def test_no_stream_order_on_cpu() -> None:
    assert order_on(torch.device("cpu")) is None and current_stream(torch.device("cpu")) is None


class Output:
    """A tensor on a device that does not exist."""

    def __init__(self, cuda: Cuda) -> None:
        self.device, self.cuda = torch.device("cuda", 0), cuda

    def record_stream(self, stream: Stream) -> None:
        self.cuda.log.append(f"output is used on {stream.name}")


def test_async_run_finishes_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)

    def run() -> Iterator[None]:
        yield
        cuda.log.append(f"unpacked on {cuda.current}")

    started = run()
    started.send(None)
    transport: Any = SimpleNamespace(
        busy=False,
        pending=None,
        fail=None,
        answer=None,
        error=None,
        rank=0,
        rendezvous=SimpleNamespace(
            calls=SimpleNamespace(current=None), lock=CallLock(0, 5.0, str), end=lambda error: None
        ),
    )
    kind: Any = SimpleNamespace(milliseconds=0.0)
    output: Any = Output(cuda)
    pending = AsyncRun(started, transport, lambda: cuda.log.append(f"waited on {cuda.current}"), kind, output.device)
    cuda.current = "b"  # of the transport's next call
    pending.finish()
    pending.finish()
    assert cuda.log == ["waited on a", "unpacked on a", "event on a"]
    cuda.current, cuda.log = "c", []  # of who uses the tensor
    pending.wait(output)
    assert cuda.log == ["c waits for event of a", "output is used on c"]
    cuda.current, cuda.log = "a", []
    pending.wait(output)
    assert cuda.log == []


def test_captured_call_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)

    def run(x: object, fingerprint: int) -> Iterator[None]:
        return
        yield

    bound: Any = SimpleNamespace(
        device=torch.device("cuda", 0),
        fingerprint=1,
        run=run,
        request=(),
        title=str,
        summary=lambda: ("what", 0, 0),
        traffic=None,
    )
    transport: Any = SimpleNamespace(
        name="shared_memory", pending=None, error=None, busy=False, fail=print, answer=None,
        rendezvous=SimpleNamespace(begin=lambda *call: None, end=lambda error: None, lock=CallLock(0, 5.0, str)),
    )  # fmt: skip
    call = Call(bound, transport, (0, 1))
    for cuda.capturing in (False, True):
        call(torch.ones(1))
        assert (call in captured) == cuda.capturing
    captured.discard(call)
