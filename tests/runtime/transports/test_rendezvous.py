"""The state that ranks share through the store: sessions, settings, refusals, and the calls that they wait in."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shardweave.errors import DisagreementError, MeetingTimeoutError, PeerError
from shardweave.runtime.transports.rendezvous import long_wait, peer_errors, peer_reports
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


def connected(*, gone: tuple[int, ...] = ()) -> tuple[Rendezvous, Rendezvous]:
    store = dist.HashStore()
    both = at(store, 0, gone=gone), at(store, 1, gone=gone)
    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(lambda one: one.session((0, 1)), both))
    assert names[0] == names[1]
    return both


def test_session_raises_on_different_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter(("seven", "eight", "seven", "eight"))
    store = dist.HashStore()
    both = at(store, 0), at(store, 1)
    monkeypatch.setitem(peer_reports.settings, "install(size=)", lambda: next(values))

    def error_of(one: Rendezvous) -> str:
        with pytest.raises(DisagreementError) as caught:
            one.session((0, 1))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for rank, text in enumerate(pool.map(error_of, both)):
            assert text.startswith("install(size=): ") and "seven" in text and "eight" in text, text
            assert f"on rank {rank}, " in text and text.endswith("allowed: the same on all ranks")


def looked(wait: LongWait, *peers: int) -> None:
    wait._next = 0.0  # it is time
    wait.poll(peers)


def test_wait_ends_on_different_request() -> None:
    one, other = connected()
    one.begin((0, 1), 5, "S0 to R")
    other.begin((0, 1), 6, "S0 to S1")
    mine, theirs = LongWait(one.errors), LongWait(other.errors)
    looked(theirs, 0)
    with pytest.raises(DisagreementError) as caught:
        looked(mine, 1)
    assert "rank 0 is in call 1 of ranks (0, 1): S0 to R; rank 1 is in call 1 of ranks (0, 1): S0 to S1" in str(
        caught.value
    )
    with pytest.raises(DisagreementError, match="made different requests"):
        looked(theirs, 0)


@pytest.mark.parametrize("writes", ["its call", "nothing more"])
def test_disagreement_does_not_name_a_call_that_is_over(writes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer describes its call once its wait lasts; until then its last description may still be in the store."""
    one, other = connected()
    for rendezvous in (one, other):
        rendezvous.begin((0, 1), 5, "a")
    other.reports.write_waiting(1)
    one.begin((0, 1), 6, "b")
    other.begin((0, 1), 7, "c")
    polls = 0

    def polled(peer: int) -> None:
        nonlocal polls
        polls += 1
        if polls == 3 and writes == "its call":
            other.reports.write_waiting(1)

    monkeypatch.setattr(one.errors, "refusal", polled)
    monkeypatch.setattr(peer_errors, "_PEER_GRACE", 0.2)
    text = str(one.errors.disagreement(1))
    assert "rank 0 is in call 2 of ranks (0, 1): b; " in text
    # If it writes nothing more, it may be in that call after all.
    known = "call 2 of ranks (0, 1): c" if writes == "its call" else "call 1 of ranks (0, 1): a"
    assert f"rank 1 is in {known}; " in text


