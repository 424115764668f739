"""Points of calls at which a rank of `faults` dies, stops, raises or exits. The rank's own classes are patched; the
package has no hooks for this."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from ...runtime.transports.hierarchical import HierarchicalSharedMemoryTransport
from ...runtime.transports.process_group import ProcessGroupTransport
from ...runtime.transports.shared_memory.transport import SharedMemoryTransport

KINDS = ("kill", "stop", "raise", "exit")
MEETINGS = {
    "set-up": 1, "redistribution": 2, "asynchronous": 0, "growth": 1, "backward": 1, "batch": 1, "dispatcher": 0,
    "dispatch": 2, "combine": 1, "token backward": 2,
}  # fmt: skip
"""How many meetings of each stage (`fault_stages`) have points: one request each that a transport answers."""


class Boom(Exception):
    """What a rank raises."""


class Point(NamedTuple):
    """Where a rank fails.

    Attributes:
        place: "before" a rank arrives at a meeting, "inside" it, when peers can see it there, or "after" it; of meeting
            0, which is the stage itself: before or after it.
        meeting: which of the stage, from 1 on.
    """

    stage: str
    place: str
    meeting: int

    @property
    def name(self) -> str:
        return f"{self.stage}, {self.place}" + f" meeting {self.meeting}" * (self.meeting > 0)


POINTS = (
    *(Point(stage, place, 0) for stage in MEETINGS for place in ("before", "after")),
    *(
        Point(stage, place, meeting + 1)
        for stage, meetings in MEETINGS.items()
        for meeting in range(meetings)
        for place in ("before", "inside", "after")
    ),
)


class Trap:
    """Makes this process fail at a point, once it is armed.

    Args:
        notify: called just before.
    """

    def __init__(self, point: Point, kind: str, notify: Callable[[], None]) -> None:
        self._point, self._kind, self._notify = point, kind, notify
        self._is_armed, self._is_inside, self._meeting = False, False, 0
        # Both steps of a meeting are those of `begin`.
        SharedMemoryTransport.answer = lambda self, request: self.begin(request)()  # type: ignore[method-assign]
        for transport in (SharedMemoryTransport, ProcessGroupTransport, HierarchicalSharedMemoryTransport):
            transport.begin = self._watched(transport.begin)  # type: ignore[attr-defined, method-assign]

    def arm(self) -> None:
        """The stage begins in which the point is."""
        self._is_armed, self._meeting = True, 0
        self._reach("before", 0)

    def disarm(self) -> None:
        """The stage is over."""
        self._reach("after", 0)
        self._is_armed = False

    def _reach(self, place: str, meeting: int) -> None:
        if not self._is_armed or (place, meeting) != self._point[1:]:
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
            raise Boom(self._point.name)

    def _watched(self, begin: Any) -> Any:
        """A meeting inside of another one, as one of the ranks of a node, is a part of it."""

        @wraps(begin)
        def watched(*arguments: Any) -> Any:
            if self._is_inside:
                return begin(*arguments)
            self._meeting += 1
            meeting = self._meeting
            self._reach("before", meeting)
            finish = self._inside(begin, *arguments)
            self._reach("inside", meeting)

            def finished() -> Any:
                result = self._inside(finish)
                self._reach("after", meeting)
                return result

            return finished

        return watched

    def _inside(self, function: Any, *arguments: Any) -> Any:
        self._is_inside = True
        try:
            return function(*arguments)
        finally:
            self._is_inside = False
