"""The signals of windows in the PTX memory model: what ranks launch for an exchange is compiled, and the memory
operations of the PTX are the threads of litmus tests. No execution may have a bad outcome; variants with an error have
one, and it is printed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

z3 = pytest.importorskip("z3", reason="z3-solver is not installed")
from exchange import Behaviour, Ranks, executions, fails, followed, last_write, recorded  # noqa: E402
from memory_model import Event, Execution  # noqa: E402
from symbolic_ptx import Data  # noqa: E402

from shardweave.kernels.channel import DISAGREES, FAILED  # noqa: E402
from shardweave.kernels.store_word import store_word  # noqa: E402

pytestmark = pytest.mark.aot
long = pytest.mark.long
BOTH = pytest.mark.parametrize("direction", ["push", pytest.param("pull", marks=long)])
PROGRAMS = pytest.mark.parametrize("programs", [1, pytest.param(2, marks=long)])
VARIANTS = {
    "relaxed instead of release": ("st.release.sys", "st.relaxed.sys", 1),
    "relaxed instead of acquire": ("ld.acquire.sys", "ld.relaxed.sys", 1),
    "release for the GPU only": ("st.release.sys", "st.release.gpu", 1),
    "acquire for the GPU only": ("ld.acquire.sys", "ld.acquire.gpu", 1),
    "barriers of warps": (r"bar\.sync\s+0", "bar.warp.sync -1", 1),
    "a barrier of warps before the count of programs": (
        r"bar\.sync\s+0(?=(?:(?!bar\.sync)[\s\S])*atom\.global\.gpu\.acq_rel)",
        "bar.warp.sync -1",
        2,
    ),  # fmt: skip
    "relaxed count of programs": ("atom.global.gpu.acq_rel", "atom.global.gpu.relaxed", 2),
    "count of programs in a block": ("atom.global.gpu.acq_rel", "atom.global.cta.acq_rel", 2),
}


def reads(found: Execution, rank: int) -> list[Event]:
    """Of data that is followed, by call."""
    return [e for e in found.reads if isinstance(e.at, Data) and e.thread.gpu == rank]


def writes(found: Execution, rank: int) -> list[Event]:
    return [e for e in found.events if isinstance(e.at, Data) and e.thread.gpu == rank and e.written is not None]


def stale(ranks: Ranks, direction: str, reader: int = 1, **variant) -> tuple[list[str], list[str]]:
    """Executions of one call in which the reader gets what rank 0 wrote, and those in which it gets what was there."""
    data = followed(ranks, 0, reader, direction)
    good, bad = [], []
    behaviours = {rank: Behaviour(2 if rank == reader else 1) for rank in range(len(ranks.launches))}
    for found in executions(ranks, behaviours, data, **variant):
        ((read,), (write,)) = reads(found, reader), writes(found, 0)
        good.append(found.find(found.reads_from(read, write)))
        bad.append(found.find(found.reads_from(read, None)))
    return [text for text in good if text], [text for text in bad if text]


@BOTH
@PROGRAMS
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=long)])
def test_data_is_there_when_its_signal_is_seen(direction: str, programs: int, size: int) -> None:
    good, bad = stale(Ranks.exchanging(size, 1, direction, writing=programs), direction, reader=size - 1)
    assert good and not bad, bad


def changing(variant: str) -> tuple[Callable[[str], str], list[int]]:
    """A function that makes the variant, and how often it has changed something."""
    changed: list[int] = []

    def change(text: str) -> str:
        old, new, _ = VARIANTS[variant]
        text, count = re.subn(old, new, text)
        changed.append(count)
        return text

    return change, changed


@BOTH
@pytest.mark.parametrize("variant", [next(iter(VARIANTS)), *(pytest.param(v, marks=long) for v in [*VARIANTS][1:])])
def test_wrong_orders_and_scopes_are_found(variant: str, direction: str) -> None:
    change, changed = changing(variant)
    _, bad = stale(Ranks.exchanging(2, 1, direction, writing=VARIANTS[variant][2]), direction, change=change)
    assert any(changed) and bad
    print(bad[0])
    assert "reads 0 from the initial value" in bad[0]


@BOTH
@PROGRAMS
def test_memory_is_not_written_again_before_it_is_read(direction: str, programs: int) -> None:
    """The third call is the first to use the half of the window that the first call used."""
    ranks = Ranks.exchanging(2, 3, direction, reading=programs)
    data = followed(ranks, 0, 1, direction)
    good, bad = reused(ranks, data, Behaviour(last_write(ranks, 0, data)))
    assert good and not bad, bad


@long
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "release" in v])
def test_reuse_before_the_end_of_reads_is_found(variant: str) -> None:
    """Not if only the count of programs is wrong: the writer has also waited for the reader's next data."""
    change, changed = changing(variant)
    ranks = Ranks.exchanging(2, 3, "push", reading=VARIANTS[variant][2])
    data = followed(ranks, 0, 1, "push")
    _, bad = reused(ranks, data, Behaviour(last_write(ranks, 0, data)), change)
    assert any(changed) and bad


