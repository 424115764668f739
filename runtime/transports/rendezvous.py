"""Coordination through the process group's store: first rendezvous, settings, refused calls, long waits, failures.

As long as calls succeed without long waits, the store is used only when ranks first communicate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import DisagreementError, MeetingTimeoutError, PeerError, TransportError, shown
from .. import flight_recorder
from ..bounded_store import BoundedStore
from .background_calls import BackgroundCalls
from .call_lock import CallLock

_logger = logging.getLogger(__name__)

Ranks = tuple[int, ...]

FIRST_POLL = 0.1
"""Seconds of a wait after which a rank writes the call that it waits in, and reads those of its peers."""
WARN_AFTER = 30.0
"""Seconds of a wait after which a rank warns, once."""
_LONGEST_PAUSE = 2.0
_MAX_MESSAGE, _KEPT_REFUSALS = 2000, 8  # characters of a refusal that are kept; refusals per group of ranks
_SALT, _SALTS = 0x9E3779B97F4A, 1 << 62  # the lower 16 bits of a fingerprint number the exchanges of a call
_PEER_GRACE = 2.0  # seconds that an error waits for the description of the peer's call
_CAUSE_GRACE = 0.25  # seconds that an error waits for what a late peer was waiting for
_LONGEST_ANSWER = 5.0  # seconds that a wait or an error, which does without, waits for the store

settings: dict[str, Callable[[], str]] = {}
"""Functions that return settings which must be equal on all ranks, by the name that users know. Modules add theirs."""
remarks: dict[str, Callable[[], str]] = {}
"""Functions that return further settings, which may differ, for warnings about a rank that is waited for."""


class CallRecord(NamedTuple):
    """A call that ranks make together.

    Attributes:
        ranks: the participants, ascending.
        number: counts the calls of these ranks, from 1 on.
        fingerprint: differs for different requests; 0 if it is not known yet.
        description: the request for errors, as text or as a function that returns it.
    """

    ranks: Ranks
    number: int
    fingerprint: int
    description: str | Callable[[], str]

    @property
    def text(self) -> str:
        if isinstance(self.description, str):
            return self.description
        return " ".join(self.description().split())

    def __str__(self) -> str:
        return f"call {self.number} of ranks {self.ranks}: {self.text}"


_new_tuple: Callable[[type[CallRecord], tuple], CallRecord] = tuple.__new__


class _Sequence:
    """The sequence of calls of a group of ranks.

    Attributes:
        number: of the last call.
        session: the name that the ranks agreed on (`Rendezvous.session`); None before that.
        salt: mixed into the fingerprints of calls; 0 until this rank refuses arguments before the participants of the
            call are known (`Rendezvous.refuse_within`).
    """

    __slots__ = ("number", "salt", "session")

    def __init__(self, salt: int) -> None:
        self.number, self.session, self.salt = 0, None, salt  # type: int, str | None, int


class Rendezvous:
    """The state of calls that a rank shares with its peers through the store: agreement on settings and sessions when
    ranks first communicate, the sequence number of each call, refusals, failures, and the call that a rank waits in.

    There is one per default process group, used by all transports.

    Args:
        timeout: seconds that a wait may take.
        is_gone: returns whether the process of a rank is known to have ended.

    Attributes:
        call: the current or last call of this rank.
        bounded_store: the store, which answers in time or raises.
        sessions: the names of the sessions that this rank has agreed on with others.
        lock: held by the thread that is in a call, or binds one.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: float, is_gone: Callable[[int], bool]) -> None:
        self.rank, self.timeout, self._is_gone = rank, timeout, is_gone
        self.bounded_store = BoundedStore(store)
        self.call = CallRecord((), 0, 0, "nothing yet")
        self.sessions: set[str] = set()
        this = weakref.ref(self)
        self.lock = CallLock(rank, timeout, lambda: getattr(this(), "call", "an earlier process group"))
        self._sequences: dict[Ranks, _Sequence] = {}
        self._nonce = secrets.token_hex(8)  # tells apart what earlier groups left in the store
        self._nonces: dict[int, str] = {}  # of peers, known after the first rendezvous
        self._refusals: dict[str, dict[int, str]] = {}
        self._refused_within: dict[Ranks, list[str]] = {}
        self._failed = self._is_evidence = False
        self._published = ""
        for kind in ("failed", "waiting", "refused"):
            self._clear(kind, timeout)
        self.publish_settings()

    @cached_property
    def background(self) -> BackgroundCalls:
        """Makes calls on a thread of its own."""
        return BackgroundCalls(self.lock)

    def begin(self, ranks: Ranks, fingerprint: int, description: str | Callable[[], str]) -> int:
        """Begin the next call of `ranks`; before the first one, they agree on a session.

        Returns:
            The fingerprint for the exchanges: the argument, changed after refusals (`refuse_within`).

        Raises:
            DisagreementError, MeetingTimeoutError, PeerError: as `session`.
        """
        sequence = self._sequences.get(ranks) or self._sequence(ranks)
        number = sequence.number = sequence.number + 1
        fingerprint ^= sequence.salt
        self.call = _new_tuple(CallRecord, (ranks, number, fingerprint, description))  # faster than the constructor
        if flight_recorder.current is not None:
            flight_recorder.current.begin(self.call)
        if sequence.session is None:
            self.session(ranks)
        return fingerprint

    @contextmanager
    def making_ready(self, ranks: Ranks, description: str | Callable[[], str]) -> Iterator[None]:
        """A context in which the next call of `ranks` is prepared, where ranks may wait for each other."""
        before = self.call
        self.call = self.next_call(ranks, description)
        recorder = flight_recorder.current
        try:
            with nullcontext() if recorder is None else recorder.attempt(self.call):
                yield
        finally:
            self.call = before

    def next_call(self, ranks: Ranks, description: str | Callable[[], str]) -> CallRecord:
        """The next call of `ranks`, which has not begun."""
        return CallRecord(ranks, self._number_of(ranks) + 1, 0, description)

    def refuse(self, ranks: Ranks, message: str) -> None:
        """Record that this rank does not make the next call of `ranks`, because of invalid arguments. Does not wait."""
        if len(ranks) < 2:
            return
        sequence = self._sequence(ranks)
        sequence.number += 1
        refusals = self._refusals.setdefault(_key_of(ranks), {})
        refusals[sequence.number] = message[:_MAX_MESSAGE]
        if len(refusals) > _KEPT_REFUSALS:
            del refusals[next(iter(refusals))]
        self._write_refusals()

    def refuse_within(self, ranks: Ranks, message: str) -> None:
        """Record that this rank does not make a call of some of `ranks`, because its arguments were invalid before the
        participants were known. Does not wait.

        From now on this changes the fingerprints of all calls of these ranks. Ranks that refuse the same call can
        continue; a rank that refuses alone disagrees with its peers in the next call.
        """
        if self.rank not in ranks:
            return
        self._refused_within.setdefault(ranks, []).append(message[:_MAX_MESSAGE])
        for members, sequence in self._sequences.items():
            sequence.salt = self._salt(members)
        self._write_refusals()

    def _salt(self, ranks: Ranks) -> int:
        number = sum(len(messages) for within, messages in self._refused_within.items() if set(ranks) <= set(within))
        return (number * _SALT << 16) % _SALTS

    def _write_refusals(self) -> None:
        within = [[ranks, len(messages), messages[-1]] for ranks, messages in self._refused_within.items()]
        with suppress(RuntimeError):  # the rank that hosts the store is gone, or the store keeps nothing
            self._set("refused", json.dumps([self._nonce, self._refusals, within]))

    def session(self, ranks: Ranks) -> str:
        """A unique name for this group of ranks. The first time, all of them call, and their settings are compared.

        Each rank writes a random nonce and the nonces that it has read from the others. A rank that finds its own nonce
        in the text of a peer knows that this text is not left over from an earlier group.

        Raises:
            DisagreementError: a setting differs; the text names it and both values.
            MeetingTimeoutError, PeerError: a rank did not arrive.
        """
        sequence = self._sequence(ranks)
        if sequence.session is None:
            sequence.session = self._new_session(ranks) if len(ranks) > 1 else self._nonce
            if len(ranks) > 1:
                self.sessions.add(sequence.session)
        return sequence.session

    def has_met(self, ranks: Ranks) -> bool:
        """Whether all of `ranks` have made a call together. True on all of them after that call."""
        sequence = self._sequences.get(ranks)
        return sequence is not None and sequence.session is not None

    def _sequence(self, ranks: Ranks) -> _Sequence:
        sequence = self._sequences.get(ranks)
        if sequence is None:
            sequence = self._sequences[ranks] = _Sequence(self._salt(ranks))
        return sequence

    def _number_of(self, ranks: Ranks) -> int:
        sequence = self._sequences.get(ranks)
        return 0 if sequence is None else sequence.number

    def _new_session(self, ranks: Ranks) -> str:
        own_settings, written = {name: read() for name, read in settings.items()}, ""
        nonces: dict[int, str] = {}
        peer_settings: dict[int, dict[str, str]] = {}
        deadline, pause = time.monotonic() + self.timeout, 1e-4
        peers = [rank for rank in ranks if rank != self.rank]
        wait = LongWait(self)
        while True:
            text = json.dumps([self._nonce, nonces, own_settings])
            if text != written:
                self.write(f"session/{_key_of(ranks)}/{self.rank}", text, self._until(deadline))
                written = text
            missing = None
            for peer in peers:
                text = self.read(f"session/{_key_of(ranks)}/{peer}", peer)
                nonces[peer], seen_by_peer, peer_settings[peer] = _fields(peer, text, 3)
                if seen_by_peer.get(str(self.rank)) != self._nonce:
                    missing = peer
            if missing is None and written == json.dumps([self._nonce, nonces, own_settings]):
                break
            if missing is not None:
                if time.monotonic() > deadline:
                    raise self.timeout_error(missing)
                wait.poll([missing])  # it may have ended since it wrote
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        wait.close()
        self._nonces |= nonces
        for peer in peers:
            _compare_settings(self.rank, own_settings, peer, peer_settings[peer])
        joined = " ".join(self._nonce if rank == self.rank else nonces[rank] for rank in ranks)
        return hashlib.blake2b(joined.encode(), digest_size=12).hexdigest()

    def write(self, key: str, text: str, within: float | None = None) -> None:
        """Write `key` to the store. `within`: seconds to wait for the store; None: the timeout.

        Raises:
            PeerError: the store cannot be reached.
        """
        try:
            self.bounded_store.run(lambda store: store.set(key, text), self.timeout if within is None else within)
        except dist.DistError as error:
            raise PeerError(
                f"the store is gone (its rank died?); rank {self.rank} was in {self.call}: {error}"
            ) from error

    def publish(self, key: str, text: str) -> None:
        """Write `key` to the store. Raises nothing: a rank that cannot reach the store does so when it reads."""
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self.bounded_store.run(lambda store: store.set(key, text), self._longest_answer)

    def publish_settings(self) -> None:
        """Write this rank's settings to the store, for warnings of ranks that wait for it."""
        text = json.dumps({name: read() for name, read in (settings | remarks).items()})
        if text != self._published:
            self._published = text
            with suppress(RuntimeError):
                self._set("settings", text)

    def read(self, key: str, rank: int) -> str:
        """Wait until `rank` has written `key` to the store, and return the value.

        Raises:
            MeetingTimeoutError: the rank did not write it within the timeout.
            PeerError: the rank failed or ended, or the store cannot be reached.
            DisagreementError: the rank refused this call, or waits in another.
        """
        deadline, pause = time.monotonic() + self.timeout, 1e-4
        with self.waiting() as wait:
            while True:
                try:
                    text = self.bounded_store.run(partial(_read, key), self._until(deadline))
                    if text is not None:
                        return text
                except dist.DistError as error:
                    raise PeerError(
                        f"the store is gone (its rank died?) while waiting for rank {rank}: {error}"
                    ) from error
                if time.monotonic() > deadline:
                    raise self.timeout_error(rank, why=f": it wrote no {key}")
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
            if written := self.read_written(list(keys.values())[len(texts) :]):
                return texts + written
            texts.append(self.read(key, rank))  # once it is there, the others may be as well
        return texts

    def read_written(self, keys: Sequence[str]) -> list[str] | None:
        """The values of several keys in one request; None if one of them is not written yet, or if the store has no
        such requests or does not answer."""
        with suppress(dist.DistError):
            return self.bounded_store.run(partial(_read_all, list(keys)), self.timeout)
        return None

    @contextmanager
    def waiting(self) -> Iterator[LongWait]:
        """A context for a wait for peers; the caller polls the `LongWait` in it."""
        wait = LongWait(self)
        try:
            yield wait
            wait.close()
        except DisagreementError:
            raise  # the description stays in the store, for the errors of peers
        except BaseException:
            wait.close()
            raise

    def timeout_error(self, *ranks: int, why: str = "") -> MeetingTimeoutError:
        """The error after a wait for `ranks` has timed out. It names those that do not wait in the same call."""
        absent = list(ranks)
        if len(ranks) > 1:
            with suppress(dist.DistError):
                waiting = {rank: self.read_waiting(rank) for rank in ranks}
                absent = [r for r, state in waiting.items() if state is None or state[0][:3] != self.call[:3]]
        who = " or ".join(f"rank {rank}" for rank in absent or ranks)
        if len(absent or ranks) == 1:
            why += self.why_late((absent or ranks)[0])
        return MeetingTimeoutError(
            f"{who} did not arrive within {self.timeout:g} s; rank {self.rank} was waiting for it in {self.call}{why}"
        )

    def why_late(self, rank: int) -> str:
        """What a rank that this one waited for has failed of, or waits for itself, and so on to the rank that is the
        cause; empty if nothing is known. Waits briefly for a text: such ranks end their waits at the same time."""
        text, seen = "", {self.rank}
        deadline = time.monotonic() + _CAUSE_GRACE
        with suppress(dist.DistError):
            while rank not in seen:
                if failure := self.failure(rank):
                    return f"{text}; {failure}"
                if awaited := self._awaited_by(rank):
                    seen.add(rank)
                    text += f"; rank {rank} waits for {' and '.join(f'rank {other}' for other in awaited)}"
                    rank = awaited[0]
                elif time.monotonic() > deadline:
                    break
                else:
                    time.sleep(0.01)
        return text

    def fail(self, text: str) -> None:
        """Record that this rank has failed. Its current call and the first text stay in the store, for the errors of
        peers."""
        if self._failed:
            return
        self._failed = self._is_evidence = True
        self.write_waiting(0)
        with suppress(dist.DistError):
            self._set("failed", text)

    def failure(self, rank: int) -> str | None:
        """The text of a rank's `fail`; None if it has not failed."""
        return self._get("failed", rank)

    def disagreement(self, peer: int, has_refused: bool = False) -> DisagreementError:
        """The error after this rank's call turned out to differ from that of a peer, with descriptions of both. Waits
        briefly for that of the peer.

        Args:
            has_refused: the peer is known to have refused the call.
        """
        if has_refused:
            return self.refusal(peer) or DisagreementError(
                f"rank {peer} refused its arguments, see the error there; rank {self.rank} was waiting for it in "
                f"{self.call}"
            )
        self._is_evidence = True
        self.write_waiting(0)
        deadline = time.monotonic() + _PEER_GRACE
        peer_call: str | None = None
        with suppress(dist.DistError):
            while peer_call is None and time.monotonic() < deadline:
                if refusal := self.refusal(peer):
                    return refusal
                if (state := self.read_waiting(peer)) is not None:
                    peer_call = str(state[0])
                else:
                    time.sleep(0.005)
        return self._different_calls(peer, peer_call or "something else, of which it wrote nothing")

    def _different_calls(self, peer: int, peer_call: str) -> DisagreementError:
        note = ""
        if refusals := [messages[-1] for within, messages in self._refused_within.items() if peer in within]:
            note = f"; rank {self.rank} refused its arguments in an earlier call: {refusals[-1]}"
        elif peer_call == str(self.call):
            note = "; the same arguments by another plan: their topologies, settings or versions differ"
        return DisagreementError(
            f"rank {self.rank} and rank {peer} made different requests: rank {self.rank} is in {self.call}; "
            f"rank {peer} is in {peer_call}{note}; no tensor of yours was written"
        )

    def refusal(self, peer: int) -> DisagreementError | None:
        """The error if a peer has refused this rank's call; None if it has not."""
        text = self._get("refused", peer)
        if text is None:
            return None
        nonce, refusals, within = _fields(peer, text, 3)
        if nonce != self._nonces.get(peer, nonce):
            return None
        message = refusals.get(_key_of(self.call.ranks), {}).get(str(self.call.number))
        where = "" if message is None else f"in call {self.call.number} of ranks {self.call.ranks}"
        for ranks, times, last_message in within:
            if set(self.call.ranks) <= set(ranks) and times > len(self._refused_within.get(tuple(ranks), ())):
                where, message = f"in a call of ranks of {tuple(ranks)}", last_message
        if not where:
            return None
        return DisagreementError(
            f"rank {peer} refused its arguments {where}: {message}; rank {self.rank} was waiting for it, with "
            f"{self.call.text}"
        )

    def write_waiting(self, polls: int, peers: Sequence[int] = ()) -> None:
        """Write the call that this rank waits in. `polls`: how often it has done so during this wait; `peers`: the
        ranks that it waits for."""
        counts = {_key_of(ranks): sequence.number for ranks, sequence in dict(self._sequences).items()}
        with suppress(dist.DistError):
            text = json.dumps([self._nonce, polls, *self.call[:3], self.call.text, counts, list(peers)])
            self._set("waiting", text)

    def clear_waiting(self) -> None:
        """Remove what `write_waiting` wrote, unless errors of peers need it."""
        if not self._is_evidence:
            self._clear("waiting")

    def read_waiting(self, peer: int) -> tuple[CallRecord, int, dict[str, int]] | None:
        """The call that a peer waits in, how often it has written so, and the number of its last call by ranks; None if
        it has written nothing."""
        text = self._get("waiting", peer)
        if text is None:
            return None
        nonce, polls, ranks, number, fingerprint, description, counts, _ = _fields(peer, text, 8)
        if nonce != self._nonces.get(peer, nonce):
            return None
        return CallRecord(tuple(ranks), number, fingerprint, description), polls, counts

    def _awaited_by(self, peer: int) -> list[int]:
        """The ranks that a peer waits for; empty if it has written none."""
        text = self._get("waiting", peer)
        nonce, *_, awaited = ("", []) if text is None else _fields(peer, text, 8)
        return awaited if nonce == self._nonces.get(peer, nonce) else []

    def call_mismatch(self, peer: int, seen_before: bool) -> DisagreementError | None:
        """The error if a peer that this rank waits for waits in a call from which it cannot reach this rank's call.

        Args:
            seen_before: the peer was already waiting in that call at the last poll. Otherwise its wait may just have
                ended, with the description still in the store.
        """
        state = self.read_waiting(peer)
        if state is None:
            return None
        (theirs, _, counts), mine = state, self.call
        if theirs.ranks == mine.ranks:
            # A peer in a later call has done its part of this one; its refusals are read by `refusal`.
            differs = theirs.fingerprint != mine.fingerprint and theirs.fingerprint and mine.fingerprint
            return self._different_calls(peer, str(theirs)) if theirs.number == mine.number and differs else None
        is_deadlock = (  # each waits in a call that the other has not made
            self.rank in theirs.ranks
            and theirs.number > self._number_of(theirs.ranks)
            and counts.get(_key_of(mine.ranks), 0) < mine.number
        )
        return self._different_calls(peer, str(theirs)) if is_deadlock and seen_before else None

    def peer_status(self, peer: int) -> str:
        """The known state of a peer that this rank waits for, as text for a warning."""
        state = self.read_waiting(peer)
        if state is not None:
            return f"rank {peer} waits in {state[0]}"
        text = self._get("settings", peer)
        if text is None:
            return f"rank {peer} has not used shardweave in this process group"
        theirs = json.loads(text)
        own = {name: read() for name, read in (settings | remarks).items()}
        differences = [f"{n} is {own[n]} on rank {self.rank} and {theirs.get(n)} on rank {peer}" for n in own
                       if theirs.get(n) != own[n]]  # fmt: skip
        return "; ".join(differences) or f"rank {peer} has the same settings and waits nowhere"

    def peer_error(self, rank: int) -> PeerError | None:
        """The error if a rank has failed, or its process is known to have ended."""
        failure = self.failure(rank)
        if failure is not None:
            return PeerError(f"rank {self.rank} was waiting for rank {rank}: {failure}")
        if self._is_gone(rank):
            return PeerError(f"rank {rank} is gone; rank {self.rank} was waiting for it in {self.call}")
        return None

    def _get(self, kind: str, rank: int) -> str | None:
        return self.bounded_store.run(partial(_read, self._key(kind, rank)), self._longest_answer) or None

    def _set(self, kind: str, text: str, within: float | None = None) -> None:
        """Write a text of this rank. `within`: seconds to wait for the store.

        Raises:
            RuntimeError: the store cannot be reached (dist.DistError), or keeps nothing.
        """
        key = self._key(kind, self.rank)
        self.bounded_store.run(lambda store: store.set(key, text), within or self._longest_answer)

    def _until(self, deadline: float) -> float:
        """The seconds that the store may take: those left, and enough for an answer if none are left."""
        return max(deadline - time.monotonic(), self._longest_answer)

    @property
    def _longest_answer(self) -> float:
        return min(_LONGEST_ANSWER, self.timeout / 4)

    def _clear(self, kind: str, within: float | None = None) -> None:
        # Not `delete_key`: a peer that has just checked the key would wait until it exists again.
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self._set(kind, "", within)

    @staticmethod
    def _key(kind: str, rank: int) -> str:
        return f"{kind}/{rank}"


