"""Points of calls at which a rank of `faults` dies, stops, raises or exits. The rank's own classes are patched; the
package has no hooks for this."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from ...runtime.executor import bind
from ...runtime.executor.copies import Copies
from ...runtime.moe.transfer.base import TokenTransfer
from ...runtime.transports.hierarchical import HierarchicalSharedMemoryTransport
from ...runtime.transports.process_group import ProcessGroupTransport
from ...runtime.transports.rendezvous.rendezvous import Rendezvous
from ...runtime.transports.select import Transports
from ...runtime.transports.shared_memory.allocator import Allocator
from ...runtime.transports.shared_memory.transport import SharedMemoryTransport

KINDS = ("kill", "stop", "raise", "exit")


class Boom(Exception):
    """What a rank raises."""


class Point(NamedTuple):
    """Where a rank fails: at an event of a call in a stage (`fault_stages`).

    Attributes:
        call: the call within the stage, from 1 on; 0: before the first one.
        event: what happens, and whether the rank fails before or after it.
        nth: how often the event has happened since the call began, from 1 on.
        shared: it is only where ranks share memory.
    """

    name: str
    stage: str
    call: int
    event: str
    nth: int = 1
    shared: bool = False


def _meeting(name: str, stage: str, call: int = 1, nth: int = 1) -> list[Point]:
    """Before a rank arrives, after peers can see that it has, and after it has seen that they have."""
    places = (("before", "arrive:before"), ("inside", "arrive:after"), ("after", "meet:after"))
    return [Point(f"{name}, {place} meeting {nth}", stage, call, event, nth) for place, event in places]


POINTS: tuple[Point, ...] = (
    Point("set-up, before transports", "set-up", 0, "transports:before"),
    Point("set-up, transports made", "set-up", 0, "transports:after"),
    Point("set-up, transport chosen", "set-up", 0, "choose:after"),
    Point("set-up, before binding", "set-up", 0, "bind:before"),
    Point("set-up, bound", "set-up", 0, "bind:after"),
    Point("set-up, before the session", "set-up", 1, "session:before"),
    Point("set-up, within the session", "set-up", 1, "write:after"),
    Point("set-up, session agreed", "set-up", 1, "session:after"),
    *_meeting("set-up", "set-up"),
    Point("redistribution, before the call", "redistribution", 0, "stage:before"),
    *_meeting("redistribution", "redistribution"),
    Point("redistribution, while copying", "redistribution", 1, "copy:after"),
    *_meeting("redistribution", "redistribution", nth=2),
    Point("redistribution, returned", "redistribution", 1, "stage:after"),
    Point("asynchronous, inside its meeting", "asynchronous", 1, "arrive:after"),
    Point("asynchronous, begun", "asynchronous", 1, "stage:after"),
    Point("growth, before pages", "growth", 1, "pages:before", shared=True),
    Point("growth, after pages", "growth", 1, "pages:after", shared=True),
    *_meeting("backward", "backward"),
    *_meeting("batch", "batch"),
    Point("batch, while copying", "batch", 1, "copy:after"),
    Point("dispatcher, before it is made", "dispatcher", 0, "transfer:before"),
    Point("dispatcher, made", "dispatcher", 0, "transfer:after"),
    *_meeting("dispatch", "dispatch"),
    *_meeting("dispatch", "dispatch", nth=2),
    *_meeting("combine", "combine"),
    *_meeting("backward of combine", "token backward", 1),
    *_meeting("backward of dispatch", "token backward", 2),
)


class Trap:
    """Makes this process fail at a point, once it is armed.

    Args:
        notify: called just before.
    """

    def __init__(self, point: Point, kind: str, notify: Callable[[], None]) -> None:
        self._point, self._kind, self._notify = point, kind, notify
        self._is_armed = False
        self._call, self._seen, self._within = 0, Counter[str](), 0
        self._patch(Rendezvous, "begin", self._begin)
        for cls, name, event in (
            (Transports, "__init__", "transports"), (Transports, "choose", "choose"),
            (bind.BoundProgram, "__init__", "bind"), (Rendezvous, "_new_session", "session"),
            (Rendezvous, "write", "write"), (Allocator, "_new_pages", "pages"), (Copies, "__call__", "copy"),
            (TokenTransfer, "__init__", "transfer"), (SharedMemoryTransport, "_arrive", "arrive"),
            (SharedMemoryTransport, "_wait_all", "meet"),
        ):  # fmt: skip
            self._patch(cls, name, self._around(event))
        for two_sided in (ProcessGroupTransport, HierarchicalSharedMemoryTransport):
            self._patch(two_sided, "begin", self._exchange)

    def arm(self) -> None:
        """A stage begins in which the point is."""
        self._is_armed, self._call = True, 0
        self._seen.clear()
        self.reach("stage:before")

    def disarm(self) -> None:
        """The stage is over."""
        if self._is_armed:
            self.reach("stage:after")
        self._is_armed = False

    def reach(self, event: str) -> None:
        if not self._is_armed or self._within:
            return
        self._seen[event] += 1
        point = self._point
        if (self._call, event, self._seen[event]) != (point.call, point.event, point.nth):
            return
        self._is_armed = False
        self._notify()
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._kind == "exit":
            raise SystemExit(0)
        else:
            raise Boom(point.name)

    @staticmethod
    def _patch(cls: type, name: str, wrapper: Callable[[Any], Any]) -> None:
        setattr(cls, name, wraps(getattr(cls, name))(wrapper(getattr(cls, name))))

    def _begin(self, begin: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            self._call += 1
            self._seen.clear()
            return begin(*arguments)

        return counted

    def _around(self, event: str) -> Callable[[Any], Any]:
        def wrapper(function: Any) -> Any:
            def watched(*arguments: Any, **named: Any) -> Any:
                self.reach(f"{event}:before")
                result = function(*arguments, **named)
                self.reach(f"{event}:after")
                return result

            return watched

        return wrapper

    def _exchange(self, begin: Any) -> Any:
        """Messages, and a barrier beside them, count as one meeting."""

        def watched(*arguments: Any) -> Any:
            self.reach("arrive:before")
            self._within += 1
            try:
                finish = begin(*arguments)
            finally:
                self._within -= 1
            self.reach("arrive:after")

            def finished() -> Any:
                self._within += 1
                try:
                    result = finish()
                finally:
                    self._within -= 1
                self.reach("meet:after")
                return result

            return finished

        return watched