def test_wait_without_a_store_ends_when_the_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store, whose host is gone as well, cannot be asked why."""
    one, _ = connected(gone=(1,))
    one.begin((0, 1), 5, "S0 to R")

    def lost(*_: object) -> None:
        raise dist.DistStoreError("the store did not answer")

    monkeypatch.setattr(one.reports, "write_waiting", lost)
    looked(LongWait(one.errors), 2)
    with pytest.raises(PeerError, match="rank 1 is gone, or .*; rank 0 was waiting for it in call 1 of .*: S0 to R"):
        looked(LongWait(one.errors), 2, 1)


def test_wait_continues_while_peer_is_in_earlier_call() -> None:
    one, other = connected()
    one.begin((0, 1), 5, "a")
    other.begin((0, 1), 5, "a")
    one.begin((0, 1), 6, "b")
    mine, theirs = LongWait(one.errors), LongWait(other.errors)
    for _ in range(4):
        looked(theirs, 2)
        looked(mine, 1)


def test_wait_continues_while_peer_is_in_later_call() -> None:
    one, other = connected()
    for _ in range(2):
        other.begin((0, 1), 5, "a")  # its part of the first call is done
    one.begin((0, 1), 5, "a")
    mine, theirs = LongWait(one.errors), LongWait(other.errors)
    for _ in range(4):
        looked(theirs, 2)
        looked(mine, 1)


def test_refusals_reach_peer_in_earlier_call() -> None:
    one, other = connected()
    one.begin((0, 1), 5, "a")
    other.begin((0, 1), 5, "a")
    other.refuse((0, 1), "a first reason")
    other.refuse((0, 1), "another reason")
    looked(LongWait(one.errors), 1)  # call 1 was not refused
    for reason in ("a first reason", "another reason"):
        one.begin((0, 1), 5, "a")
        with pytest.raises(DisagreementError, match=reason):
            looked(LongWait(one.errors), 1)


def test_wait_ends_on_deadlock_of_two_groups() -> None:
    one, other = connected()
    one.begin((0, 1), 5, "pair")
    other.calls.sequence((0, 1, 2)).session = "agreed"
    other.begin((0, 1, 2), 6, "all")
    mine, theirs = LongWait(one.errors), LongWait(other.errors)
    looked(theirs, 2)
    looked(mine, 1)
    looked(theirs, 2)
    with pytest.raises(DisagreementError, match="all"):
        looked(mine, 1)


def test_wait_continues_while_peer_is_in_earlier_call_of_other_group() -> None:
    one, other = connected()
    for each in (one, other):
        each.calls.sequence((0, 1, 2)).session = "agreed"
        each.begin((0, 1, 2), 6, "all")
    one.begin((0, 1), 5, "pair")
    mine, theirs = LongWait(one.errors), LongWait(other.errors)
    for _ in range(4):
        looked(theirs, 2)
        looked(mine, 1)


def test_refusal_ends_only_wait_for_that_call() -> None:
    one, other = connected()
    one.begin((0, 1), 5, "a")
    looked(LongWait(one.errors), 1)
    other.refuse((0, 1), "x: too large")
    with pytest.raises(DisagreementError, match="rank 1 refused its arguments in call 1 .*x: too large"):
        looked(LongWait(one.errors), 1)
    one.begin((0, 1), 5, "a")
    looked(LongWait(one.errors), 1)


def test_keys_of_earlier_process_group_are_ignored() -> None:
    store = dist.HashStore()
    early = at(store, 0), at(store, 1)
    early[1].refuse((0, 1), "too large")
    early[1].reports.write_waiting(1)
    kept = {key: store.get(key) for key in ("refused/1", "waiting/1")}
    both = at(store, 0), at(store, 1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.session((0, 1)), both))
    for key, value in kept.items():
        store.set(key, value.decode())
    both[0].begin((0, 1), 5, "a")
    for _ in range(3):
        looked(wait := LongWait(both[0].errors), 1)
    assert both[0].reports.waiting(1) is None and wait is not None


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


def test_wait_ends_after_peer_left_before_the_call() -> None:
    one, other = connected()
    for rendezvous in (one, other):
        rendezvous.begin((0, 1), 5, "a")
    other.reports.leave()
    looked(LongWait(one.errors), 1)  # it has done its part of this call
    one.begin((0, 1), 5, "b")
    with pytest.raises(PeerError, match="rank 1 has left the process group .* waiting for it in call 2 of .*: b"):
        looked(LongWait(one.errors), 1)


@pytest.mark.parametrize("kind", ["failed", "gone"])
def test_wait_ends_after_peer_failed_or_died(kind: str) -> None:
    one, other = connected(gone=(1,) if kind == "gone" else ())
    if kind == "failed":
        other.reports.fail("rank 1 failed: no room")
    one.begin((0, 1), 5, "a")
    with pytest.raises(
        PeerError, match="in call 1 of .*: no room" if kind == "failed" else "rank 1 is gone.* in call 1 of "
    ):
        looked(LongWait(one.errors), 1)


def test_long_wait_warns_once_with_peer_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(long_wait, "WARN_AFTER", 0.0)
    one, other = connected()
    one.begin((0, 1), 5, "S0 to R")
    wait = LongWait(one.errors)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            looked(wait, 1)
        other.begin((0, 1), 5, "S0 to R")
        looked(LongWait(other.errors), 0)
        looked(LongWait(one.errors), 1)
        looked(LongWait(one.errors), 7)
    warnings = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rank 0")]
    assert len(warnings) == 3 and all("in call 1 of ranks (0, 1): S0 to R. " in text for text in warnings)
    assert "rank 1 has the same settings and waits nowhere" in warnings[0]
    assert "rank 1 waits in call 1 of ranks (0, 1): S0 to R" in warnings[1]
    assert (
        "rank 7 has not used shardweave in this process group" in warnings[2] and "shardweave.install()" in warnings[2]
    )


def test_finished_wait_deletes_no_store_key() -> None:
    """A peer may be between finding the key and reading it."""
    one, other = connected()
    one.begin((0, 1), 5, "a")
    one.reports.write_waiting(1)
    state = other.reports.waiting(0)
    assert state is not None and state.call.description == "a"
    one.reports.clear_waiting()
    assert other.texts.bounded.run(lambda store: store.check(["waiting/0"]), 5.0) and other.reports.waiting(0) is None


class Silent(dist.HashStore):
    """A store whose host has vanished from the network: writes are never answered."""

    gone = False

    def set(self, key: str, value: str) -> None:
        if self.gone:
            threading.Event().wait(20)
        super().set(key, value)


def test_write_ends_in_time_without_an_answer() -> None:
    store = Silent()
    one = at(store, 0, timeout=0.2)
    one.write("key", "text")
    assert one.read("key", 1) == "text"
    store.gone = True
    with pytest.raises(PeerError, match="the store is gone .* did not answer within 0.2 s"):
        one.write("key", "other")


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
