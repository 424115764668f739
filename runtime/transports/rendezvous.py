"""What ranks tell each other through the process group's store: their settings, what they wait in, refusals, failures.

While calls go well, nothing is written or read but when ranks meet for the first time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist

from ...errors import DisagreementError, MeetingTimeoutError, PeerError

logger = logging.getLogger(__name__)

Ranks = tuple[int, ...]

FIRST_LOOK = 0.1
"""Seconds of a wait after which a rank writes what it waits in, and reads what its peers wait in."""
WARN_AFTER = 30.0
"""Seconds of a wait after which a rank warns, once."""
_LONGEST_PAUSE = 2.0
_LONGEST_WORDS, _KEPT_REFUSALS = 2000, 8  # characters of a refusal that are kept, and how many of one group of ranks
_SALT, _SALTS = 0x9E3779B97F4A, 1 << 62  # the lower 16 bits of a fingerprint number the meetings of a call
_WORDS_WITHIN = 2.0  # seconds that an error waits for the peer's own words

settings: dict[str, Callable[[], str]] = {}
"""What has to be alike on all ranks, by what a user calls it; modules add theirs."""
remarks: dict[str, Callable[[], str]] = {}
"""What is told of a rank that is waited for, and may differ."""


class CallRecord(NamedTuple):
    """A call that ranks make together.

    Attributes:
        ranks: those that make it in step, ascending.
        number: which of these ranks' calls it is, from 1 on.
        fingerprint: differs for different requests; 0 where it is not known yet.
        words: the request, for errors; or what makes them.
    """

    ranks: Ranks
    number: int
    fingerprint: int
    words: str | Callable[[], str]

    @property
    def spoken(self) -> str:
        return self.words if isinstance(self.words, str) else " ".join(self.words().split())

    def __str__(self) -> str:
        return f"call {self.number} of ranks {self.ranks}: {self.spoken}"


_new_tuple: Callable[[type[CallRecord], tuple], CallRecord] = tuple.__new__


class _Sequence:
    """The calls that some ranks make in step.

    Attributes:
        number: how many there were.
        name: what the ranks agreed on when they met (`Rendezvous.meet`); None before.
        salt: is mixed into the fingerprints of calls; 0 until this rank refuses arguments before it is known whose call
            it is (`Rendezvous.refuse_within`).
    """

    __slots__ = ("name", "number", "salt")

    def __init__(self, salt: int) -> None:
        self.number, self.name, self.salt = 0, None, salt  # type: int, str | None, int


class Rendezvous:
    """One for each process and default process group; all transports share it.

    Args:
        timeout: seconds that any wait may take.
        is_gone: whether the process of a rank is known to have ended.

    Attributes:
        call: what this rank is doing, or did last.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: float, is_gone: Callable[[int], bool]) -> None:
        self.store, self.rank, self.timeout, self._is_gone = store, rank, timeout, is_gone
        self.call = CallRecord((), 0, 0, "nothing yet")
        self._sequences: dict[Ranks, _Sequence] = {}
        self._word = secrets.token_hex(8)  # a store may still have what earlier groups wrote
        self._words: dict[int, str] = {}  # of peers that this rank has met
        self._refusals: dict[str, dict[int, str]] = {}
        self._refused_within: dict[Ranks, list[str]] = {}
        self._failed = self._spoke = False
        self._told = ""
        for kind in ("failed", "waiting", "refused"):
            self._forget(kind)
        self.tell_settings()

    def begin(self, ranks: Ranks, fingerprint: int, words: str | Callable[[], str]) -> int:
        """This rank makes the next call of `ranks`, which meet if they have not yet.

        Returns:
            The fingerprint that ranks compare: the one given, or another once a call was refused (`refuse_within`).

        Raises:
            DisagreementError, MeetingTimeoutError, PeerError: as `meet`.
        """
        sequence = self._sequences.get(ranks) or self._sequence(ranks)
        number = sequence.number = sequence.number + 1
        fingerprint ^= sequence.salt
        self.call = _new_tuple(CallRecord, (ranks, number, fingerprint, words))  # its own constructor is dearer
        if sequence.name is None:
            self.meet(ranks)
        return fingerprint

    @contextmanager
    def making_ready(self, ranks: Ranks, words: Callable[[], str]) -> Iterator[None]:
        """In this block the next call of `ranks` is made ready, for which they may have to wait for each other."""
        before = self.call
        self.call = CallRecord(ranks, self._number_of(ranks) + 1, 0, words)
        try:
            yield
        finally:
            self.call = before

    def refuse(self, ranks: Ranks, words: str) -> None:
        """This rank does not make the next call of `ranks`, because its arguments are wrong; wait for nobody."""
        if len(ranks) < 2:
            return
        sequence = self._sequence(ranks)
        sequence.number += 1
        refused = self._refusals.setdefault(_text(ranks), {})
        refused[sequence.number] = words[:_LONGEST_WORDS]
        if len(refused) > _KEPT_REFUSALS:
            del refused[next(iter(refused))]
        self._write_refusals()

    def refuse_within(self, ranks: Ranks, words: str) -> None:
        """This rank does not make a call of `ranks` or of some of them, because its arguments are wrong, so that nobody
        can say of which; wait for nobody.

        Their next calls have other fingerprints here from now on: ranks that refuse alike go on, and one that refuses
        alone is not taken for one that made the call.
        """
        if self.rank not in ranks:
            return
        self._refused_within.setdefault(ranks, []).append(words[:_LONGEST_WORDS])
        for of, sequence in self._sequences.items():
            sequence.salt = self._salt(of)
        self._write_refusals()

    def _salt(self, ranks: Ranks) -> int:
        number = sum(len(said) for within, said in self._refused_within.items() if set(ranks) <= set(within))
        return (number * _SALT << 16) % _SALTS

    def _write_refusals(self) -> None:
        within = [[ranks, len(said), said[-1]] for ranks, said in self._refused_within.items()]
        with suppress(RuntimeError):  # the store went with its rank, or keeps nothing
            self.store.set(self._key("refused", self.rank), json.dumps([self._word, self._refusals, within]))

    def meet(self, ranks: Ranks) -> str:
        """A name that `ranks` agree on, which nobody has used before. The first time all of them call, and their
        settings are compared.

        Each rank writes a word of its own and which words of the others it has read. Who finds its own word in what a
        peer wrote knows that it is not left over from an earlier group.

        Raises:
            DisagreementError: a setting differs; the text names it and both values.
            MeetingTimeoutError, PeerError: a rank did not come.
        """
        sequence = self._sequence(ranks)
        if sequence.name is None:
            sequence.name = self._met(ranks) if len(ranks) > 1 else self._word
        return sequence.name

    def _sequence(self, ranks: Ranks) -> _Sequence:
        found = self._sequences.get(ranks)
        if found is None:
            found = self._sequences[ranks] = _Sequence(self._salt(ranks))
        return found

    def _number_of(self, ranks: Ranks) -> int:
        found = self._sequences.get(ranks)
        return 0 if found is None else found.number

    def _met(self, ranks: Ranks) -> str:
        here, written = {name: read() for name, read in settings.items()}, ""
        seen: dict[int, str] = {}
        told: dict[int, dict[str, str]] = {}
        deadline, pause = time.monotonic() + self.timeout, 1e-4
        peers = [rank for rank in ranks if rank != self.rank]
        while True:
            text = json.dumps([self._word, seen, here])
            if text != written:
                self.store.set(f"meet/{_text(ranks)}/{self.rank}", text)
                written = text
            late = None
            for peer in peers:
                word, theirs, told[peer] = json.loads(self.read(f"meet/{_text(ranks)}/{peer}", peer))
                seen[peer] = word
                if theirs.get(str(self.rank)) != self._word:
                    late = peer
            if late is None and written == json.dumps([self._word, seen, here]):
                break
            if late is not None and time.monotonic() > deadline:
                raise self.late(late)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._words |= seen
        for peer in peers:
            _compare(self.rank, here, peer, told[peer])
        words = " ".join(self._word if rank == self.rank else seen[rank] for rank in ranks)
        return hashlib.blake2b(words.encode(), digest_size=12).hexdigest()

    def tell_settings(self) -> None:
        """Write this rank's settings, for warnings of ranks that wait for it."""
        text = json.dumps({name: read() for name, read in (settings | remarks).items()})
        if text != self._told:
            self._told = text
            with suppress(RuntimeError):
                self.store.set(self._key("settings", self.rank), text)

    def read(self, key: str, rank: int) -> str:
        """What `rank` writes to the store under `key`, once it has.

        Raises:
            MeetingTimeoutError: there was nothing within the timeout.
            PeerError: the rank failed or ended, or the store cannot be reached any more.
            DisagreementError: the rank refused this call, or waits in another.
        """
        began, pause = time.monotonic(), 1e-4
        with self.waiting() as wait:
            while True:
                try:
                    if self.store.check([key]):
                        return self.store.get(key).decode()
                except dist.DistError as error:
                    raise PeerError(
                        f"the store is gone (its rank died?) while waiting for rank {rank}: {error}"
                    ) from error
                if time.monotonic() > began + self.timeout:
                    raise self.late(rank, why=f": it wrote no {key}")
                wait.look([rank])
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    @contextmanager
    def waiting(self) -> Iterator[LongWait]:
        """Around a wait for peers: what is called now and then while it lasts."""
        wait = LongWait(self)
        try:
            yield wait
            wait.over()
        except DisagreementError:
            raise  # what is written stays for peers, who want its words
        except BaseException:
            wait.over()
            raise

    def late(self, *ranks: int, why: str = "") -> MeetingTimeoutError:
        """Of ranks, one of which did not come: those that do not wait in the same call."""
        absent = list(ranks)
        if len(ranks) > 1:
            with suppress(dist.DistError):
                waiting = {rank: self.waits_in(rank) for rank in ranks}
                absent = [r for r, found in waiting.items() if found is None or found[0][:3] != self.call[:3]]
        who = " or ".join(f"rank {rank}" for rank in absent or ranks)
        return MeetingTimeoutError(
            f"{who} did not come within {self.timeout:g} s; rank {self.rank} was waiting for it in {self.call}{why}"
        )

    def fail(self, text: str) -> None:
        """This rank makes no more calls; what it was doing stays written, for errors of peers. The first text stays."""
        if self._failed:
            return
        self._failed = self._spoke = True
        self.write_waiting(0)
        with suppress(dist.DistError):
            self.store.set(self._key("failed", self.rank), text)

    def failure(self, rank: int) -> str | None:
        """What a rank wrote when it failed; None if it did not."""
        return self._get("failed", rank)

    def disagreement(self, peer: int, has_refused: bool = False) -> DisagreementError:
        """Why this rank's call is not what a peer is doing, in the words of both; waits a little for the peer's.

        Args:
            has_refused: the peer is known to have refused the call.
        """
        if has_refused:
            return self.refused(peer) or DisagreementError(
                f"rank {peer} refused its arguments, see the error there; rank {self.rank} was waiting for it in "
                f"{self.call}"
            )
        self._spoke = True
        self.write_waiting(0)
        deadline = time.monotonic() + _WORDS_WITHIN
        theirs: str | None = None
        with suppress(dist.DistError):
            while theirs is None and time.monotonic() < deadline:
                if refused := self.refused(peer):
                    return refused
                if (found := self.waits_in(peer)) is not None:
                    theirs = str(found[0])
                else:
                    time.sleep(0.005)
        return self._differs(peer, theirs or "something else, of which it wrote nothing")

    def _differs(self, peer: int, theirs: str) -> DisagreementError:
        alike = ""
        if said := [said[-1] for within, said in self._refused_within.items() if peer in within]:
            alike = f"; rank {self.rank} refused its arguments in an earlier call: {said[-1]}"
        elif theirs == str(self.call):
            alike = "; the same arguments by another plan: their topologies, settings or versions differ"
        return DisagreementError(
            f"rank {self.rank} and rank {peer} asked for different things: rank {self.rank} is in {self.call}; "
            f"rank {peer} is in {theirs}{alike}; no tensor of yours was written"
        )

    def refused(self, peer: int) -> DisagreementError | None:
        """An error if a peer refused the call that this rank is in."""
        text = self._get("refused", peer)
        if text is None:
            return None
        word, refusals, within = json.loads(text)
        if word != self._words.get(peer, word):
            return None
        words = refusals.get(_text(self.call.ranks), {}).get(str(self.call.number))
        where = "" if words is None else f"in call {self.call.number} of ranks {self.call.ranks}"
        for ranks, times, said in within:
            if set(self.call.ranks) <= set(ranks) and times > len(self._refused_within.get(tuple(ranks), ())):
                where, words = f"in a call of ranks of {tuple(ranks)}", said
        if not where:
            return None
        return DisagreementError(
            f"rank {peer} refused its arguments {where}: {words}; rank {self.rank} was waiting for it, with "
            f"{self.call.spoken}"
        )

    def write_waiting(self, looks: int) -> None:
        """Write what this rank is waiting in."""
        counts = {_text(ranks): sequence.number for ranks, sequence in dict(self._sequences).items()}
        with suppress(dist.DistError):
            text = json.dumps([self._word, looks, *self.call[:3], self.call.spoken, counts])
            self.store.set(self._key("waiting", self.rank), text)

    def write_no_more(self) -> None:
        if self._spoke:  # peers want these words for their errors
            return
        self._forget("waiting")

    def waits_in(self, peer: int) -> tuple[CallRecord, int, dict[str, int]] | None:
        """What a peer waits in, how often it wrote so, and its calls so far; None if it wrote nothing."""
        text = self._get("waiting", peer)
        if text is None:
            return None
        word, looks, ranks, number, fingerprint, words, counts = json.loads(text)
        if word != self._words.get(peer, word):
            return None
        return CallRecord(tuple(ranks), number, fingerprint, words), looks, counts

    def misplaced(self, peer: int, seen_before: bool) -> DisagreementError | None:
        """An error if a peer that this rank waits for waits in a call that cannot be followed by this rank's.

        Args:
            seen_before: the peer has been seen to wait in that call. A wait that just ended may still be written.
        """
        found = self.waits_in(peer)
        if found is None:
            return None
        (theirs, _, counts), mine = found, self.call
        if theirs.ranks == mine.ranks:
            # One that is in a later call has done its part of this one: what it refused it tells.
            differs = theirs.fingerprint != mine.fingerprint and theirs.fingerprint and mine.fingerprint
            return self._differs(peer, str(theirs)) if theirs.number == mine.number and differs else None
        each_is_elsewhere = (  # in a call that the other has not made
            self.rank in theirs.ranks
            and theirs.number > self._number_of(theirs.ranks)
            and counts.get(_text(mine.ranks), 0) < mine.number
        )
        return self._differs(peer, str(theirs)) if each_is_elsewhere and seen_before else None

    def why_silent(self, peer: int) -> str:
        """What is known of a peer that lets this rank wait, for a warning."""
        found = self.waits_in(peer)
        if found is not None:
            return f"rank {peer} waits in {found[0]}"
        text = self._get("settings", peer)
        if text is None:
            return f"rank {peer} has not used shardweave in this process group"
        theirs = json.loads(text)
        here = {name: read() for name, read in (settings | remarks).items()}
        differ = [f"{n} is {here[n]} on rank {self.rank} and {theirs.get(n)} on rank {peer}" for n in here
                  if theirs.get(n) != here[n]]  # fmt: skip
        return "; ".join(differ) or f"rank {peer} has the same settings and waits nowhere"

    def has_ended(self, rank: int) -> PeerError | None:
        """An error if a rank has failed, or its process is known to have ended."""
        failure = self.failure(rank)
        if failure is not None:
            return PeerError(f"rank {self.rank} was waiting for rank {rank}: {failure}")
        if self._is_gone(rank):
            return PeerError(f"rank {rank} is gone; rank {self.rank} was waiting for it in {self.call}")
        return None

    def _get(self, kind: str, rank: int) -> str | None:
        key = self._key(kind, rank)
        text = self.store.get(key).decode() if self.store.check([key]) else ""
        return text or None

    def _forget(self, kind: str) -> None:
        # Not `delete_key`: a peer that has found the key would wait for it to come back, or read nothing.
        with suppress(RuntimeError):  # a store that keeps nothing, as that of a fake group
            self.store.set(self._key(kind, self.rank), "")

    @staticmethod
    def _key(kind: str, rank: int) -> str:
        return f"{kind}/{rank}"