def reused(
    ranks: Ranks, data: int, writer: Behaviour, change: Callable[[str], str] = str
) -> tuple[list[str], list[str]]:
    """Executions in which rank 1 reads in its first call what rank 0 writes in its first, and in a later one."""
    good, bad = [], []
    for found in executions(ranks, {0: writer, 1: Behaviour(ranks.calls(1, 1) + 1)}, data, change):
        (read,) = reads(found, 1)
        for write in writes(found, 0):
            first = "launch 1," in str(write.thread.block)
            (good if first else bad).append(found.find(found.reads_from(read, write)))
    return [text for text in good if text], [text for text in bad if text]


@long
@pytest.mark.parametrize("call", [1, 2])
def test_equal_requests_agree(call: int) -> None:
    """The fingerprints of two calls are in different words, and a word is not reused before it is compared."""

    def disagree(change: Callable[[str], str] = str) -> list[str]:
        ranks = Ranks.exchanging(2, call + 1, "push")
        number = ranks.calls(1, call)
        behaviours = {0: Behaviour(number + 1), 1: Behaviour(number, failing={number})}
        found = [f.find(*codes(f, 1, DISAGREES)) for f in executions(ranks, behaviours, change=change)]
        return [text for text in found if text]

    assert not disagree()
    assert disagree(changing("relaxed instead of release")[0])


def codes(found: Execution, rank: int, kind: int) -> list:
    """That a rank notes a failure of this kind."""
    noted = [e.written for e in found.events if fails(e) and "error" in str(e.at) and e.thread.gpu == rank]
    return [z3.Or([z3.LShR(term, 60) == kind for term in noted if z3.is_expr(term)])]


@long
def test_a_peer_that_failed_before_is_noticed() -> None:
    ranks = Ranks.exchanging(2, 1, "push")
    ranks.kept[0].failure.fail()
    told, noticed = Behaviour(failed=True), False
    assert not any(found.find() for found in executions(ranks, {0: told, 1: Behaviour()}))
    for number in range(1, len(ranks.launches[1]) + 1):
        for found in executions(ranks, {0: told, 1: Behaviour(number, failing={number})}):
            noticed = noticed or bool(found.find(*codes(found, 1, FAILED)))
    assert noticed


@long
def test_later_kernels_of_a_rank_know_that_it_failed() -> None:
    ranks = Ranks.exchanging(2, 2, "push")

    def fail(launches: int) -> list[str | None]:
        """Executions in which of these launches the second fails: the first does not wait for its peer."""
        found = executions(ranks, {0: Behaviour(launches, failing={2}, expired=True), 1: Behaviour(0)})
        notes = ((f, [e.written != 0 for e in f.events if fails(e) and "error" in str(e.at)]) for f in found)
        return [f.find(z3.Or(noted)) for f, noted in notes if noted]

    assert any(fail(2))
    assert not any(fail(3))


@long
def test_peers_of_a_rank_that_stopped_waiting_take_its_first_data_only() -> None:
    """A program whose wait failed writes nothing."""
    ranks = Ranks.exchanging(2, 3, "push")
    data = followed(ranks, 0, 1, "push")
    last = last_write(ranks, 0, data)
    good, bad = reused(ranks, data, Behaviour(last, failing={last}, expired=True))
    assert good and not bad, bad


