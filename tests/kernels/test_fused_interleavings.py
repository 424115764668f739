"""Launches that wait for peers and signal them, in every order of the accesses of all programs of all ranks.

The texts of the kernels' device functions run, with memory and arithmetic of one lane in place of `triton.language`:
two ranks of one or two programs each. Programs of a launch are resident together, or one after another. What holds: a
call ends with the data that the peer wrote for it, whole, or with its output overwritten; who waits without a bound
gets on; everybody ends where waits are bounded; and where nothing goes wrong nobody fails. Variants of the code with an
error are found wrong.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from interleavings import Found, Memory, explore

from shardweave.kernels import fused_signals
from shardweave.kernels.channel import SLOT, pack
from shardweave.kernels.window_use import HALVES

pytestmark = pytest.mark.plan
ARRIVED, RELEASED = 0, 1
FUNCTIONS = (
    "wait_for_peers", "has_failed", "is_last_program", "end_use", "count_use", "signal_peers", "half_of_use",
)  # fmt: skip


class Int(int):
    """A scalar of a kernel."""

    def to(self, kind: Any) -> Int:
        return self


class Forever(Int):
    """The limit of a wait that does not end."""

    def __sub__(self, other: int) -> Forever:
        return self

    def __gt__(self, other: int) -> bool:
        return True


class Bounded(Forever):
    """The limit of a wait that may end at any poll."""

    memory: Memory

    def __gt__(self, other: int) -> bool:
        return self.memory.choose()


class Pointer:
    """Words of the shared memory from `first` on."""

    def __init__(self, *of: Any, first: int = 0) -> None:
        self.of, self.first = of, first

    def __add__(self, words: int) -> Pointer:
        return Pointer(*self.of, first=self.first + words)

    def to(self, kind: Any) -> Pointer:
        return self

    @property
    def address(self) -> tuple[Any, ...]:
        return (*self.of, self.first)


class Language:
    """`triton.language` for one lane: of one program, in one memory."""

    int32 = int64 = None

    def __init__(self, memory: Memory, programs: int) -> None:
        self._memory, self._programs = memory, programs

    def load(self, pointer: Pointer, mask: bool = True, other: int = 0) -> Any:
        kind, *of = pointer.of
        if kind == "table" and pointer.first == 2:  # the address of this rank's slot in the peer's pad
            return Pointer("pad", 1 - of[0], of[1])
        if kind == "table" and pointer.first == 3:
            return pack(of[0], 1 - of[0], of[1])
        return Int(self._memory.load(pointer.address))

    def store(self, pointer: Pointer, value: int, mask: bool = True) -> None:
        if mask:
            self._memory.store(pointer.address, int(value))

    def atomic_add(self, pointer: Pointer, value: int, **_: Any) -> int:
        return Int(self._memory.add(pointer.address, value) if value else self._memory.load(pointer.address))

    def atomic_xchg(self, pointer: Pointer, value: int, **_: Any) -> None:
        self._memory.store(pointer.address, int(value))

    def atomic_cas(self, pointer: Pointer, old: int, new: int, **_: Any) -> int:
        return self._memory.swap(pointer.address, int(old), int(new))

    def num_programs(self, axis: int) -> int:
        return self._programs

    def arange(self, first: int, end: int) -> int:
        return 0

    def full(self, shape: tuple[int, ...], value: int, kind: Any) -> int:
        return value

    def where(self, condition: bool, a: int, b: int) -> int:
        return Int(a if condition else b)

    def max(self, value: int, axis: int) -> int:
        return value

    def debug_barrier(self) -> None:
        pass

    constexpr = Any
    pointer_type = staticmethod(lambda kind: None)


def functions(
    memory: Memory, programs: int, replaced: tuple[str, ...], module: Any = fused_signals, more: tuple[str, ...] = ()
) -> SimpleNamespace:
    """The device functions of a program, and `more` of a module, with replaced parts of their text."""
    of = {**dict.fromkeys(FUNCTIONS, fused_signals), **dict.fromkeys(more, module)}
    text = "".join(textwrap.dedent(inspect.getsource(getattr(where, name).fn)) for name, where in of.items())
    text = text.replace("@triton.jit\n", "")
    for old, new in zip(replaced[::2], replaced[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)

    def load_words(pointer: Pointer, ACQUIRE: bool, PTX: bool) -> int:
        return Int(memory.load(pointer.address))

    def store_words(pointer: Pointer, value: int, active: bool, RELEASE: bool, PTX: bool) -> None:
        if active:
            memory.store(pointer.address, int(value))

    constants = {
        name: getattr(value, "value", value) for name, value in (vars(fused_signals) | vars(module)).items()
    }  # fmt: skip
    names = {
        **constants, "tl": Language(memory, programs), "load_words": load_words, "store_words": store_words,
        "store_word": lambda *_, **__: None, "give_way": lambda: None,
        "overwrite": lambda out, *_: memory.store(out.of, 0),
    }  # fmt: skip
    exec(_compiled(text), names)
    return SimpleNamespace(**{name: names[name] for name in of})


_texts: dict[str, Any] = {}


def _compiled(text: str) -> Any:
    """One code object for each text, since the explorer compares them."""
    if text not in _texts:
        _texts[text] = compile(text, "<fused_signals>", "exec", dont_inherit=True)
    return _texts[text]


def program(
    f: SimpleNamespace, memory: Memory, rank: int, number: int, programs: int, call: int, use: str, fingerprint: int,
    limit: int,
) -> None:  # fmt: skip
    """A program of a launch, as `copy_window_kernel`: writes its box of the data of a call, or reads the box that
    another program wrote."""
    waits, signals = (RELEASED, ARRIVED) if use == "write" else (ARRIVED, RELEASED)
    error, pad = Pointer("error", rank), Pointer("pad", rank, waits)
    awaited, signalled = Pointer("table", rank, waits), Pointer("table", rank, signals)
    writes = use == "write"
    credit = HALVES if writes else 0
    failed = f.wait_for_peers(
        awaited, pad, error, Int(0), Int(fingerprint), limit, PEERS=1, CREDIT=credit, TIMED=False, PTX=False, WIDTH=1
    )
    half = int(f.half_of_use(awaited, signalled, writes, PEERS=1))
    if writes:
        for box in range(2) if programs == 1 else (number % 2,):
            if not failed:
                memory.store(("data", 1 - rank, half, box), call)
    else:
        for box in range(2) if programs == 1 else (1 - number % 2,):
            # Output that is not written is as wrong as what is read of another call.
            if failed or memory.load(("data", rank, half, box)) != call:
                memory.store(("wrong", rank, call), 1)
    if f.is_last_program(Pointer("finished", rank, use)):
        out = Pointer("wrong", rank, call)
        f.end_use(
            awaited, signalled, error, Int(fingerprint), 1, out, 0, 0, PEERS=1, POISON=use == "read",
            WORD=None, PTX=False, WIDTH=1,
        )  # fmt: skip


def run_program(memory: Memory, rank: int, number: int, programs: int, resident: bool, bounded: bool, calls: str,
                replaced: tuple[str, ...]) -> str:  # fmt: skip
    """All launches of one program, or of one after another, on a rank. A letter for a call: `a` and `b` are requests,
    `f` fails before it begins, `r` is refused by a rank of one program."""
    f = functions(memory, programs, replaced)
    limit: Any = Bounded(1) if bounded else Forever(1)
    limit.memory = memory
    for n, call in enumerate(calls, 1):
        if call == "r":
            refuse(memory, rank)
            continue
        for use in ("write", "read"):
            if resident and programs > 1:  # the stream's order
                while memory.load(("done", rank)) < programs * (2 * n - 2 + (use == "read")):
                    pass
            if call == "f" and use == "write":
                memory.store(("error", rank, 0), 1)
            for each in (number,) if resident else range(programs):
                program(f, memory, rank, each, programs, n, use, {"a": 5, "b": 6}.get(call, 5), limit)
            if resident and programs > 1:
                memory.add(("done", rank), 1)
    while resident and programs > 1 and memory.load(("done", rank)) < 2 * programs * len(calls):
        pass
    for n in range(1, len(calls) + 1):
        wrong = memory.load(("wrong", rank, n))
        assert not wrong, f"rank {rank} has read other data than that of call {n}, and has not overwritten it"
    return "failed" if memory.load(("error", rank, 0)) else "fine"


def refuse(memory: Memory, rank: int) -> None:
    """`Window.refuse`: signals and counts on both channels, and waits for nothing."""
    for channel in (ARRIVED, RELEASED):
        for row in range(2):
            count = memory.add(("table", rank, channel, row), 1) + 1
            if row == 0:
                memory.store(("pad", 1 - rank, channel, 0), count)


def addresses() -> Iterator[Any]:
    for rank in range(2):
        for channel in (ARRIVED, RELEASED):
            yield from (("pad", rank, channel, i) for i in range(SLOT))
            yield from (("table", rank, channel, i) for i in range(2))
        yield from (("data", rank, half, box) for half in range(HALVES) for box in range(2))
        yield from (("finished", rank, use, 0) for use in ("write", "read"))
        yield from (("error", rank, 0), ("done", rank), *(("wrong", rank, n) for n in range(1, 5)))


def run(
    calls: tuple[str, str],
    programs: tuple[int, int],
    bounded: bool = False,
    resident: bool = True,
    deaths: int = 0,
    replaced: tuple[str, ...] = (),
    most: int = 3 * 10**6,
) -> Found:
    codes = []
    for rank in range(2):
        for number in range(programs[rank] if resident else 1):
            given = rank, number, programs[rank], resident, bounded, calls[rank], replaced
            codes.append(partial(lambda given, memory: run_program(memory, *given), given))
    return explore(codes, list(addresses()), deaths, most)


long = pytest.mark.long


@pytest.mark.parametrize(
    ("calls", "programs", "resident"),
    [
        (("aa", "aa"), (1, 1), True),
        (("a", "a"), (2, 2), False),  # no two programs of a rank are resident together
        pytest.param(("a", "a"), (2, 1), True, marks=long),
        pytest.param(("aa", "aa"), (2, 2), False, marks=long),
    ],
)
def test_nothing_goes_wrong(calls: tuple[str, str], programs: tuple[int, int], resident: bool) -> None:
    found = run(calls, programs, resident=resident)
    assert all(set(ends) == {"fine"} for ends in found.ends) and not found.errors and not found.stuck, found
    assert found.states > 100


@pytest.mark.parametrize(
    ("calls", "programs", "deaths"),
    [
        (("a", "a"), (1, 1), 0),
        (("b", "a"), (1, 1), 0),
        (("f", "a"), (1, 1), 0),
        pytest.param(("aa", "aa"), (1, 1), 1, marks=long),
        pytest.param(("ab", "aa"), (1, 1), 0, marks=long),
        pytest.param(("aa", "a"), (1, 1), 0, marks=long),
        pytest.param(("f", "a"), (2, 1), 0, marks=long),
    ],
)
def test_no_wrong_output_with_timeouts(calls: tuple[str, str], programs: tuple[int, int], deaths: int) -> None:
    found = run(calls, programs, bounded=True, deaths=deaths)
    assert not found.errors and not found.stuck, found
    assert any("failed" in ends for ends in found.ends)


@pytest.mark.parametrize("calls", [("f", "a"), pytest.param(("ab", "aa"), marks=long)], ids=" ".join)
def test_failure_ends_waits_without_bound(calls: tuple[str, str]) -> None:
    found = run(calls, (1, 1))
    assert not found.errors and not found.stuck and all("failed" in ends for ends in found.ends), found


FINGERPRINT = "store_words(there + 1 + (count & 1), mixed, active, RELEASE=False, PTX=PTX)"
COUNT = "store_words(there, tl.where(failed, FAILED_COUNT, count), active, RELEASE=True, PTX=PTX)"
WRONG = {
    "a signal before all programs are done": (("== tl.num_programs(0) - 1", "== 0"), ("a", "a"), (2, 1)),
    "peers are not told of a failure": (("tl.where(failed, FAILED_COUNT, count)", "count"), ("f", "a"), (1, 1)),
    "the count before the fingerprint": ((FINGERPRINT, "0", COUNT, f"{COUNT}; {FINGERPRINT}"), ("a", "a"), (1, 1)),
    "no fingerprints": (("here & (theirs != ours)", "here & (seen < 0)"), ("b", "a"), (1, 1)),
    "no wait for writes": (("code = tl.full((), _PENDING, tl.int64)", "code = CREDIT * 1 and _PENDING"), ("a", "a"),
                           (1, 1)),
    "a credit too many": (("(1 - CREDIT)", "(1 - CREDIT - (CREDIT > 0))"), ("ara", "ara"), (1, 1)),
    "one half": (("    return tl.load(awaited + PEERS if WRITES else signalled) & 1", "    return 0"), ("aaa", "aaa"),
                 (1, 1)),
    "no reset": (
        ("tl.atomic_xchg(finished, tl.full((), 0, tl.int64), sem=\"relaxed\", scope=\"gpu\")", "pass"), ("aa", "aa"),
        (2, 1),
    ),
    "counts advance with the first program": (
        ("    last = tl.atomic_add", "    if finished.of[2] == \"write\":\n"
         "        tl.atomic_add(Pointer(\"table\", finished.of[1], 1, first=1), 1)\n    last = tl.atomic_add"),
        ("aa", "aa"), (2, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=long) if i == 0 or i > 4 else n for i, n in enumerate(WRONG)])
def test_wrong_variants_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, calls, programs = WRONG[name]
    monkeypatch.setattr(fused_signals, "Pointer", Pointer, raising=False)
    found = run(calls, programs, replaced=replaced)
    fine = all(set(ends) == {"fine"} for ends in found.ends)
    assert found.errors or found.stuck or fine != (len(set(calls)) == 1), found


@pytest.mark.long
def test_write_without_a_credit_is_found() -> None:
    """A program that writes although its wait has failed."""
    replaced = ("    return code != 0\n", "    return (code != 0) & (CREDIT == 0)\n")
    found = run(("ara", "ara"), (1, 1), bounded=True, replaced=replaced)
    assert found.errors, found


@pytest.mark.long
def test_refused_call_lets_nobody_ahead() -> None:
    """With two halves, who has read the last use knows that peers have read the one before; not if that was refused."""
    found = run(("ara", "ara"), (1, 1))
    assert found.ends == {("fine", "fine")} and not found.errors and not found.stuck, found