class LongWait:
    """A wait for peers, which writes and reads nothing before it has lasted for `FIRST_LOOK`."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._of, self._began, self._looks = rendezvous, time.monotonic(), 0
        self._pause = FIRST_LOOK
        self._next = self._began + FIRST_LOOK
        self._seen: dict[int, tuple[CallRecord, int]] = {}
        self._warned = False

    def look(self, peers: Iterable[int]) -> None:
        """Tell peers what this rank waits in, and find out whether these are on their way; at most every so often.

        Raises:
            DisagreementError: one refused the call, or waits in another, and will not come.
            PeerError: one has failed or ended.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._looks += 1
        try:
            self._of.write_waiting(self._looks)
            for peer in peers:
                self._look_at(peer)
            if not self._warned and now - self._began > WARN_AFTER:
                self._warned = True
                self._warn(sorted(peers), now - self._began)
        except dist.DistError:
            pass  # the store went with its rank: the wait itself will end
        self._next = time.monotonic() + self._pause

    def _look_at(self, peer: int) -> None:
        of = self._of
        if error := of.refused(peer) or of.misplaced(peer, self._keeps_waiting(peer)) or of.has_ended(peer):
            raise error

    def _keeps_waiting(self, peer: int) -> bool:
        """Whether a peer has gone on waiting in one call since the last look."""
        found = self._of.waits_in(peer)
        if found is None:
            self._seen.pop(peer, None)
            return False
        call, looks, _ = found
        before = self._seen.get(peer)
        if before is None or before[0] != call:
            self._seen[peer] = call, looks
            return False
        return looks > before[1]

    def _warn(self, peers: Sequence[int], seconds: float) -> None:
        about = "; ".join(self._of.why_silent(peer) for peer in peers)
        logger.warning(
            f"rank {self._of.rank} has waited {seconds:.0f} s for ranks {list(peers)} in {self._of.call}. {about}. Do "
            f"all ranks make this call, and have all of them called shardweave.install() and adapt_fsdp() alike?"
        )

    def over(self) -> None:
        """The wait has ended."""
        if self._looks:
            self._of.write_no_more()


def _compare(rank: int, here: dict[str, str], peer: int, there: dict[str, str]) -> None:
    for name in here:
        if here[name] != there.get(name):
            raise DisagreementError(
                f"{name}: {here[name]} on rank {rank}, {there.get(name)} on rank {peer}; allowed: the same on all ranks"
            )


def _text(ranks: Iterable[int]) -> str:
    return ",".join(map(str, ranks))