class LongWait:
    """A wait for peers. It uses the store only after it has lasted for `FIRST_POLL` seconds."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._start, self._polls = rendezvous, time.monotonic(), 0
        self._pause = FIRST_POLL
        self._next = self._start + FIRST_POLL
        self._seen: dict[int, tuple[CallRecord, int]] = {}
        self._warned = False

    def poll(self, peers: Iterable[int]) -> None:
        """Write the call that this rank waits in, and check these peers, if enough time has passed since the last time.

        Raises:
            DisagreementError: a peer refused the call, or waits in another.
            PeerError: a peer has failed or ended.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._polls += 1
        peers = list(peers)
        try:
            self._rendezvous.write_waiting(self._polls, peers)
            for peer in peers:
                self._check(peer)
            if not self._warned and now - self._start > WARN_AFTER:
                self._warned = True
                self._warn(sorted(peers), now - self._start)
        except dist.DistError:
            pass  # the rank that hosts the store is gone: the wait itself will end
        self._next = time.monotonic() + self._pause

    def _check(self, peer: int) -> None:
        rendezvous = self._rendezvous
        error = (
            rendezvous.refusal(peer)
            or rendezvous.call_mismatch(peer, self._is_still_waiting(peer))
            or rendezvous.peer_error(peer)
        )
        if error:
            raise error

    def _is_still_waiting(self, peer: int) -> bool:
        """Whether a peer has been waiting in the same call since the last poll."""
        state = self._rendezvous.read_waiting(peer)
        if state is None:
            self._seen.pop(peer, None)
            return False
        call, polls, _ = state
        before = self._seen.get(peer)
        if before is None or before[0] != call:
            self._seen[peer] = call, polls
            return False
        return polls > before[1]

    def _warn(self, peers: Sequence[int], seconds: float) -> None:
        statuses = "; ".join(self._rendezvous.peer_status(peer) for peer in peers)
        _logger.warning(
            f"rank {self._rendezvous.rank} has waited {seconds:.0f} s for ranks {list(peers)} in "
            f"{self._rendezvous.call}. {statuses}. Do all ranks make this call, and have all of them called "
            "shardweave.install() and adapt_fsdp() alike?"
        )

    def close(self) -> None:
        """The wait is over."""
        if self._polls:
            self._rendezvous.clear_waiting()


def _compare_settings(rank: int, here: dict[str, str], peer: int, there: dict[str, str]) -> None:
    for name in here:
        if here[name] != there.get(name):
            raise DisagreementError(
                f"{name}: {here[name]} on rank {rank}, {there.get(name)} on rank {peer}; allowed: the same on all ranks"
            )


def _read(key: str, store: dist.Store) -> str | None:
    return store.get(key).decode(errors="replace") if store.check([key]) else None


def _read_all(keys: list[str], store: dist.Store) -> list[str] | None:
    several: Any = store
    if not several.has_extended_api() or not several.check(keys):
        return None
    return [value.decode(errors="replace") for value in several.multi_get(keys)]


def malformed(rank: int, text: str) -> TransportError:
    """The error after reading a text from the store that no rank of this version writes."""
    return TransportError(
        f"rank {rank} wrote {shown(text)} to the store; allowed: what this version of shardweave writes. Do all ranks "
        "run the same version, and does nothing else write there?"
    )


def _fields(rank: int, text: str, number: int) -> list[Any]:
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


def _key_of(ranks: Iterable[int]) -> str:
    return ",".join(map(str, ranks))
