"""Coordination through the process group's store: first rendezvous, settings, refused calls, long waits, failures.

As long as calls succeed without long waits, the store is used only when ranks first communicate.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property

import torch.distributed as dist

from ....errors import DisagreementError, PeerError, TransportError
from ... import flight_recorder
from ...flight_recorder import Details
from ..background_calls import BackgroundCalls
from ..call_lock import CallLock
from .calls import CallRecord, Calls, Ranks, key_of
from .failures import Failures
from .long_wait import LongWait, long_wait
from .peer_errors import PeerErrors
from .peer_reports import PeerReports, settings
from .store_texts import StoreTexts, parsed

_SESSION = str, {str: str}, {str: str}
"""What a rank writes when it first meets others: its nonce, the nonces that it has read, its settings."""
_NO_DETAILS = Details()


class Rendezvous:
    """What a rank shares with its peers through the store: agreement on settings and sessions when ranks first
    communicate, the sequence number of each call, refusals, failures, and the call that a rank waits in.

    There is one per default process group, used by all transports, and one more for the process groups made after a
    failure.

    Args:
        timeout: seconds that a wait may take.
        is_gone: returns whether the process of a rank is known to have ended.
        first: that of the default process group; None: this is the one.

    Attributes:
        calls: the calls of this rank.
        texts: the store, with a limit of time.
        reports: what ranks report of themselves.
        errors: the errors of waits for peers.
        failures: of the ranks of the default process group.
        sessions: the names of the sessions that this rank has agreed on with others.
        lock: held by the thread that is in a call, or binds one; one for the default process group and all others.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        timeout: float,
        is_gone: Callable[[int], bool],
        first: Rendezvous | None = None,
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self.calls = calls = Calls(rank)
        self.texts = StoreTexts(store, timeout)
        self.failures: Failures = Failures(self.texts, rank, timeout) if first is None else first.failures
        self.reports = PeerReports(calls, self.texts, timeout, self.failures)
        self.errors = PeerErrors(calls, self.reports, timeout, is_gone)
        self.sessions: set[str] = set()
        self._failure: TransportError | None = None
        self.lock: CallLock = CallLock(rank, timeout, lambda: calls.current) if first is None else first.lock
        self.lock.current_call = lambda: calls.current  # of the latest set of transports

    @cached_property
    def background(self) -> BackgroundCalls:
        """Makes calls on a thread of its own."""
        return BackgroundCalls(self.lock)

    def begin(
        self,
        ranks: Ranks,
        fingerprint: int,
        description: str | Callable[[], str],
        details: Details = _NO_DETAILS,
    ) -> int:
        """Begin the next call of `ranks`; before the first one, they agree on a session. `end` follows.

        Args:
            details: for the flight recorder.

        Returns:
            The fingerprint for the exchanges: the argument, changed after refusals (`Calls.refuse_within`).

        Raises:
            DisagreementError, MeetingTimeoutError, PeerError: as `session`.
        """
        sequence = self.calls.begin(ranks, fingerprint, description)
        call = self.calls.current
        if flight_recorder.current is not None:
            flight_recorder.current.begin(call, details)
        if sequence.session is None:
            self.session(ranks)
        return call.fingerprint

    def end(self, error: BaseException | None = None, call: CallRecord | None = None) -> None:
        """The host leaves a call, the current one by default. If it has failed, peers have been told before: this may
        wait for their flight records."""
        if flight_recorder.current is not None:
            flight_recorder.current.end(self.calls.current if call is None else call, error)

    def attempt(self, call: CallRecord) -> AbstractContextManager[None]:
        """A context in which ranks may wait for each other before `call`. Flight records have it only if that fails."""
        recorder = flight_recorder.current
        return nullcontext() if recorder is None else recorder.attempt(call)

    @contextmanager
    def making_ready(self, ranks: Ranks, description: str | Callable[[], str]) -> Iterator[None]:
        """A context in which the next call of `ranks` is prepared, where ranks may wait for each other."""
        before = self.calls.current
        call = self.calls.current = self.calls.next_call(ranks, description)
        try:
            with self.attempt(call):
                yield
        finally:
            self.calls.current = before

    def refuse(self, ranks: Ranks, message: str) -> None:
        """Record that this rank does not make the next call of `ranks`, because of invalid arguments. Does not wait."""
        if len(ranks) > 1:
            self.calls.refuse(ranks, message)
            self.reports.publish_refusals()

    def tell_refusal(self, message: str) -> None:
        """Record that this rank takes part in the current call only to tell that it refuses it, because of invalid
        arguments. Does not wait."""
        self.calls.tell(message)
        self.reports.publish_refusals()

    def refuse_within(self, ranks: Ranks, message: str) -> None:
        """Record that this rank does not make a call of some of `ranks` (`Calls.refuse_within`). Does not wait."""
        if self.rank in ranks:
            self.calls.refuse_within(ranks, message)
            self.reports.publish_refusals()

    def fail_outside_call(self, fail: Callable[[TransportError], None], error: TransportError) -> None:
        """Have a transport fail because of an error before or after a call, as where memory for one is allocated: peers
        that wait for this rank are told. Not in a forked child, whose errors are no failures of this rank."""
        with suppress(TransportError), self.lock:
            fail(error)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A context in which this rank makes what peers wait for. They are told if it cannot, so it cannot later."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except TransportError as error:
            self._failure = error
            self.reports.fail(f"rank {self.rank} failed: {error}")
            raise

    def session(self, ranks: Ranks) -> str:
        """A unique name for this group of ranks. The first time, all of them call, and their settings are compared.

        Each rank writes a random nonce and the nonces that it has read from the others. A rank that finds its own nonce
        in the text of a peer knows that this text is not left over from an earlier group.

        Raises:
            DisagreementError: a setting differs; the text names it and both values.
            MeetingTimeoutError, PeerError: a rank did not arrive.
        """
        sequence = self.calls.sequence(ranks)
        if sequence.session is None:
            sequence.session = self._new_session(ranks) if len(ranks) > 1 else self.reports.nonce
            if len(ranks) > 1:
                self.sessions.add(sequence.session)
        return sequence.session

    def _new_session(self, ranks: Ranks) -> str:
        own_settings, written = {name: read() for name, read in settings.items()}, ""
        own_nonce, nonces = self.reports.nonce, {}  # type: str, dict[int, str]
        peer_settings: dict[int, dict[str, str]] = {}
        deadline, pause = time.monotonic() + self.timeout, 1e-4
        peers = [rank for rank in ranks if rank != self.rank]
        wait = LongWait(self.errors)
        while True:
            text = json.dumps([own_nonce, nonces, own_settings])
            if text != written:
                self.write(f"session/{key_of(ranks)}/{self.rank}", text, self._until(deadline))
                written = text
            missing = None
            for peer in peers:
                text = self.read(f"session/{key_of(ranks)}/{peer}", peer)
                nonces[peer], seen_by_peer, peer_settings[peer] = parsed(peer, text, _SESSION)
                if seen_by_peer.get(str(self.rank)) != own_nonce:
                    missing = peer
            if missing is None and written == json.dumps([own_nonce, nonces, own_settings]):
                break
            if missing is not None:
                if time.monotonic() > deadline:
                    raise self.errors.timed_out(missing)
                wait.poll([missing])  # it may have ended since it wrote
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        wait.close()
        self.reports.nonces |= nonces
        for peer in peers:
            _compare_settings(self.rank, own_settings, peer, peer_settings[peer])
        joined = " ".join(own_nonce if rank == self.rank else nonces[rank] for rank in ranks)
        return hashlib.blake2b(joined.encode(), digest_size=12).hexdigest()

    def write(self, key: str, text: str, within: float | None = None) -> None:
        """Write `key` to the store. `within`: seconds to wait for the store; None: the timeout.

        Raises:
            PeerError: the store cannot be reached.
        """
        try:
            self.texts.set(key, text, self.timeout if within is None else within)
        except dist.DistError as error:
            raise PeerError(
                f"the store is gone (its rank died?); rank {self.rank} was in {self.calls.current}: {error}"
            ) from error

    def read(self, key: str, rank: int) -> str:
        """Wait until `rank` has written `key` to the store, and return the value.

        Raises:
            MeetingTimeoutError: the rank did not write it within the timeout.
            PeerError: the rank failed or ended, or the store cannot be reached.
            DisagreementError: the rank refused this call, or waits in another.
        """
        deadline, pause = time.monotonic() + self.timeout, 1e-4
        with long_wait(self.errors) as wait:
            while True:
                try:
                    text = self.texts.get(key, self._until(deadline))
                    if text is not None:
                        return text
                except dist.DistError as error:
                    raise PeerError(
                        f"the store is gone (its rank died?); rank {self.rank} was waiting for rank {rank} in "
                        f"{self.calls.current}: {error}"
                    ) from error
                if time.monotonic() > deadline:
                    raise self.errors.timed_out(rank, why=f": it wrote no {key}")
                wait.poll([rank])
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def read_each(self, keys: Mapping[int, str]) -> list[str]:
        """`read` a key of each of several ranks; those that are written in one request.

        Raises:
            MeetingTimeoutError, PeerError, DisagreementError: as `read`.
        """
        texts: list[str] = []
        for rank, key in keys.items():
            if written := self.texts.get_all(list(keys.values())[len(texts) :]):
                return texts + written
            texts.append(self.read(key, rank))  # once it is there, the others may be as well
        return texts

    def _until(self, deadline: float) -> float:
        """The seconds that the store may take: those left, and enough for an answer if none are left."""
        return max(deadline - time.monotonic(), self.texts.longest_answer)


def _compare_settings(rank: int, here: dict[str, str], peer: int, there: dict[str, str]) -> None:
    for name in here:
        if here[name] != there.get(name):
            raise DisagreementError(
                f"{name}: {here[name]} on rank {rank}, {there.get(name)} on rank {peer}; allowed: the same on all ranks"
            )
