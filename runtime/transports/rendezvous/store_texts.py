"""Texts that ranks write to the process group's store, and read from it within a limited time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from ....errors import TransportError, shown
from ...bounded_store import BoundedStore

_LONGEST_ANSWER = 5.0  # seconds that a wait or an error, which does without, waits for the store


class StoreTexts:
    """The texts of a store whose host may be slow, or gone.

    Attributes:
        bounded: the store, which answers in time or raises.
        longest_answer: seconds that a caller which can do without the answer waits for it.
    """

    def __init__(self, store: dist.Store, timeout: float) -> None:
        self.bounded, self._timeout = BoundedStore(store), timeout
        self.longest_answer = min(_LONGEST_ANSWER, timeout / 4)

    def set(self, key: str, text: str, within: float | None = None) -> None:
        """Write `key`. `within`: seconds to wait for the store; None: `longest_answer`.

        Raises:
            RuntimeError: the store cannot be reached (dist.DistError), or keeps nothing.
        """
        self.bounded.run(lambda store: store.set(key, text), within or self.longest_answer)

    def publish(self, key: str, text: str) -> None:
        """`set`, which raises nothing: a rank that cannot reach the store does so when it reads."""
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self.set(key, text)

    def get(self, key: str, within: float | None = None) -> str | None:
        """The text at `key`; None if there is none. `within`: seconds to wait for the store; None: `longest_answer`.

        Raises:
            dist.DistError: the store cannot be reached.
        """
        return self.bounded.run(partial(_read, key), within or self.longest_answer)

    def get_all(self, keys: Sequence[str]) -> list[str] | None:
        """The texts at several keys in one request; None if one of them is not written yet, or if the store has no such
        requests or does not answer."""
        with suppress(dist.DistError):
            return self.bounded.run(partial(_read_all, list(keys)), self._timeout)
        return None


def malformed(rank: int, text: str) -> TransportError:
    """The error after reading a text from the store that no rank of this version writes."""
    return TransportError(
        f"rank {rank} wrote {shown(text)} to the store; allowed: what this version of shardweave writes. Do all ranks "
        "run the same version, and does nothing else write there?"
    )


def json_fields(rank: int, text: str, number: int) -> list[Any]:
    """The items of a list that a rank wrote as JSON.

    Raises:
        TransportError: it is something else.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise malformed(rank, text) from None
    if not isinstance(fields, list) or len(fields) != number:
        raise malformed(rank, text)
    return fields


def _read(key: str, store: dist.Store) -> str | None:
    return store.get(key).decode(errors="replace") if store.check([key]) else None


def _read_all(keys: list[str], store: dist.Store) -> list[str] | None:
    several: Any = store
    if not several.has_extended_api() or not several.check(keys):
        return None
    return [value.decode(errors="replace") for value in several.multi_get(keys)]