# Signals at the ends of launches: of rows of tokens, and of direct writes into outputs of peers.

AT_ENDS = {
    "as it is": ("", "", 1, False),
    "as it is, two programs": ("", "", 2, False),
    "relaxed instead of release": ("st.release.sys", "st.relaxed.sys", 1, True),
    "relaxed instead of acquire": ("ld.acquire.sys", "ld.relaxed.sys", 1, True),
    "relaxed count of programs": ("atom.global.gpu.acq_rel", "atom.global.gpu.relaxed", 2, True),
}


@long
@pytest.mark.parametrize("variant", AT_ENDS)
@pytest.mark.parametrize("make", [Ranks.moving_rows, Ranks.writing_directly], ids=["rows", "direct writes"])
def test_data_is_there_in_the_next_launch(make: Callable[..., Ranks], variant: str) -> None:
    """The launch after the one that writes and waits for its peer reads what the peer wrote, not what was there."""
    old, new, programs, wrong = AT_ENDS[variant]
    ranks = make(1, programs)
    data = followed(ranks, 0, 1, "push")
    good, bad = [], []
    for found in executions(ranks, {0: Behaviour(1), 1: Behaviour(2)}, data, lambda text: text.replace(old, new)):
        (read,), (write,) = reads(found, 1), writes(found, 0)
        good.append(found.find(found.reads_from(read, write)))
        bad.append(found.find(found.reads_from(read, None)))
    assert any(good) and any(bad) == wrong, bad


IN_TURNS = {
    "as it is": ("", "", True, False),
    "relaxed instead of release": ("st.release.sys", "st.relaxed.sys", True, True),
    "relaxed instead of acquire": ("ld.global.sys.acquire", "ld.global.sys.relaxed", True, True),
    "kernels do not wait for those before": ("", "", False, True),
}


@pytest.mark.parametrize("variant", [v if v == "as it is" else pytest.param(v, marks=long) for v in IN_TURNS])
def test_signals_of_token_dispatches(variant: str) -> None:
    """Rank 1 reads what rank 0 wrote in this turn: not what was there, and not what it writes in the next turn."""
    old, new, streams, wrong = IN_TURNS[variant]
    ranks = Ranks.taking_turns(2)
    data = followed(ranks, 0, 1, "push")
    good, bad = [], []
    behaviours = {0: Behaviour(last_write(ranks, 0, data)), 1: Behaviour(ranks.calls(1, 1))}
    for found in executions(ranks, behaviours, data, lambda text: text.replace(old, new), streams):
        (read,), (first, second) = reads(found, 1), writes(found, 0)
        good.append(found.find(found.reads_from(read, first)))
        bad += [found.find(found.reads_from(read, write)) for write in (None, second)]
    assert any(good) and any(bad) == wrong, bad


# Direct writes into outputs of peers, and memory that is free behind a barrier at the end of a launch.

REUSED = {
    "as it is": ("", "", True, False),
    "relaxed instead of release": ("st.release.sys", "st.relaxed.sys", True, True),
    "relaxed instead of acquire": ("ld.acquire.sys", "ld.relaxed.sys", True, True),
    "kernels do not wait for those before": ("", "", False, True),
}


@long
@pytest.mark.parametrize("variant", REUSED)
def test_buffer_is_not_written_again_before_it_is_read(variant: str) -> None:
    """The reader of an output that is free again is enqueued before the launch that announces its buffer."""
    old, new, streams, wrong = REUSED[variant]
    ranks = Ranks.writing_directly(2)
    data = followed(ranks, 0, 1, "push")
    good, bad = [], []
    behaviours = {0: Behaviour(last_write(ranks, 0, data)), 1: Behaviour(ranks.calls(1, 1) + 1)}
    for found in executions(ranks, behaviours, data, lambda text: text.replace(old, new), streams):
        (read,), (first, second) = reads(found, 1), writes(found, 0)
        good.append(found.find(found.reads_from(read, first)))
        bad.append(found.find(found.reads_from(read, second)))
    assert any(good) and any(bad) == wrong, bad


