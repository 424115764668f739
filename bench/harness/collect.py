"""Runs a function on ranks of this machine and gathers their messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .ranks import RankMain, Ranks

Message = dict[str, Any]
Together = Callable[[str, list[Message]], None]


def supervise(
    main: RankMain,
    size: int,
    config: Message,
    on_message: Callable[[int, Message], None],
    device_type: str = "cpu",
    progress: Any = None,
) -> None:
    """`on_message` gets each rank's messages; what ranks print is shown, on the console of `progress` or on stderr.

    Args:
        progress: a bar of rich's. It has a thread, so the ranks are forked before it starts.

    Raises:
        RanksFailed: a rank died or failed.
    """

    def output(rank: int, line: str) -> None:
        if not line.strip() or line.startswith("[Gloo]"):
            return
        if progress is None:
            print(f"rank {rank}: {line}", file=sys.stderr, flush=True)
        else:
            progress.console.print(f"rank {rank}: {line}", markup=False)

    with Ranks(main, size, config, device_type=device_type) as children, progress or nullcontext():
        children.supervise(on_message, output)


def run_ranks(main: RankMain, size: int, config: Message, together: Together, **options: Any) -> None:
    """`together` gets the name of a case, which every rank's message has as "case", and the messages in rank order.

    Args:
        options: of `supervise`.
    """
    waiting: dict[str, dict[int, Message]] = {}

    def message(rank: int, found: Message) -> None:
        by_rank = waiting.setdefault(found["case"], {})
        by_rank[rank] = found
        if len(by_rank) == size:
            together(found["case"], [by_rank[r] for r in range(size)])

    supervise(main, size, config, message, **options)


def messages_of(main: RankMain, size: int, config: Message) -> list[list[Message]]:
    """All messages of each rank."""
    by_rank: list[list[Message]] = [[] for _ in range(size)]
    supervise(main, size, config, lambda rank, found: by_rank[rank].append(found))
    return by_rank
