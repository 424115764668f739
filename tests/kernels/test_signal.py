"""signal across real processes: barriers, credits, timeouts and failures."""

from __future__ import annotations

import os
import random
import sys
import time

import pytest
import torch
from pad_processes import Rank, run_pads

from shardweave.kernels.channel import SLOT, Channel, Code, Failure, pack
from shardweave.kernels.dtypes import poison_word
from shardweave.kernels.launch import interpreted
from shardweave.kernels.signal import signal, signal_kernel, wait_limit

signals = sys.modules[signal.__module__]  # `kernels.signal` is the function
pytestmark = pytest.mark.multi
HOW = [pytest.param("reference"), pytest.param("kernel", marks=pytest.mark.interp)]
FOREVER, MILLISECOND = 1 << 50, 1_000_000
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))


def check_how(how: str) -> None:
    assert interpreted(signal_kernel) == (how == "kernel")


def window_rounds(rank: Rank, rounds: int, late: float, credit: int = 1) -> list[int]:
    """Each round every rank writes to all others and reads what they wrote, twice; ranks are late at random.

    Returns the rounds in which other data was read.
    """
    generator, wrong = random.Random(rank.rank), []
    for n in range(rounds):
        signal(rank.released, wait=True, credit=credit, limit=FOREVER)
        for peer in rank.peers:
            rank.windows[peer, rank.rank] = 1000 * n + 10 * rank.rank + peer
        if generator.random() < late:
            time.sleep(0.01)
        signal(rank.arrived, send=True, wait=True, fingerprint=7 + n, limit=FOREVER)
        want = torch.tensor([1000 * n + 10 * peer + rank.rank for peer in rank.peers])[:, None]
        first = rank.windows[rank.rank, rank.peers] == want
        if generator.random() < late:
            time.sleep(0.01)
        again = rank.windows[rank.rank, rank.peers] == want
        if not (first.all() and again.all()):
            wrong.append(n)
        signal(rank.released, send=True)
    assert rank.failure.read() is None
    return wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", HOW)
def test_credit_protects_window_until_read(how: str, size: int) -> None:
    check_how(how)
    # Counts pass 2**32 on the way.
    wrong = run_pads(window_rounds, size, 48 if how == "kernel" else 200, 0.1, start=(1 << 32) - 24)
    assert wrong == [[]] * size


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
def test_signal_many_rounds(how: str) -> None:
    check_how(how)
    rounds = min(10_000, PARTS * (500 if how == "kernel" else 5000))
    assert run_pads(window_rounds, 3, rounds, 0.002, timeout=1700) == [[]] * 3


@pytest.mark.parametrize("how", HOW)
def test_extra_credit_is_detected(how: str) -> None:
    """With one credit more, a window is written before it is read."""
    check_how(how)
    assert any(run_pads(window_rounds, 2, 60, 0.3, 2))


def never_comes(rank: Rank) -> Code:
    """Rank 1 signals after the others have timed out."""
    out = torch.zeros(5000, dtype=torch.float32)
    if rank.rank == 1:
        while int(rank.words[[0, 2], 0].sum()) < 2:
            time.sleep(0.01)
    # Programs that run one after another serve rank 1 first: rank 0 tells rank 2 when it has given rank 1 up.
    limit = {0: 50 * MILLISECOND, 1: FOREVER, 2: 400 * MILLISECOND}[rank.rank]
    signal(rank.arrived, send=True, wait=True, limit=limit, poison=out)
    results = rank.failure.read()
    assert results is not None and out.isnan().all()
    # Everything after it returns at once, whatever its bound is.
    before = rank.arrived.table[:2].clone()
    for channel in (rank.arrived, rank.released) * 3:
        out.zero_()
        signal(channel, send=True, wait=True, limit=FOREVER, poison=out)
        assert out.isnan().all()
    assert torch.equal(rank.arrived.table[:2], before)
    assert rank.failure.read() == results
    rank.words[rank.rank, 0] = 1
    return results


@pytest.mark.parametrize("how", HOW)
def test_timeout_names_missing_peer(how: str) -> None:
    check_how(how)
    ends = run_pads(never_comes, 3)
    assert ends[0] == Code("late", 0, 1, 0)
    # Who gave up tells the others, so that rank 2 may hear of it first, and rank 1 in any case.
    assert ends[2] in (Code("late", 2, 1, 0), Code("failed", 2, 0, 0))
    assert ends[1].kind == "failed" and ends[1].rank == 1 and ends[1].peer in (0, 2)


