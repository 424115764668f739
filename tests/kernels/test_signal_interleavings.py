"""The protocol of windows, in every order of the ranks' accesses: two and three ranks, with timeouts, deaths, failures,
refusals and replays. It runs `Window.signal` and `signal_cpu` themselves.

What holds: a rank that has not failed after its exchange has read what its peers wrote for it, whole; who waits without
a bound gets on; everybody ends where waits are bounded; and where nothing goes wrong nobody fails. Variants of the code
with an error are found wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from interleavings import Found, Memory, explore

from shardweave.kernels.channel import SLOT, pack
from shardweave.runtime.transports.symmetric_memory import window as window_module
from shardweave.runtime.transports.symmetric_memory.window import Window

pytestmark = pytest.mark.plan
signal_module = import_module("shardweave.kernels.signal")  # the package has the function by this name
ARRIVED, RELEASED = 0, 1


class Forever(int):
    """The limit of a wait that does not end."""

    def __radd__(self, other: int) -> int:
        return self

    def __gt__(self, other: int) -> bool:
        return True


class Bounded(Forever):
    """The limit of a wait that may end at any poll."""

    memory: Memory

    def __gt__(self, other: int) -> bool:
        return self.memory.choose()


class Words:
    """Words of a channel in the pad of a rank, of which a slot is written by one peer."""

    def __init__(self, memory: Memory, owner: int, channel: int, first: int = 0) -> None:
        self._memory, self._of, self._first = memory, (owner, channel), first

    def __getitem__(self, index: int) -> int:
        return self._memory.load((*self._of, self._first + index))

    def __setitem__(self, index: int, value: int) -> None:
        self._memory.store((*self._of, self._first + index), value)


class View:
    """A window as one rank sees it."""

    def __init__(self, memory: Memory, rank: int, size: int, bounded: bool) -> None:
        self.memory, self.rank, self.peers = memory, rank, [r for r in range(size) if r != rank]
        self.limit = Bounded(1) if bounded else Forever(1)
        if bounded:
            self.limit.memory = memory  # type: ignore[attr-defined]
        self.failure = SimpleNamespace(error=[0], host_error=[0])
        self.arrived, self.released = self._channel(ARRIVED), self._channel(RELEASED)
        self.window: Any = SimpleNamespace(arrived=self.arrived, released=self.released)
        tables = [channel.words[1] for channel in (self.arrived, self.released)]
        memory.private += [self.failure.error, *tables]

    def _channel(self, which: int) -> Any:
        nothing = [0] * len(self.peers)
        codes = [pack(self.rank, peer, which) for peer in self.peers]
        table = list(nothing), list(nothing), list(nothing), codes
        theirs = [Words(self.memory, p, which, SLOT * (self.rank - (self.rank > p))) for p in self.peers]
        words = Words(self.memory, self.rank, which), table, theirs
        return SimpleNamespace(peers=len(self.peers), words=words, failure=self.failure)

    @property
    def failed(self) -> bool:
        return bool(self.failure.error[0])

    def write(self, owner: int, place: int, value: int) -> None:
        for half in range(2):
            self.memory.store(("data", owner, place, half), value)

    def read(self, owner: int, place: int) -> tuple[int, int]:
        first = self.memory.load(("data", owner, place, 0))
        second = self.memory.load(("data", owner, place, 1))
        return first, second


def addresses(size: int) -> list[Any]:
    pads = [(r, c, i) for r in range(size) for c in (ARRIVED, RELEASED) for i in range(SLOT * (size - 1))]
    return pads + [("data", r, place, half) for r in range(size) for place in range(size) for half in range(2)]


def exchange(view: View, pulls: bool, value: int, fingerprint: int) -> None:
    """One exchange as a step makes it. Later ones follow a failure as well: the host has enqueued them already."""
    Window.signal(view.window, "acquire", fingerprint, view.limit)
    for owner in [view.rank] if pulls else view.peers:
        view.write(owner, view.rank, value)
    Window.signal(view.window, "barrier", fingerprint, view.limit)
    # The kernel that reads; what it writes is overwritten if the rank has failed at its end.
    got: list[tuple[int, int]] = []
    for peer in view.peers:
        got.append(view.read(peer, peer) if pulls else view.read(view.rank, peer))
    Window.signal(view.window, "release", fingerprint, view.limit)
    right = all(halves == (value, value) for halves in got)
    assert view.failed or right, f"rank {view.rank} read other data than that of the exchange, and has not failed"


def exchanges(view: View, pulls: bool, calls: str) -> str:
    """One letter for a call: `a` and `b` are requests, `r` is refused, `f` fails before it begins."""
    for n, call in enumerate(calls, 1):
        if call == "r":
            Window.refuse(view.window)
        elif call == "f":
            view.failure.error[0] = 1
            Window.signal_failure(view.window)
        else:
            exchange(view, pulls, n, {"a": 5, "b": 6}[call])
    return "failed" if view.failed else "fine"


def run(calls: tuple[str, ...], pulls: bool, bounded: bool, deaths: int = 0, most: int = 2 * 10**6) -> Found:
    """All orders of ranks, each with its calls."""

    def code(rank: int, memory: Memory) -> str:
        return exchanges(View(memory, rank, len(calls), bounded), pulls, calls[rank])

    return explore([partial(code, rank) for rank in range(len(calls))], addresses(len(calls)), deaths, most)


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes windows signal by `signal_cpu`, with replaced parts of its text."""

    def use(*replaced: str) -> None:
        source = inspect.getsource(signal_module.signal_cpu)
        for old, new in zip(replaced[::2], replaced[1::2], strict=True):
            assert old in source, old
            source = source.replace(old, new)
        clock = SimpleNamespace(monotonic_ns=lambda: 0, sleep=lambda seconds: None)
        names = {**vars(signal_module), "time": clock}
        exec(compile(source, "<a variant of signal_cpu>", "exec", dont_inherit=True), names)

        def signal(channel: Any, *, send: bool = False, wait: bool = False, credit: int = 0, fingerprint: int = 0,
                   limit: Any = None, poison: Any = None) -> None:  # fmt: skip
            names["signal_cpu"](channel, send, wait, credit, fingerprint, Forever(1) if limit is None else limit, None)

        monkeypatch.setattr(window_module, "signal", signal)

    return use


