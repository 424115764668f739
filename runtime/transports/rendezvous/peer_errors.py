"""The errors of waits for peers: why one of them does not come, by what ranks report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from ....errors import DisagreementError, MeetingTimeoutError, PeerError
from .calls import CallRecord, Calls, key_of
from .peer_reports import PeerReports, own_settings

_SIZES = re.compile(r"\[[0-9, ]*\]")  # of tensors, in the text of a request
_PEER_GRACE = 2.0  # seconds that an error waits for the description of the peer's call
_CAUSE_GRACE = 0.25  # seconds that an error waits for what a late peer was waiting for


class PeerErrors:
    """Errors of this rank's current call.

    Args:
        is_gone: returns whether the process of a rank is known to have ended.
    """

    def __init__(self, calls: Calls, reports: PeerReports, timeout: float, is_gone: Callable[[int], bool]) -> None:
        self.calls, self.reports = calls, reports
        self._rank, self._timeout, self._is_gone = calls.rank, timeout, is_gone

    def timed_out(self, *ranks: int, why: str = "") -> MeetingTimeoutError:
        """The error after a wait for `ranks` has timed out. It names those that do not wait in the same call."""
        absent, call = list(ranks), self.calls.current
        self.reports.keep_waiting(ranks)  # peers whose waits for this rank end now look for their cause
        if len(ranks) > 1:
            with suppress(dist.DistError):
                waiting = {rank: self.reports.waiting(rank) for rank in ranks}
                absent = [rank for rank, report in waiting.items() if report is None or report.call[:3] != call[:3]]
        who = " or ".join(f"rank {rank}" for rank in absent or ranks)
        if len(absent or ranks) == 1:
            why += self.why_late((absent or ranks)[0])
        return MeetingTimeoutError(
            f"{who} did not arrive within {self._timeout:g} s; rank {self._rank} was waiting for it in {call}{why}"
        )

    def why_late(self, rank: int) -> str:
        """What a rank that this one waited for has failed of, or waits for itself, and so on to the rank that is the
        cause; empty if nothing is known. Waits briefly for a text: such ranks end their waits at the same time."""
        text, seen = "", {self._rank}
        deadline = time.monotonic() + _CAUSE_GRACE
        with suppress(dist.DistError):
            while rank not in seen:
                if failure := self.reports.failure(rank):
                    return f"{text}; {failure}"
                report = self.reports.waiting(rank)
                if report is not None and report.awaited:
                    seen.add(rank)
                    text += f"; rank {rank} waits for {' and '.join(f'rank {other}' for other in report.awaited)}"
                    rank = report.awaited[0]
                elif time.monotonic() > deadline:
                    break
                else:
                    time.sleep(0.01)
        return text

    def refused(self, peer: int, recoverable: bool) -> DisagreementError:
        """The error after a peer turned out to have refused this rank's call. Waits briefly for the reason, which the
        peer writes.

        Args:
            recoverable: all ranks of the call have learned of it.
        """
        error, deadline = None, time.monotonic() + _PEER_GRACE
        with suppress(dist.DistError):
            while (error := self.refusal(peer, told=True)) is None and time.monotonic() < deadline:
                time.sleep(0.005)
        what = error or (
            f"rank {peer} refused its arguments, see the error there; rank {self._rank} was waiting for it in "
            f"{self.calls.current}"
        )
        if not recoverable:
            return DisagreementError(str(what))
        error = DisagreementError(f"{what}; no rank makes this call, and the next one works")
        error.recoverable = True
        return error

    def disagreement(self, peer: int) -> DisagreementError:
        """The error after this rank's call turned out to differ from that of a peer, with descriptions of both. Waits
        briefly for that of the peer."""
        self.reports.keep_waiting()
        deadline = time.monotonic() + _PEER_GRACE
        peer_call = "something else, of which it wrote nothing"
        with suppress(dist.DistError):
            while time.monotonic() < deadline:
                if refusal := self.refusal(peer):
                    return refusal
                if (report := self.reports.waiting(peer)) is not None:
                    peer_call = str(report.call)
                    if not self._is_earlier(report.call):
                        break
                time.sleep(0.005)
        return self._different_calls(peer, peer_call)

    def refusal(self, peer: int, told: bool = False) -> DisagreementError | None:
        """The error if a peer has refused this rank's call; None if it has not.

        Args:
            told: also if it takes part in the call to tell so: a wait for such a peer goes on.
        """
        report, call = self.reports.refusals(peer), self.calls.current
        if report is None:
            return None
        key, number = key_of(call.ranks), str(call.number)
        message = report.refused.get(key, {}).get(number)
        if message is None and told:
            message = report.told.get(key, {}).get(number)
        where = "" if message is None else f"in call {call.number} of ranks {call.ranks}"
        for ranks, times, last_message in report.refused_within:
            if set(call.ranks) <= set(ranks) and times > len(self.calls.refused_within.get(tuple(ranks), ())):
                where, message = f"in a call of ranks of {tuple(ranks)}", last_message
        if not where:
            return None
        return DisagreementError(
            f"rank {peer} refused its arguments {where}: {message}; rank {self._rank} was waiting for it, with "
            f"{call.text}"
        )

    def call_mismatch(self, peer: int, seen_before: bool) -> DisagreementError | None:
        """The error if a peer that this rank waits for waits in a call from which it cannot reach this rank's call.

        Args:
            seen_before: the peer was already waiting in that call at the last poll. Otherwise its wait may just have
                ended, with the description still in the store.
        """
        report = self.reports.waiting(peer)
        if report is None:
            return None
        theirs, mine = report.call, self.calls.current
        if theirs.ranks == mine.ranks:
            # A peer in a later call has done its part of this one; its refusals are read by `refusal`.
            differs = theirs.fingerprint != mine.fingerprint and theirs.fingerprint and mine.fingerprint
            return self._different_calls(peer, str(theirs)) if theirs.number == mine.number and differs else None
        is_deadlock = (  # each waits in a call that the other has not made
            self._rank in theirs.ranks
            and theirs.number > self.calls.number_of(theirs.ranks)
            and report.numbers.get(key_of(mine.ranks), 0) < mine.number
        )
        return self._different_calls(peer, str(theirs)) if is_deadlock and seen_before else None

    def _is_earlier(self, call: CallRecord) -> bool:
        """Whether a call is before this rank's of the same ranks. A peer writes of its current call once its wait
        lasts; until then there may be the description of one before."""
        return call.ranks == self.calls.current.ranks and call.number < self.calls.current.number

    def _different_calls(self, peer: int, peer_call: str) -> DisagreementError:
        note, own_call = "", self.calls.current
        if refusals := [messages[-1] for within, messages in self.calls.refused_within.items() if peer in within]:
            note = f"; rank {self._rank} refused its arguments in an earlier call: {refusals[-1]}"
        elif peer_call == str(own_call):
            note = "; the same arguments by another plan: their topologies, settings or versions differ"
        elif _SIZES.sub("", peer_call) == _SIZES.sub("", str(own_call)):
            note = "; only sizes differ: is shape= of DTensor.from_local missing, which uneven shards need?"
        return DisagreementError(
            f"rank {self._rank} and rank {peer} made different requests: rank {self._rank} is in {own_call}; "
            f"rank {peer} is in {peer_call}{note}; no tensor of yours was written"
        )

    def peer_gone(self, rank: int) -> PeerError | None:
        """The error if a rank has failed, has left the process group before the call, or is known to be gone."""
        if error := self.failed(rank) or self.left(rank):
            return error
        # A rank whose own wait has failed may have closed its connections before it writes so.
        return self.lost(rank) if self._is_gone(rank) else None

    def failed(self, rank: int) -> PeerError | None:
        """The error if a rank has failed."""
        failure = self.reports.failure(rank)
        if failure is None:
            return None
        return PeerError(f"rank {self._rank} was waiting for rank {rank} in {self.calls.current}: {failure}")

    def left(self, rank: int) -> PeerError | None:
        """The error if a rank has left the process group without this rank's call. One that has made the call has sent
        its part of it before it left."""
        numbers, call = self.reports.left(rank), self.calls.current
        if numbers is None or (rank in call.ranks and numbers.get(key_of(call.ranks), 0) >= call.number):
            return None
        return PeerError(
            f"rank {rank} has left the process group (destroy_process_group); rank {self._rank} was waiting for it in "
            f"{call}"
        )

    def lost(self, rank: int, why: str = "") -> PeerError:
        """The error after the connection to a rank was lost: its own report if it writes one soon, or `why`."""
        late = self.why_late(rank)
        if error := self.failed(rank) or self.left(rank):
            return error
        return self._gone(rank, f"{why}{late}")

    def unreachable(self, rank: int) -> PeerError | None:
        """The error if the process of a rank is known to have ended, where the store cannot be asked for the reason."""
        if self._is_gone(rank):
            return self._gone(rank)
        return None

    def _gone(self, rank: int, why: str = "") -> PeerError:
        return PeerError(
            f"rank {rank} is gone, or has left the process group; rank {self._rank} was waiting for it in "
            f"{self.calls.current}{why}"
        )

    def peer_status(self, peer: int) -> str:
        """The known state of a peer that this rank waits for, as text for a warning."""
        report = self.reports.waiting(peer)
        if report is not None:
            return f"rank {peer} waits in {report.call}"
        theirs = self.reports.settings_of(peer)
        if theirs is None:
            return f"rank {peer} has not used shardweave in this process group"
        differences = [
            f"{name} is {value} on rank {self._rank} and {theirs.get(name)} on rank {peer}"
            for name, value in own_settings().items()
            if theirs.get(name) != value
        ]
        return "; ".join(differences) or f"rank {peer} has the same settings and waits nowhere"