@long
@pytest.mark.parametrize("variant", [v for v in REUSED if "kernels" not in v])
def test_only_the_announced_buffer_is_written(variant: str) -> None:
    """Rank 1 keeps its first output and announces another buffer: rank 0 does not write the first one again."""
    old, new, _, wrong = REUSED[variant]
    ranks = Ranks.writing_directly(2, keep=True)
    data = followed(ranks, 0, 1, "push")  # in the first buffer
    behaviours = {rank: Behaviour(ranks.calls(rank, 1) + 1) for rank in range(2)}
    good, bad = [], []
    for found in executions(ranks, behaviours, data, lambda text: text.replace(old, new)):
        calls = ["call 2" in str(write.thread.block) for write in writes(found, 0)]
        (bad if any(calls) else good).append(found.find())
    assert any(good) and any(bad) == wrong, bad


@pytest.mark.parametrize("variant", [v if v == "as it is" else pytest.param(v, marks=long) for v in REUSED])
def test_memory_is_free_after_a_barrier(variant: str) -> None:
    """A rank has read its memory in an earlier launch than that which ends with a barrier: what the peer writes behind
    the barrier, it does not see."""
    old, new, streams, wrong = REUSED[variant]
    ranks = Ranks.reading_before_a_barrier()
    data = followed(ranks, 0, 1, "push")
    behaviours, seen, unseen = {0: Behaviour(3), 1: Behaviour(2)}, [], []
    for found in executions(ranks, behaviours, data, lambda text: text.replace(old, new), streams):
        (read,), (write,) = reads(found, 1), writes(found, 0)
        seen.append(found.find(found.reads_from(read, write)))
        unseen.append(found.find(found.reads_from(read, None)))
    assert any(unseen) and any(seen) == wrong, seen


# Blocks of several threads and programs, of which one signals for all.


@triton.jit
def store_and_signal(data, slot, done, PTX: tl.constexpr):
    """The last program to have stored its data signals."""
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(data + i, i)
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        store_word(slot, tl.full((), 1, tl.int64), RELEASE=True, PTX=PTX)


@triton.jit
def wait_and_load(data, slot, out):
    while tl.atomic_add(slot, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()
    i = tl.arange(0, 256)
    tl.store(out + i, tl.load(data + i))


ONE_SIGNAL = {
    "as it is": ((), False, (1, 2)),
    "no barrier of the block": ((r"bar\.sync\s+0;", ""), True, (1, 2)),
    "relaxed count of programs": ((r"atom\.global\.gpu\.acq_rel", "atom.global.gpu.relaxed"), True, (2,)),
    "count of programs in a block": ((r"atom\.global\.gpu\.acq_rel", "atom.global.cta.acq_rel"), True, (2,)),
}


@pytest.mark.parametrize(
    ("variant", "programs"),
    [pytest.param(v, n, marks=long if n > 1 else ()) for v, (*_, sizes) in ONE_SIGNAL.items() for n in sizes],
)
def test_one_thread_signals_for_all(variant: str, programs: int) -> None:
    replaced, wrong, _ = ONE_SIGNAL[variant]
    data, out = torch.zeros(256 * programs, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    slot, done = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with recorded() as launches:
        store_and_signal[(programs, 1, 1)](data, slot, done, PTX=True, num_warps=4)
        wait_and_load[(1, 1, 1)](data, slot, out, num_warps=4)
    window = {0: data.view(torch.uint8)}
    ranks = Ranks([[(1, launches[0])], [(1, launches[1])]], [window], shared={slot.data_ptr(): 8, done.data_ptr(): 4})

    def change(text: str) -> str:
        return re.sub(*replaced, text) if replaced else text

    of_first = data.data_ptr() + 4 * 192  # of the first program, by the first thread of its last warp
    bad, good = [], []
    for found in executions(ranks, {0: Behaviour(), 1: Behaviour()}, of_first, change):
        (read,), (write,) = reads(found, 1), writes(found, 0)
        bad.append(found.find(found.reads_from(read, None)))
        good.append(found.find(found.reads_from(read, write)))
    print(*filter(None, bad))
    assert any(good) and any(bad) == wrong