long = pytest.mark.long
BOTH = pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])


@BOTH
@pytest.mark.parametrize(
    "calls",
    [
        ("aaa", "aaa"),  # replays
        ("abba", "abba"),
        ("ara", "ara"),  # refused by all
        pytest.param(("aa", "aa", "aa"), marks=long),
        ("a", "a", "a"),
    ],
    ids=" ".join,
)
def test_nothing_goes_wrong(calls: tuple[str, ...], pulls: bool, variant: Callable[..., None]) -> None:
    variant()
    found = run(calls, pulls, bounded=False)
    assert found.ends == {("fine",) * len(calls)} and not found.stuck and found.states > 100, found


@BOTH
@pytest.mark.parametrize(
    "calls",
    [
        ("aa", "aa"),  # timeouts anywhere
        ("aba", "aba"),
        ("fa", "aa"),
        ("aa", "af"),
        ("ra", "aa"),  # refused by one
        ("ar", "aa"),
        ("ab", "aa"),  # different requests
        ("aa", "a"),  # a call less
        pytest.param(("a", "a", "a"), marks=long),
        pytest.param(("f", "a", "a"), marks=long),
        pytest.param(("r", "a", "a"), marks=long),
        pytest.param(("b", "a", "a"), marks=long),
    ],
    ids=" ".join,
)
def test_no_wrong_output_with_timeouts(calls: tuple[str, ...], pulls: bool, variant: Callable[..., None]) -> None:
    variant()
    found = run(calls, pulls, bounded=True)
    assert not found.errors and not found.stuck, found
    differ = len(set(calls)) > 1
    assert (("fine",) * len(calls) in found.ends) != differ
    assert any("failed" in ends for ends in found.ends)


@BOTH
@pytest.mark.parametrize("calls", [("aa", "aa"), pytest.param(("a", "a", "a"), marks=long)], ids=" ".join)
def test_death_of_a_rank(calls: tuple[str, ...], pulls: bool, variant: Callable[..., None]) -> None:
    variant()
    found = run(calls, pulls, bounded=True, deaths=1)
    assert not found.errors and not found.stuck, found
    assert {("failed", None), ("fine", None)} <= {ends[:2] for ends in found.ends} or len(calls) > 2


@pytest.mark.parametrize("calls", [("fa", "aa"), ("ra", "aa"), ("ab", "aa"), ("af", "aa", "aa")], ids=" ".join)
def test_failure_ends_waits_without_bound(calls: tuple[str, ...], variant: Callable[..., None]) -> None:
    """A peer that fails, refuses or disagrees does not have to be timed out, if all make a call."""
    variant()
    found = run(calls, pulls=False, bounded=False)
    assert not found.errors and not found.stuck, found
    assert all("failed" in ends for ends in found.ends), found


WRONG = {
    "a credit too many": ((), {"credit": 2}, ("aaa", "aaa"), False),
    "the count before the fingerprint": (
        (
            "            if credit < UNLIMITED:\n"
            "                theirs[peer][1 + (count & 1)] = mixed(fingerprint, count)\n"
            "            theirs[peer][0] = count\n",
            "            theirs[peer][0] = count\n"
            "            if credit < UNLIMITED:\n"
            "                theirs[peer][1 + (count & 1)] = mixed(fingerprint, count)\n",
        ),
        {}, ("aa", "aa"), False,
    ),
    "peers are not told of a failure": (("            slots[0] = -1\n", "            pass\n"), {}, ("aa", "aa"), True),
    "a release does not look for failures": (
        ("            if seen < 0:\n", "            if wait and seen < 0:\n"), {}, ("aa", "aa"), True,
    ),
    "no fingerprints": (
        ("elif credit == 0 and pad[slot + 1 + (goal & 1)] != mixed(fingerprint, goal):", "elif False:"),
        {}, ("ab", "aa"), False,
    ),
    "a wait that a failure does not end": (("while 0 <= seen < goal", "while seen < goal"), {}, ("fa", "aa"), False),
    "no wait for the barrier": (("while 0 <= seen < goal", "while 0 <= seen < goal - 1"), {}, ("aa", "aa"), False),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_found(name: str, variant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, credit, calls, bounded = WRONG[name]
    variant(*replaced)
    if credit:
        signal = window_module.signal

        def generous(channel: Any, **named: Any) -> None:
            signal(channel, **{**named, "credit": 2 * named.get("credit", 0)})

        monkeypatch.setattr(window_module, "signal", generous)
    found = [run(calls, pulls, bounded) for pulls in (False, True)]
    same = len(set(calls)) == 1
    fails = [one for one in found if one.errors or one.stuck or (not bounded and same != ({("fine",) * 2} == one.ends))]
    assert fails, found
