"""The calls that a rank makes with others, numbered by group of ranks, and those that it refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

Ranks = tuple[int, ...]

_MAX_MESSAGE, _KEPT_REFUSALS = 2000, 8  # characters of a refusal that are kept; refusals per group of ranks
_SALT, _SALTS = 0x9E3779B97F4A, 1 << 62  # the lower 16 bits of a fingerprint number the exchanges of a call


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


class CallSequence:
    """The sequence of calls of a group of ranks.

    Attributes:
        number: of the last call.
        session: the name that the ranks agreed on (`Rendezvous.session`); None before that.
        salt: mixed into the fingerprints of calls; 0 until this rank refuses arguments before the participants of the
            call are known (`Calls.refuse_within`).
    """

    __slots__ = ("number", "salt", "session")

    def __init__(self, salt: int) -> None:
        self.number, self.session, self.salt = 0, None, salt  # type: int, str | None, int


class Calls:
    """The calls of one rank.

    Attributes:
        rank: this rank.
        current: the current or last call.
        refused: the messages of refused calls, by `key_of(ranks)` and number of the call.
        told: likewise, of calls that this rank takes part in to tell that it refuses them.
        refused_within: the messages of calls of some of these ranks that were refused before their participants were
            known.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.current = CallRecord((), 0, 0, "nothing yet")
        self.refused: dict[str, dict[int, str]] = {}
        self.told: dict[str, dict[int, str]] = {}
        self.refused_within: dict[Ranks, list[str]] = {}
        self._sequences: dict[Ranks, CallSequence] = {}

    def begin(self, ranks: Ranks, fingerprint: int, description: str | Callable[[], str]) -> CallSequence:
        """Begin the next call of `ranks`, which becomes the current one, with its fingerprint salted."""
        sequence = self._sequences.get(ranks) or self.sequence(ranks)
        number = sequence.number = sequence.number + 1
        call = ranks, number, fingerprint ^ sequence.salt, description
        self.current = _new_tuple(CallRecord, call)  # faster than the constructor
        return sequence

    def next_call(self, ranks: Ranks, description: str | Callable[[], str]) -> CallRecord:
        """The next call of `ranks`, which has not begun."""
        return CallRecord(ranks, self.number_of(ranks) + 1, 0, description)

    def sequence(self, ranks: Ranks) -> CallSequence:
        """The calls of `ranks`."""
        sequence = self._sequences.get(ranks)
        if sequence is None:
            sequence = self._sequences[ranks] = CallSequence(self._salt(ranks))
        return sequence

    def number_of(self, ranks: Ranks) -> int:
        """The number of the last call of `ranks`; 0 before the first one."""
        sequence = self._sequences.get(ranks)
        return 0 if sequence is None else sequence.number

    def numbers(self) -> dict[str, int]:
        """The number of the last call of each group of ranks, by `key_of(ranks)`."""
        return {key_of(ranks): sequence.number for ranks, sequence in dict(self._sequences).items()}

    def has_met(self, ranks: Ranks) -> bool:
        """Whether all of `ranks` have made a call together. True on all of them after that call."""
        sequence = self._sequences.get(ranks)
        return sequence is not None and sequence.session is not None

    def refuse(self, ranks: Ranks, message: str) -> None:
        """Count the next call of `ranks`, which this rank does not make because of invalid arguments."""
        sequence = self.sequence(ranks)
        sequence.number += 1
        _keep(self.refused, ranks, sequence.number, message)

    def tell(self, message: str) -> None:
        """Note that this rank takes part in the current call to tell that it refuses it."""
        _keep(self.told, self.current.ranks, self.current.number, message)

    def refuse_within(self, ranks: Ranks, message: str) -> None:
        """Do not make a call of some of `ranks`, because its arguments were invalid before the participants were known.

        From now on this changes the fingerprints of all calls of these ranks. Ranks that refuse the same call can
        continue; a rank that refuses alone disagrees with its peers in the next call.
        """
        self.refused_within.setdefault(ranks, []).append(message[:_MAX_MESSAGE])
        for members, sequence in self._sequences.items():
            sequence.salt = self._salt(members)

    def _salt(self, ranks: Ranks) -> int:
        number = sum(len(messages) for within, messages in self.refused_within.items() if set(ranks) <= set(within))
        return (number * _SALT << 16) % _SALTS


def _keep(messages: dict[str, dict[int, str]], ranks: Ranks, number: int, message: str) -> None:
    of_ranks = messages.setdefault(key_of(ranks), {})
    of_ranks[number] = message[:_MAX_MESSAGE]
    if len(of_ranks) > _KEPT_REFUSALS:
        del of_ranks[next(iter(of_ranks))]


def key_of(ranks: Iterable[int]) -> str:
    """A group of ranks as part of a key, in the store and in JSON."""
    return ",".join(map(str, ranks))
