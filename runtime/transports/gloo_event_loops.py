"""The scheduling of the threads in which gloo waits for its sockets, its event loops.

While another thread holds the lock of a connection, the event loop polls the socket again and again if it has data
(`Pair::handleEvents` in gloo/transport/tcp/pair.cc). On Linux a thread that wakes takes the core of one that runs.
Where all cores are busy, that is often a thread which has just sent a message and holds the lock: the loop polls for
its whole time slice before that thread can go on. With SCHED_BATCH a thread that wakes takes no core from others; it
runs as soon as one blocks or has used its slice.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..environment import requested_gloo_sched_batch

_logger = logging.getLogger(__name__)
_NAME = "gloo_tcp_loop"  # from torch 2.13 on; before, they have the name of the process
_TASKS = Path("/proc/self/task")


def schedule_event_loops() -> None:
    """Schedule gloo's event loops, those of all process groups of this process, as SCHED_BATCH.

    Does nothing to threads that have another policy than the default, with SHARDWEAVE_GLOO_SCHED_BATCH=0, and where it
    is not possible or allowed: calls are right with any policy. A loop whose thread has just started, and has no name
    yet, is left until the next time.

    Raises:
        ArgumentError: a value of SHARDWEAVE_GLOO_SCHED_BATCH that is not allowed.
    """
    if requested_gloo_sched_batch() and hasattr(os, "SCHED_BATCH"):
        changed = _change(os.SCHED_OTHER, os.SCHED_BATCH)
        _logger.debug("threads of gloo scheduled as SCHED_BATCH: %s", changed or "none")


@contextmanager
def default_policy() -> Iterator[None]:
    """A context in which event loops have the policy that they start with, for measurements without shardweave."""
    changed = _change(os.SCHED_BATCH, os.SCHED_OTHER) if hasattr(os, "SCHED_BATCH") else []
    try:
        yield
    finally:
        for thread in changed:
            _set(thread, os.SCHED_BATCH)


def _change(old: int, new: int) -> list[int]:
    """Change the policy of the event loops that have another; return their ids."""
    return [thread for thread in _event_loops() if _policy(thread) == old and _set(thread, new)]


def _event_loops() -> Iterator[int]:
    # In a PID namespace without its own /proc, the ids there are those of other threads.
    if not (_TASKS / str(threading.get_native_id())).exists():
        return
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has ended
                if (task / "comm").read_text(encoding="ascii", errors="replace").strip() == _NAME:
                    yield int(task.name)


def _policy(thread: int) -> int | None:
    with suppress(OSError):
        return os.sched_getscheduler(thread)
    return None


def _set(thread: int, policy: int) -> bool:
    with suppress(OSError):
        os.sched_setscheduler(thread, policy, os.sched_param(0))
        return True
    return False
