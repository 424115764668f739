"""Device functions by which a kernel waits for peers before its work and signals them after it, without launches of its
own for either.

    failed = wait_for_peers(…)       every program, before it touches memory that peers use as well
    …                                nothing if failed
    if is_last_program(finished):    every program, at its end
        end_use(…)                   counts the use, overwrites the output if this rank has failed, signals the peers

Counts and slots are those of `Channel`, so that kernels and `signal` may take turns on a channel. All programs of a
launch wait for the same counts, which its last program advances: when it runs, all others have read them.

No deadlock, however few programs are resident. A program waits only for signals of peers. A peer signals from a kernel
whose programs wait, in turn, for signals of kernels that come earlier in the order of uses, here and there: never for
another program of the same launch, nor for one of a later launch. "Last" is decided by a count of finished programs,
for which nobody waits. What may keep a signal from coming is a device filled with programs that wait, if the peer's
signal depends on a kernel of another stream of this device; so launches that wait have fewer programs than the device
has SMs (`window_use.waiting_programs`).

Data is written to a peer only by programs that have seen its signal. So a rank that fails writes nothing that a peer
still reads, and a rank that reads has, or misses, all of what it was sent.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from .channel import DISAGREES, FAILED, LATE, SLOT
from .launch import interpreted
from .store_word import store_word

FAILED_COUNT = tl.constexpr(-1)  # in place of a count
COUNTED, ABOVE = tl.constexpr(0x7FFF), tl.constexpr(48)  # bits of a count, and their position in a fingerprint
_LATE, _PEER_FAILED, _DISAGREES = (tl.constexpr(kind << 60) for kind in (LATE, FAILED, DISAGREES))
# In place of a code, below and above all of them: a peer is awaited; this rank has failed before.
_PENDING, _EARLIER = tl.constexpr(1), tl.constexpr(1 << 62)
_SLOT = tl.constexpr(SLOT)
_BLOCK = tl.constexpr(1024)
_NAP = 1e-4  # seconds

_LOADED = tl.constexpr("ld.ORDER.sys.global.b64 $0, [$1];")
_ACQUIRED = tl.constexpr(_LOADED.value.replace("ORDER", "acquire"))
_RELAXED = tl.constexpr(_LOADED.value.replace("ORDER", "relaxed"))
# Triton does not predicate inline assembly as it does its own stores.
_IF_ACTIVE = """{
    .reg .pred active;
    setp.ne.s32 active, $3, 0;
    @active st.ORDER.sys.global.b64 [$1], $2;
    mov.u32 $0, 0;
}"""
_STORED_RELEASED = tl.constexpr(_IF_ACTIVE.replace("ORDER", "release"))
_STORED_RELAXED = tl.constexpr(_IF_ACTIVE.replace("ORDER", "relaxed"))


@triton.jit
def give_way():
    """Yield between two polls; nothing to do on a device, where the peer runs on a device of its own."""
    pass


@triton.jit
def nanoseconds(lanes):
    """The device's global timer, read by each lane."""
    text: tl.constexpr = "mov.u64 $0, %globaltimer;"
    return tl.inline_asm_elementwise(text, "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1)


def _nap() -> None:
    time.sleep(_NAP)


if interpreted(give_way):
    give_way = _nap  # a peer may need this core
    nanoseconds = lambda lanes: time.monotonic_ns()  # noqa: E731


@triton.jit
def load_words(pointers, ACQUIRE: tl.constexpr, PTX: tl.constexpr):
    """Load an int64 for each lane; with ACQUIRE, before this thread's later accesses. In this device's memory."""
    if PTX:
        assembly: tl.constexpr = _ACQUIRED if ACQUIRE else _RELAXED
        addresses = pointers.to(tl.int64)
        return tl.inline_asm_elementwise(assembly, "=l,l", [addresses], dtype=tl.int64, is_pure=False, pack=1)
    elif ACQUIRE:
        return tl.atomic_add(pointers, pointers.to(tl.int64) * 0, sem="acquire", scope="sys")
    else:
        return tl.atomic_add(pointers, pointers.to(tl.int64) * 0, sem="relaxed", scope="sys")


@triton.jit
def store_words(pointers, values, active, RELEASE: tl.constexpr, PTX: tl.constexpr):
    """`store_word` for each lane that is active."""
    if PTX:
        assembly: tl.constexpr = _STORED_RELEASED if RELEASE else _STORED_RELAXED
        given = [pointers.to(tl.int64), values, active.to(tl.int32)]
        tl.inline_asm_elementwise(assembly, "=r,l,l,r", given, dtype=tl.int32, is_pure=False, pack=1)
    elif RELEASE:
        tl.atomic_xchg(pointers, values, mask=active, sem="release", scope="sys")
    else:
        tl.atomic_xchg(pointers, values, mask=active, sem="relaxed", scope="sys")


@triton.jit
def wait_for_peers(
    table,  # of the awaited channel, int64 [4, PEERS]
    pad,  # of the awaited channel, int64 [PEERS, SLOT]
    error,  # int64 [1]
    host_error,  # address of an int64 in host memory
    fingerprint,
    limit,  # of the wait: nanoseconds if TIMED, else polls
    PEERS: tl.constexpr,
    CREDIT: tl.constexpr,
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,  # lanes: the threads of a program, or more if there are more peers
):
    """Wait until all peers have signalled as often as awaited so far and once more, less CREDIT. Return whether this
    rank has failed, now or before: equal for all threads.

    Without a credit, fingerprints have to agree. All peers are polled at once, one by each lane.
    """
    lanes = tl.arange(0, WIDTH)
    peer = lanes % PEERS
    slots = pad + peer * _SLOT
    goal = tl.load(table + PEERS + peer) + (1 - CREDIT)
    codes = tl.load(table + 3 * PEERS + peer)
    before = load_words(error + peer * 0, ACQUIRE=False, PTX=PTX)
    left = limit.to(tl.int64)
    if TIMED:
        end = nanoseconds(lanes) + left
    code = tl.full((), _PENDING, tl.int64)
    while code == _PENDING:
        seen = load_words(slots, ACQUIRE=True, PTX=PTX)
        here = seen >= goal
        kind = tl.where(seen < 0, _PEER_FAILED, 0)
        if CREDIT == 0:
            theirs = load_words(slots + 1 + (goal & 1), ACQUIRE=False, PTX=PTX)
            ours = fingerprint.to(tl.int64) ^ ((goal & COUNTED) << ABOVE)
            kind = tl.where(here & (theirs != ours), _DISAGREES, kind)
        if TIMED:
            in_time = nanoseconds(lanes) < end
        else:
            left -= 1
            in_time = (lanes >= 0) & (left > 0)
        absent = (seen >= 0) & (seen < goal)
        kind = tl.where(absent & (in_time == 0), _LATE, kind)
        of_lane = tl.where(kind != 0, codes + kind, tl.where(absent & in_time, _PENDING, 0))
        of_lane = tl.where(before != 0, _EARLIER, of_lane)
        # The maximum is the same for all threads, so that they leave the loop together: at the first failure, or when
        # all peers are here.
        code = tl.max(of_lane, 0)
        if code == _PENDING:
            give_way()
    tl.debug_barrier()  # what one thread has acquired, all may read; the maximum alone orders nothing within a warp
    if (code != 0) & (code != _EARLIER):
        if tl.atomic_cas(error, tl.full((), 0, tl.int64), code, sem="relaxed", scope="gpu") == 0:
            store_word(host_error.to(tl.int64).to(tl.pointer_type(tl.int64)), code, RELEASE=False, PTX=PTX)
    return code != 0


@triton.jit
def half_of_use(awaited, signalled, WRITES: tl.constexpr, PEERS: tl.constexpr):
    """Which half of a window this use is in: the parity of the uses so far, as the channel of releases counts them.

    On the device, so that a graph's replays and other calls may follow each other. A launch that writes waits on that
    channel; one that reads signals on it.
    """
    return tl.load(awaited + PEERS if WRITES else signalled) & 1


@triton.jit
def has_failed(error):
    """Whether this rank has failed: in an earlier launch, or in a program of this one that has finished."""
    return tl.atomic_add(error, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def is_last_program(finished):
    """Whether all other programs of the launch have called this before: equal for all threads.

    What they wrote is visible to the last one, and, by its release, to who acquires that. `finished`: int64 [1], 0; it
    is 0 again for the next launch, of a graph's replay too.
    """
    # Without this barrier the release below does not order other warps' accesses.
    tl.debug_barrier()
    last = tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.atomic_xchg(finished, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")
    return last


@triton.jit
def end_use(
    awaited,  # table of the channel that the programs waited for
    table,  # of the channel to signal on
    error,
    fingerprint,
    send,  # 0: the use goes on in a later launch
    out,  # address of the output to overwrite if this rank has failed
    words,  # in out
    poison,  # 8 bytes
    PEERS: tl.constexpr,
    POISON: tl.constexpr,
    WORD: tl.constexpr,  # integer type of a word of out
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """For the last program: overwrite the output if this rank has failed; then, with `send`, count the use and signal
    all peers, which then see what the launch wrote, or that this rank has failed."""
    failed = has_failed(error)
    if POISON:
        if failed:
            overwrite(out, words, poison, WORD)
    if send != 0:
        count_use(awaited, PEERS, WIDTH)
        signal_peers(table, failed, fingerprint, PEERS, PTX, WIDTH)


@triton.jit
def count_use(awaited, PEERS: tl.constexpr, WIDTH: tl.constexpr):
    """For one program, when no other reads the counts: one more signal of each peer was awaited."""
    lanes = tl.arange(0, WIDTH)
    active = lanes < PEERS
    before = tl.load(awaited + PEERS + lanes, mask=active, other=0)
    tl.store(awaited + PEERS + lanes, before + 1, mask=active)


@triton.jit
def signal_peers(table, failed, fingerprint, PEERS: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr):
    """For one program, behind a barrier of its threads: signal all peers, which then see what is visible to it, or that
    this rank has failed."""
    lanes = tl.arange(0, WIDTH)
    active = lanes < PEERS
    count = tl.load(table + lanes, mask=active, other=0) + 1
    tl.store(table + lanes, count, mask=active)
    there = tl.load(table + 2 * PEERS + lanes, mask=active, other=0).to(tl.pointer_type(tl.int64))
    mixed = fingerprint.to(tl.int64) ^ ((count & COUNTED) << ABOVE)
    store_words(there + 1 + (count & 1), mixed, active, RELEASE=False, PTX=PTX)
    store_words(there, tl.where(failed, FAILED_COUNT, count), active, RELEASE=True, PTX=PTX)


@triton.jit
def overwrite(out, words, poison, WORD: tl.constexpr):
    """Fill `words` words at the address `out` with the bytes of `poison`."""
    target = out.to(tl.int64).to(tl.pointer_type(WORD))
    filler = tl.full((_BLOCK,), 0, tl.int64) + poison
    for start in range(0, words, _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        tl.store(target + at, filler.to(WORD), mask=at < words)
