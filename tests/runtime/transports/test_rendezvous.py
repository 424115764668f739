"""The state that ranks share through the store: sessions, settings, refusals, and the calls that they wait in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shardweave.errors import MeetingTimeoutError, PeerError
from shardweave.runtime.transports.rendezvous import long_wait
from shardweave.runtime.transports.rendezvous.long_wait import LongWait
from shardweave.runtime.transports.rendezvous.rendezvous import Rendezvous

pytestmark = pytest.mark.plan


def at(store: dist.Store, rank: int, timeout: float = 20, gone: tuple[int, ...] = ()) -> Rendezvous:
    return Rendezvous(store, rank, timeout, lambda rank: rank in gone)


def session(store: dist.Store, rank: int, ranks: tuple[int, ...], timeout: float) -> str:
    return at(store, rank, timeout).session(ranks)


def agreed(store: dist.Store, ranks: tuple[int, ...], first: int = 0) -> list[str]:
    """The session names of all ranks. `first`: the number of ranks that start before the others."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        requests = [pool.submit(session, store, r, ranks, 20) for r in ranks[:first]]
        for future in requests:
            with pytest.raises(TimeoutError):
                future.result(0.05)
        requests += [pool.submit(session, store, r, ranks, 20) for r in ranks[first:]]
        return [future.result() for future in requests]


@pytest.mark.parametrize("ranks", [(0, 1), (3, 5, 9), tuple(range(8))], ids=len)
def test_session_is_new_with_leftover_store_keys(ranks: tuple[int, ...]) -> None:
    store, seen = dist.HashStore(), set()
    for life in range(6):
        # The store has complete sessions of earlier groups, which no rank may take for the current one.
        names = agreed(store, ranks, first=life % len(ranks))
        assert len(set(names)) == 1 and names[0] not in seen
        seen.add(names[0])


def test_session_times_out_with_rank_of_earlier_group() -> None:
    store = dist.HashStore()
    agreed(store, (0, 1))
    with pytest.raises(MeetingTimeoutError, match="rank 1 did not arrive within 0.2 s; rank 0 was waiting for it"):
        session(store, 0, (0, 1), 0.2)
    with pytest.raises(MeetingTimeoutError, match="rank 7 did not arrive within 0.2 s"):
        session(store, 0, (0, 7), 0.2)


def looked(wait: LongWait, *peers: int) -> None:
    wait._next = 0.0  # it is time
    wait.poll(peers)


def test_reports_of_an_earlier_process_group_are_ignored_before_ranks_meet_again() -> None:
    store = dist.HashStore()
    early = at(store, 0), at(store, 1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.session((0, 1)), early))
    early[1].refuse((0, 1), "too large")
    early[1].reports.fail("rank 1 failed: no room")
    for one in early:
        one.reports.leave()
    one = at(store, 0)  # rank 1 has not come so far
    one.calls.begin((0, 1), 5, "a")
    looked(LongWait(one.errors), 1)
    other = at(store, 1)
    other.reports.fail("rank 1 failed: no disk")
    with pytest.raises(PeerError, match="no disk"):
        looked(LongWait(one.errors), 1)


@pytest.mark.parametrize("timed_out", [True, False], ids=["waited for too long", "lost its connection"])
def test_cause_is_named_after_late_peer_has_ended_its_own_wait(
    timed_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 stalls; rank 3 waits for it, and rank 2 for rank 3, whose wait is over before it reports its failure."""
    monkeypatch.setattr(long_wait, "FIRST_POLL", 0.0)
    store, ranks = dist.HashStore(), (1, 2, 3)
    second, third = (at(store, rank, gone=(3,)) for rank in (2, 3))
    for rendezvous in (second, third):
        rendezvous.calls.begin(ranks, 5, "combine")
    wait = LongWait(third.errors)
    wait.poll([1])
    third.errors.timed_out(1)
    wait.close()
    error = second.errors.timed_out(3) if timed_out else second.errors.peer_gone(3)
    assert "rank 2 was waiting for it" in str(error) and str(error).endswith("rank 3 waits for rank 1")
    LongWait(third.errors).poll([2])  # rank 3 has caught the error: what it waits for now is not kept
    third.reports.clear_waiting()
    assert second.errors.why_late(3) == ""
