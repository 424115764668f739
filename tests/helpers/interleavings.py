"""Runs ranks of plain Python code in every order of their accesses to shared memory.

A rank's code is not changed: it runs from its start on memory whose accesses are answered with what it saw so far, up
to the first access that has no answer yet. There it is stopped by an exception, whose frames give its state: where it
is, and its variables. Equal states of all ranks and of the memory are visited once. So a value that decides what the
rank does next has to be in a variable, not in a comprehension under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

Address = Hashable
_PLAIN = (int, str, bool, type(None))


class _Stop(BaseException):
    """At an access that has no answer yet."""

    def __init__(self, access: tuple[Any, ...]) -> None:
        self.access = access


class Memory:
    """What one rank sees of the shared memory, and of chance.

    Attributes:
        private: objects of the rank that outlive a call; their `repr` is a part of its state.
    """

    def __init__(self, history: Sequence[Any]) -> None:
        self._answers = iter(history)
        self.private: list[Any] = []

    def _answer(self, *access: Any) -> Any:
        for answer in self._answers:
            return answer
        raise _Stop(access)

    def load(self, address: Address) -> int:
        return self._answer("load", address)

    def store(self, address: Address, value: int) -> None:
        self._answer("store", address, value)

    def add(self, address: Address, value: int) -> int:
        """Atomically; returns the value before."""
        return self._answer("add", address, value)

    def swap(self, address: Address, old: int, new: int) -> int:
        """Atomically store `new` if the value is `old`; returns the value before."""
        return self._answer("swap", address, old, new)

    def choose(self) -> bool:
        """Either."""
        return self._answer("choose")


@dataclass
class _State:
    """Of one rank: how to come there, and what it does next. A rank that has ended has no access."""

    history: tuple[Any, ...]
    access: tuple[Any, ...] | None
    value: Any = None


@dataclass
class Found:
    """The outcome of all orders.

    Attributes:
        states: how many there were.
        ends: the values that the ranks returned, together.
        errors: texts of the assertions that failed.
        stuck: states from which not all ranks can end.
    """

    states: int = 0
    ends: set[tuple[Any, ...]] = field(default_factory=set)
    errors: set[str] = field(default_factory=set)
    stuck: int = 0


class _Rank:
    def __init__(self, code: Callable[[Memory], Any]) -> None:
        self._code = code
        self._known: dict[Hashable, int] = {}
        self._next: dict[tuple[int, Any], int] = {}
        self.states: list[_State] = []
        self.first = self._run(())

    def after(self, state: int, answer: Any) -> int:
        """The state after an answer to the access of a state."""
        following = self._next.get((state, answer))
        if following is None:
            following = self._next[state, answer] = self._run((*self.states[state].history, answer))
        return following

    def _run(self, history: tuple[Any, ...]) -> int:
        memory = Memory(history)
        try:
            value = self._code(memory)
            state, key = _State(history, None, value), ("ended", repr(value))
        except AssertionError as error:
            state = _State(history, None, error)
            key = ("error", str(error))
        except _Stop as stop:
            state, frames, trace = _State(history, stop.access), [], stop.__traceback__
            trace = trace.tb_next if trace else None  # not this function, which has the history
            while trace is not None:
                frames.append((trace.tb_frame.f_code, trace.tb_lasti, _plain(trace.tb_frame.f_locals)))
                trace = trace.tb_next
            key = (repr(memory.private), str(stop.access), *frames)  # type: ignore[assignment]
        number = self._known.setdefault(key, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number


def _plain(variables: dict[str, Any]) -> tuple[Any, ...]:
    """The variables that are numbers, texts, or sequences of them."""
    kept = []
    for name, value in variables.items():
        if isinstance(value, _PLAIN):
            kept.append((name, value))
        elif isinstance(value, list | tuple) and all(isinstance(item, (*_PLAIN, tuple)) for item in value):
            kept.append((name, str(value)))
    return tuple(kept)


def explore(codes: Sequence[Callable[[Memory], Any]], addresses: Sequence[Address], deaths: int = 0,
            most: int = 2 * 10**6) -> Found:  # fmt: skip
    """Run the ranks in every order.

    Args:
        codes: of the ranks; each is deterministic but for what it loads and chooses.
        addresses: of the memory, which is zero.
        deaths: ranks that may stop for good, anywhere. Who remains has to end.
        most: states, after which the search fails.
    """
    at = {address: i for i, address in enumerate(addresses)}
    ranks = [_Rank(code) for code in codes]
    # The states of the ranks (-1: dead), then the memory.
    start = (*(rank.first for rank in ranks), *(0 for _ in at))
    number, size = {start: 0}, len(ranks)
    before: list[list[int]] = [[]]
    queue, ended, found = deque([start]), [], Found()
    while queue:
        state = queue.popleft()
        here, goes_on = number[state], False
        following: list[tuple[int, ...]] = []
        for r, rank in enumerate(ranks):
            if state[r] < 0:
                continue
            mine = rank.states[state[r]]
            if mine.access is None:
                continue
            goes_on = True
            kind, *rest = mine.access
            if kind == "load":
                answers: list[tuple[Any, tuple[int, ...]]] = [(state[size + at[rest[0]]], state)]
            elif kind == "store":
                word = size + at[rest[0]]
                answers = [(None, (*state[:word], rest[1], *state[word + 1 :]))]
            elif kind in ("add", "swap"):
                word = size + at[rest[0]]
                was = state[word]
                new = was + rest[1] if kind == "add" else rest[2] if was == rest[1] else was
                answers = [(was, (*state[:word], new, *state[word + 1 :]))]
            else:
                answers = [(True, state), (False, state)]
            for answer, (*changed,) in answers:
                changed[r] = rank.after(state[r], answer)
                following.append(tuple(changed))
            if deaths > sum(s < 0 for s in state[:size]):
                following.append((*state[:r], -1, *state[r + 1 :]))
        if not goes_on:
            ended.append(here)
            values = [None if s < 0 else rank.states[s].value for s, rank in zip(state, ranks, strict=False)]
            found.errors |= {str(value) for value in values if isinstance(value, AssertionError)}
            found.ends.add(tuple("error" if isinstance(value, AssertionError) else value for value in values))
        for one in following:
            there = number.setdefault(one, len(number))
            if there == len(before):
                before.append([])
                queue.append(one)
                if len(number) > most:
                    raise RuntimeError(f"more than {most} states")
            before[there].append(here)
    reaching, waiting = set(ended), list(ended)
    while waiting:
        for one in before[waiting.pop()]:
            if one not in reaching:
                reaching.add(one)
                waiting.append(one)
    found.states, found.stuck = len(number), len(number) - len(reaching)
    return found
