"""Launches that write directly into outputs of peers, in every order of the accesses of all programs of both ranks.

As `test_fused_interleavings`. What holds: a call ends with the data that the peer wrote for it, whole, or with its
output overwritten; an output stays as it is until its rank announces its buffer again; who waits without a bound gets
on; everybody ends where waits are bounded; and where nothing goes wrong nobody fails. Variants with an error are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from interleavings import Found, Memory, explore
from test_fused_interleavings import ARRIVED, RELEASED, Bounded, Forever, Int, Pointer, functions, refuse

from shardweave.kernels import direct_boxes
from shardweave.kernels.channel import SLOT

pytestmark = pytest.mark.plan
FUNCTIONS = ("announce", "is_first_program", "end_arrivals")
BUFFER = {"a": 0, "c": 1, "b": 0, "f": 0}
"""Of this rank, by the letter of a call; `b` is another request than the others."""


def program(
    f: Any, memory: Memory, rank: int, boxes: tuple[int, ...], programs: int, call: int, kind: str, limit: Any
) -> None:
    """A program of a launch, as `copy_direct_kernel`."""
    error, fingerprint, buffer = Pointer("error", rank), Int(6 if kind == "b" else 5), Int(BUFFER[kind])
    ready, arrived = Pointer("table", rank, RELEASED), Pointer("table", rank, ARRIVED)
    wait = partial(f.wait_for_peers, PEERS=1, CREDIT=0, TIMED=False, PTX=False, WIDTH=1)
    if f.is_first_program(Pointer("started", rank)):
        f.announce(ready, error, fingerprint, buffer, PEERS=1, PTX=False, WIDTH=1)
    if not wait(ready, Pointer("pad", rank, RELEASED), error, Int(0), fingerprint, limit):
        for box in boxes:
            announced = memory.load(("pad", rank, RELEASED, 3))
            memory.store(("data", 1 - rank, announced, box), call)
    if f.is_last_program(Pointer("finished", rank)):
        memory.store(("started", rank, 0), 0)
        f.end_use(
            ready, arrived, error, fingerprint, 1, 0, 0, 0, PEERS=1, POISON=False, WORD=None, PTX=False, WIDTH=1
        )  # fmt: skip
        failed = wait(arrived, Pointer("pad", rank, ARRIVED), error, Int(0), fingerprint, limit)
        f.end_arrivals(arrived, PEERS=1, WIDTH=1)
        if not failed:
            memory.store(("whole", rank, call), 1)


def run_program(memory: Memory, rank: int, number: int, programs: int, resident: bool, bounded: bool, calls: str,
                replaced: tuple[str, ...]) -> str:  # fmt: skip
    """All launches of one program, or of one after another, on a rank; then its outputs are read."""
    f = functions(memory, programs, replaced, direct_boxes, FUNCTIONS)
    limit: Any = Bounded(1) if bounded else Forever(1)
    limit.memory = memory
    for n, call in enumerate(calls, 1):
        if call == "r":
            refuse(memory, rank)
            continue
        if resident and programs > 1:  # the stream's order
            while memory.load(("done", rank)) < programs * (n - 1):
                pass
        if call == "f":
            memory.store(("error", rank, 0), 1)
        for each in (number,) if resident else range(programs):
            program(f, memory, rank, (0, 1) if programs == 1 else (each,), programs, n, call, limit)
        if resident and programs > 1:
            memory.add(("done", rank), 1)
            while memory.load(("done", rank)) < programs * n:
                pass
        # The user reads all outputs that are there, also that of an earlier call in another buffer.
        for buffer in range(2) if number == 0 else ():
            last = max([m for m, kind in enumerate(calls[:n], 1) if BUFFER.get(kind) == buffer], default=0)
            if last and memory.load(("whole", rank, last)):
                for box in range(2):
                    found = memory.load(("data", rank, buffer, box))
                    assert found == last, f"rank {rank}, buffer {buffer}, box {box}: {found} after call {last}"
        if resident and programs > 1:  # who reads an output does so before the next launch
            if number == 0:
                memory.store(("read", rank), n)
            while memory.load(("read", rank)) < n:
                pass
    return "failed" if memory.load(("error", rank, 0)) else "fine"


def addresses() -> Iterator[Any]:
    for rank in range(2):
        for channel in (ARRIVED, RELEASED):
            yield from (("pad", rank, channel, i) for i in range(SLOT))
            yield from (("table", rank, channel, i) for i in range(2))
        yield from (("data", rank, buffer, box) for buffer in range(2) for box in range(2))
        yield from (("whole", rank, call) for call in range(1, 5))
        yield from ((name, rank, 0) for name in ("started", "finished", "error"))
        yield from (("done", rank), ("read", rank))


def run(calls: tuple[str, str], programs: tuple[int, int] = (1, 1), bounded: bool = False, resident: bool = True,
        deaths: int = 0, replaced: tuple[str, ...] = ()) -> Found:  # fmt: skip
    codes = []
    for rank in range(2):
        for number in range(programs[rank] if resident else 1):
            given = rank, number, programs[rank], resident, bounded, calls[rank], replaced
            codes.append(partial(lambda given, memory: run_program(memory, *given), given))
    return explore(codes, list(addresses()), deaths, 3 * 10**6)


long = pytest.mark.long


@pytest.mark.parametrize(
    ("calls", "programs", "resident"),
    [
        (("aa", "aa"), (1, 1), True),
        pytest.param(("aca", "caa"), (1, 1), True, marks=long),
        pytest.param(("aca", "aac"), (2, 2), False, marks=long),  # no two programs of a rank are resident together
        pytest.param(("a", "a"), (2, 1), True, marks=long),
    ],
)
def test_nothing_goes_wrong(calls: tuple[str, str], programs: tuple[int, int], resident: bool) -> None:
    found = run(calls, programs, resident=resident)
    assert all(set(ends) == {"fine"} for ends in found.ends) and not found.errors and not found.stuck, found
    assert found.states > 50


@pytest.mark.parametrize(
    ("calls", "programs", "deaths"),
    [
        (("b", "a"), (1, 1), 0),
        pytest.param(("r", "a"), (1, 1), 0, marks=long),
        pytest.param(("aa", "ac"), (1, 1), 1, marks=long),
        pytest.param(("ac", "af"), (1, 1), 0, marks=long),
        pytest.param(("f", "a"), (2, 1), 0, marks=long),
    ],
)
def test_no_wrong_output_with_timeouts(calls: tuple[str, str], programs: tuple[int, int], deaths: int) -> None:
    found = run(calls, programs, bounded=True, deaths=deaths)
    assert not found.errors and not found.stuck, found
    assert any("failed" in ends for ends in found.ends)


def test_failure_ends_waits_without_bound() -> None:
    found = run(("f", "a"))
    assert not found.errors and not found.stuck and all("failed" in ends for ends in found.ends), found


@pytest.mark.long
def test_refused_call_is_refused_by_all() -> None:
    found = run(("ra", "ra"))
    assert found.ends == {("fine", "fine")} and not found.errors and not found.stuck, found


BUFFER_WORD = "store_words(there + _BUFFER, buffer.to(tl.int64) + count * 0, active, RELEASE=False, PTX=PTX)"
COUNT = """mixed_count, active, RELEASE=False, PTX=PTX)
    store_words(there, tl.where(failed, FAILED_COUNT, count), active, RELEASE=True, PTX=PTX)
"""
COUNTED = "tl.store(table + PEERS + lanes, tl.load(table + PEERS + lanes, mask=active, other=0) + 1, mask=active)"
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "the count before the buffer": ((BUFFER_WORD, "pass", COUNT, f"{COUNT}    {BUFFER_WORD}\n"), ("c", "c")),
    "no buffer": ((BUFFER_WORD, "pass"), ("c", "c")),
    "a wait for less": (("(1 - CREDIT)", "(0 - CREDIT)"), ("aa", "aa")),
    "arrivals are not counted": ((COUNTED, "pass"), ("aa", "aa")),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=long) if i else n for i, n in enumerate(WRONG)])
def test_wrong_variants_are_found(name: str) -> None:
    replaced, calls = WRONG[name]
    found = run(calls, replaced=replaced)
    assert found.errors or found.stuck or not all(set(ends) == {"fine"} for ends in found.ends), found
