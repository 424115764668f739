"""What ranks report of themselves in the store: failures, refused calls, the call that they wait in, settings."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from .calls import CallRecord, Calls
from .failures import Failures
from .store_texts import StoreTexts, parsed

settings: dict[str, Callable[[], str]] = {}
"""Functions that return settings which must be equal on all ranks, by the name that users know. Modules add theirs."""
remarks: dict[str, Callable[[], str]] = {}
"""Functions that return further settings, which may differ, for warnings about a rank that is waited for."""

# The forms of reports (`store_texts.parsed`).
_SETTINGS = {str: str}
_FAILED = str, str
_REFUSALS = str, {str: {str: str}}, {str: {str: str}}, [([int], int, str)]
_WAITING = str, int, [int], int, int, str, {str: int}, [int]
_LEFT = str, {str: int}

_earlier_nonces: set[str] = set()
"""Those of peers in process groups that this process has left."""


class WaitReport(NamedTuple):
    """The call that a rank waits in.

    Attributes:
        polls: how often the rank has written so during this wait.
        numbers: the numbers of its last calls (`Calls.numbers`).
        awaited: the ranks that it waits for.
    """

    call: CallRecord
    polls: int
    numbers: dict[str, int]
    awaited: list[int]


class RefusalReport(NamedTuple):
    """The calls that a rank refused: `Calls.refused` and `Calls.told`, with numbers as text; and for each group of
    `Calls.refused_within` its ranks, how many calls, and the last message."""

    refused: dict[str, dict[str, str]]
    told: dict[str, dict[str, str]]
    refused_within: list[tuple[list[int], int, str]]


class PeerReports:
    """Writes the reports of a rank, and reads those of its peers.

    Attributes:
        nonce: tells the reports of this process group from those that earlier ones left in the store.
        nonces: those of peers, known after the first rendezvous with them.
    """

    def __init__(self, calls: Calls, texts: StoreTexts, timeout: float, failures: Failures) -> None:
        self._calls, self._texts, self._failures = calls, texts, failures
        self.nonce = secrets.token_hex(8)
        self.nonces: dict[int, str] = {}
        self._failed = self._is_evidence = False
        self._published = ""
        for kind in ("failed", "waiting", "refused"):
            self._clear(kind, timeout)
        self.publish_settings()

    def publish_settings(self) -> None:
        """Write this rank's settings, for warnings of ranks that wait for it."""
        text = json.dumps(own_settings())
        if text != self._published:
            self._published = text
            self._publish("settings", text)

    def settings_of(self, peer: int) -> dict[str, str] | None:
        """The settings of a rank; None if it has not used shardweave in this process group."""
        text = self._get("settings", peer)
        return None if text is None else parsed(peer, text, _SETTINGS)

    def fail(self, text: str) -> None:
        """Report that this rank has failed. Its current call and the first text stay in the store, for the errors of
        peers."""
        if not self._failed:
            self._failed = True
            self._failures.add()
            self.keep_waiting()
            self._publish("failed", json.dumps([self.nonce, text]))

    def failure(self, rank: int) -> str | None:
        """The text of a rank's `fail`; None if it has not failed."""
        written = self._get("failed", rank)
        if written is None:
            return None
        nonce, text = parsed(rank, written, _FAILED)
        return text if self._is_current(rank, nonce) else None

    def leave(self) -> None:
        """Report that this rank has left the process group, with the numbers of its last calls."""
        _earlier_nonces.update(self.nonces.values())
        if self.nonces:  # only ranks that have met this one can tell the report from that of an earlier group
            self._publish("left", json.dumps([self.nonce, self._calls.numbers()]))

    def left(self, peer: int) -> dict[str, int] | None:
        """The numbers of the last calls (`Calls.numbers`) of a peer that has left the group; None if it has not."""
        text = self._get("left", peer)
        if text is None:
            return None
        nonce, numbers = parsed(peer, text, _LEFT)
        return numbers if self.nonces.get(peer) == nonce else None

    def publish_refusals(self) -> None:
        """Write the calls that this rank refused."""
        calls = self._calls
        within = [[ranks, len(messages), messages[-1]] for ranks, messages in calls.refused_within.items()]
        self._publish("refused", json.dumps([self.nonce, calls.refused, calls.told, within]))

    def refusals(self, peer: int) -> RefusalReport | None:
        """The calls that a peer refused; None if it has refused none."""
        text = self._get("refused", peer)
        if text is None:
            return None
        nonce, *fields = parsed(peer, text, _REFUSALS)
        return RefusalReport(*fields) if self._is_current(peer, nonce) else None

    def write_waiting(self, polls: int, awaited: Sequence[int] = ()) -> None:
        """Write the call that this rank waits in. `polls`: how often it has done so during this wait; `awaited`: the
        ranks that it waits for."""
        if polls == 1:
            self._is_evidence = self._failed  # of an earlier wait, whose error was not this rank's last
        call = self._calls.current
        text = json.dumps([self.nonce, polls, *call[:3], call.text, self._calls.numbers(), list(awaited)])
        with suppress(dist.DistError):
            self._texts.set(_key("waiting", self._calls.rank), text)

    def keep_waiting(self, awaited: Sequence[int] = ()) -> None:
        """Write the current call, and leave it in the store for the errors of peers, until this rank waits again."""
        self._is_evidence = True
        self.write_waiting(0, awaited)

    def clear_waiting(self) -> None:
        """Remove what `write_waiting` wrote, unless errors of peers need it."""
        if not self._is_evidence:
            self._clear("waiting")

    def waiting(self, peer: int) -> WaitReport | None:
        """The call that a peer waits in; None if it has written none."""
        text = self._get("waiting", peer)
        if text is None:
            return None
        nonce, polls, ranks, number, fingerprint, description, numbers, awaited = parsed(peer, text, _WAITING)
        if not self._is_current(peer, nonce):
            return None
        return WaitReport(CallRecord(tuple(ranks), number, fingerprint, description), polls, numbers, awaited)

    def _is_current(self, peer: int, nonce: str) -> bool:
        known = self.nonces.get(peer)
        return nonce not in _earlier_nonces if known is None else nonce == known

    def _get(self, kind: str, rank: int) -> str | None:
        return self._texts.get(_key(kind, rank)) or None

    def _publish(self, kind: str, text: str) -> None:
        self._texts.publish(_key(kind, self._calls.rank), text)

    def _clear(self, kind: str, within: float | None = None) -> None:
        # Not `delete_key`: a peer that has just checked the key would wait until it exists again.
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self._texts.set(_key(kind, self._calls.rank), "", within)


def own_settings() -> dict[str, str]:
    """This rank's settings and remarks."""
    return {name: read() for name, read in (settings | remarks).items()}


def _key(kind: str, rank: int) -> str:
    return f"{kind}/{rank}"
