"""What several ranks found about each of some cases, put together as soon as the last of them has said it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .ranks import RankMain, Ranks

Together = Callable[[str, list[dict[str, Any]]], None]


def run_ranks(main: RankMain, size: int, config: dict[str, Any], together: Together) -> None:
    """`together` gets the name of a case, which every rank's message has as "case", and the messages in rank order.

    Raises:
        RanksFailed: a rank died or failed.
    """
    waiting: dict[str, dict[int, dict[str, Any]]] = {}

    def message(rank: int, found: dict[str, Any]) -> None:
        by_rank = waiting.setdefault(found["case"], {})
        by_rank[rank] = found
        if len(by_rank) == size:
            together(found["case"], [by_rank[r] for r in range(size)])

    def output(rank: int, line: str) -> None:
        if line.strip() and not line.startswith("[Gloo]"):
            print(f"rank {rank}: {line}", file=sys.stderr, flush=True)

    with Ranks(main, size, config) as children:
        children.supervise(message, output)