def torn_read(rank: Rank) -> Code | None:
    """Rank 0 times out on a release and writes nevertheless, while rank 1 is reading."""
    limit = 50 * MILLISECOND if rank.rank == 0 else FOREVER
    signal(rank.arrived, send=True, wait=True, limit=FOREVER)
    out = torch.zeros(10, dtype=torch.float32)
    if rank.rank == 0:
        signal(rank.released, send=True)
        signal(rank.released, wait=True, credit=1, limit=limit)
        signal(rank.released, wait=True, credit=1, limit=limit)
        assert rank.failure.read() == Code("late", 0, 1, 1)
        rank.windows[1, 0] = 99
        rank.words[0, 0] = 1
        return rank.failure.read()
    while int(rank.words[0, 0]) == 0:
        time.sleep(0.01)
    signal(rank.released, send=True, poison=out)
    assert out.isnan().all()
    return rank.failure.read()


@pytest.mark.parametrize("how", HOW)
def test_output_is_overwritten_after_peer_failure(how: str) -> None:
    check_how(how)
    assert run_pads(torn_read, 2)[1] == Code("failed", 1, 0, 1)


def other_request(rank: Rank) -> Code | None:
    signal(rank.arrived, send=True, wait=True, fingerprint=5, limit=FOREVER)
    signal(rank.arrived, send=True, wait=True, fingerprint=6 + (rank.rank == 2), limit=FOREVER)
    return rank.failure.read()


@pytest.mark.parametrize("how", HOW)
def test_different_fingerprints_are_reported(how: str) -> None:
    check_how(how)
    ends = run_pads(other_request, 3)
    assert any(end is not None and end.kind == "disagrees" and 2 in (end.rank, end.peer) for end in ends)
    assert all(end is not None and end.kind in ("disagrees", "failed") for end in ends)


def gives_up_itself(rank: Rank) -> Code | None:
    if rank.rank == 0:
        rank.failure.fail()
    signal(rank.arrived, send=True, wait=True, limit=FOREVER)
    return rank.failure.read()


@pytest.mark.parametrize("how", HOW)
def test_failed_rank_signals_peers(how: str) -> None:
    check_how(how)
    ends = run_pads(gives_up_itself, 3)
    assert ends[0] is None
    assert ends[1] in (Code("failed", 1, 0, 0), Code("failed", 1, 2, 0))
    assert ends[2] in (Code("failed", 2, 0, 0), Code("failed", 2, 1, 0))


@pytest.mark.parametrize("how", HOW)
def test_poison_in_every_dtype(how: str) -> None:
    check_how(how)
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    others = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    for dtype in (*floats, torch.complex64, torch.complex128, *others):
        for shape in ((), (0,), (3, 5), (1025,)):
            failure, pads = Failure(torch.device("cpu")), torch.zeros(2, 1, SLOT, dtype=torch.int64)
            channel = Channel(pads[0], [pads[1].data_ptr()], [pack(0, 1, 0)], failure)
            out = torch.zeros(shape, dtype=dtype)
            signal(channel, send=True, poison=out)
            assert not out.view(-1).view(torch.uint8).any()
            failure.fail()
            signal(channel, send=True, poison=out)
            if dtype.is_complex:
                assert torch.view_as_real(out).isnan().all()
            elif dtype.is_floating_point:
                assert out.float().isnan().all()
            else:
                assert (out == (True if dtype is torch.bool else torch.iinfo(dtype).max)).all()
    assert poison_word(torch.bfloat16)[1] == 2


def test_two_ranks_on_one_device(device: str) -> None:
    """All in one stream: three rounds, then a peer that does not come, which learns of it."""
    here = torch.device(device)
    pads, limit = torch.zeros(2, 1, SLOT, dtype=torch.int64, device=here), wait_limit(0.05, here)
    channels = [
        Channel(pads[rank], [pads[1 - rank].data_ptr()], [pack(rank, 1 - rank, 0)], Failure(here)) for rank in range(2)
    ]
    for number in range(3):
        for channel in channels:
            signal(channel, send=True, fingerprint=number)
        for channel in channels:
            signal(channel, wait=True, fingerprint=number, limit=limit)
    assert pads[:, 0, 0].tolist() == [3, 3]  # waits for the device
    assert [channel.failure.read() for channel in channels] == [None, None]
    out = torch.zeros(5, device=here)
    signal(channels[0], send=True, wait=True, limit=limit, poison=out)
    signal(channels[1], wait=True, limit=limit)
    assert out.isnan().all()
    assert [channel.failure.read() for channel in channels] == [Code("late", 0, 1, 0), Code("failed", 1, 0, 0)]
