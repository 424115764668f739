"""`make faults`: one of four ranks dies, stops, raises or exits at each of many points, on every transport that CPUs
have. What the other ranks raise, when, and what is left behind.

    python -m shardweave.bench.reliability.faults --seconds 600
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..harness.markdown import table
from ..harness.ranks import end_with_parent
from .fault_points import KINDS, POINTS, Point, Trap
from .fault_stages import Stages

RANKS, VICTIM, ROUNDS = 4, 1, 3
TIMEOUT = 3.0  # seconds, of every wait between ranks
SLACK = 3.0  # seconds beyond it, for a machine that is busy
_PATIENCE = 60.0  # seconds after which a case is ended
TRANSPORTS = {
    "shared_memory": {"SHARDWEAVE_SEGMENTS": "anonymous"},
    "shared_memory, named": {"SHARDWEAVE_SEGMENTS": "named"},
    "process_group": {},
    "hierarchical": {"SHARDWEAVE_NODE_SIZE": "2", "SHARDWEAVE_SEGMENTS": "named"},
}
"""The environment of each, by its name and the kind of its segments."""
_PR_SET_CHILD_SUBREAPER = 36


class Case(NamedTuple):
    point: Point
    kind: str
    transport: str

    def __str__(self) -> str:
        return f"{self.point.name}, {self.kind}, {self.transport}"


@dataclass
class Outcome:
    """What happened in a case.

    Attributes:
        reached: whether the victim came to the point.
        errors: of each other rank, the class and the text; an empty class: it raised nothing.
        seconds: from the fault until the last of them raised.
        left: what was left behind: names in /dev/shm, processes.
        again: whether a new group in the processes that survived worked; or what went wrong.
    """

    reached: bool = False
    errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    again: str = "not tried"

    def faults(self) -> list[str]:
        """What breaks the promises of docs/reliability.md; empty if nothing does."""
        if not self.reached:
            return ["the point was not reached"]
        texts = []
        for rank, (kind, text) in self.errors.items():
            if kind not in ("PeerError", "MeetingTimeoutError"):
                texts.append(f"rank {rank} raised {kind or 'nothing'}: {text}")
            elif not re.search(rf"\brank {VICTIM}\b", text):
                texts.append(f"rank {rank} does not name the victim: {text}")
        if len(self.errors) < RANKS - 1:
            texts.append(f"only ranks {sorted(self.errors)} ended their calls")
        if self.seconds > TIMEOUT + SLACK:
            texts.append(f"raised after {self.seconds:.1f} s")
        if self.left:
            texts.append(f"left: {', '.join(self.left)}")
        if self.again != "works":
            texts.append(f"new group: {self.again}")
        return texts


def all_cases() -> list[Case]:
    return [Case(point, kind, transport) for point in POINTS for kind in KINDS for transport in TRANSPORTS]


def _rank_main(case: Case, rank: int, port: int, pipe: Any) -> None:
    end_with_parent()
    transport = case.transport.partition(",")[0]
    os.environ.update(TRANSPORTS[case.transport], SHARDWEAVE_TIMEOUT=str(TIMEOUT), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_PATIENCE))
    _join(dist.PrefixStore("first", store), rank, RANKS)
    trap = None
    if rank == VICTIM:
        trap = Trap(case.point, case.kind, lambda: pipe.send(("reached", time.monotonic())))
    try:
        _run_rounds(case, transport, trap)
        pipe.send(("raised", time.monotonic(), "", ""))
    except Exception as error:  # SystemExit ends the process
        pipe.send(("raised", time.monotonic(), type(error).__name__, str(error)))
    dist.destroy_process_group()
    ranks = pipe.recv()  # of the next group, by those of this one
    if rank not in ranks:
        return
    try:
        _join(dist.PrefixStore("second", store), ranks.index(rank), len(ranks))
        Stages(transport).run_all()
        dist.destroy_process_group()
        pipe.send(("again", "works"))
    except Exception as error:
        pipe.send(("again", f"rank {rank}: {type(error).__name__}: {error}"))


def _join(store: dist.Store, rank: int, size: int) -> None:
    limit = timedelta(seconds=_PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    store.set(f"joined/{rank}", "")  # a rank that ends now would break the connections that others still make
    store.wait([f"joined/{other}" for other in range(size)])


def _run_rounds(case: Case, transport: str, trap: Trap | None) -> None:
    stages = Stages(transport)
    for number in range(ROUNDS):
        for name, stage in stages:
            here = trap if name == case.point.stage and number == (name != "set-up") else None
            if here is not None:
                here.arm()
            stage(number)
            if here is not None:
                here.disarm()


def run_case(case: Case) -> Outcome:
    """Run a case, in a process of its own: the ranks are its children."""
    outcome, fork = Outcome(), get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pipes, processes = {}, {}
    for rank in range(RANKS):
        pipes[rank], theirs = fork.Pipe()
        processes[rank] = fork.Process(target=_rank_main, args=(case, rank, port, theirs), daemon=True)
        processes[rank].start()
        theirs.close()
    # After the forks: it has a thread.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    deadline, reached, raised = time.monotonic() + _PATIENCE, 0.0, 0.0
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    try:
        victims_end = ""
        for rank, message in _messages(pipes, deadline, lambda: len(outcome.errors) == len(others)):
            if message[0] == "reached":
                outcome.reached, reached = True, message[1]
            elif rank == VICTIM:
                victims_end = message[2]
            else:
                outcome.errors[rank] = message[2:]
                raised = max(raised, message[1])
        outcome.seconds = max(raised - reached, 0.0) if outcome.reached else 0.0
        if case.kind == "stop":  # when it goes on it finds that its peers have failed, and raises as well
            os.kill(processes[VICTIM].pid or 0, signal.SIGCONT)
            end = time.monotonic() + 2 * TIMEOUT
            victims_end = victims_end or next((m[2] for _, m in _messages({VICTIM: pipes[VICTIM]}, end)), "")
            if not victims_end:
                outcome.left.append("the stopped rank, which did not raise when it went on")
        if len(outcome.errors) == len(others):
            outcome.again = _again(pipes, list(range(RANKS)) if case.kind == "raise" else others, deadline)
    finally:
        for process in processes.values():
            process.join(5.0 if outcome.again == "works" else 0.0)
            if process.is_alive():
                outcome.left += [f"process {process.pid}"] * (outcome.again == "works")
                process.kill()
                process.join()
        owners = {str(process.pid) for process in processes.values()}
        names = [name for name in os.listdir("/dev/shm") if name.startswith("shardweave-")]
        outcome.left += sorted(name for name in names if name.split("-")[2] in owners)
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            outcome.left += [f"process {pid}" for pid in children.read().split()]
        del store
    return outcome


def _again(pipes: dict[int, Any], survivors: list[int], deadline: float) -> str:
    """Whether a new group of the survivors works; or what went wrong."""
    answers: dict[int, str] = {}
    for pipe in pipes.values():
        with suppress(OSError):
            pipe.send(survivors)
    of_survivors = {rank: pipes[rank] for rank in survivors}
    for rank, message in _messages(of_survivors, deadline, lambda: len(answers) == len(survivors)):
        if message[0] == "again":
            answers[rank] = message[1]
    wrong = [text for text in answers.values() if text != "works"]
    wrong += [f"rank {rank} did not answer" for rank in survivors if rank not in answers]
    return "; ".join(wrong) or "works"


def _messages(
    pipes: dict[int, Any], deadline: float, done: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The messages of ranks until `done`, or until all have ended, or until the deadline."""
    live: dict[Any, int] = {pipe: rank for rank, pipe in pipes.items()}
    while live and not done() and time.monotonic() < deadline:
        pipe: Any
        for pipe in connection.wait(list(live), max(deadline - time.monotonic(), 0.0)):
            rank = live[pipe]
            try:
                yield rank, pipe.recv()
            except (EOFError, OSError):
                del live[pipe]


def _case_main(case: Case, pipe: Any) -> None:
    end_with_parent()
    os.setpgrp()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what ranks leave behind becomes a child of this process
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # warnings of torch about connections that were lost
    os.dup2(null, 1)
    pipe.send(run_case(case))


def run_cases(cases: Sequence[Case], seconds: float, on_outcome: Callable[[Case, Outcome], None]) -> None:
    """Run cases one after another, until all are done or the time is over. This process may have no threads."""
    fork, end = get_context("fork"), time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > end:
            return
        mine, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_case_main, args=(case, theirs))
        process.start()
        theirs.close()
        try:
            outcome = mine.recv()
        except EOFError:
            outcome = Outcome(again="the case itself ended")
        process.join()
        on_outcome(case, outcome)


def print_table(outcomes: dict[Case, Outcome], seconds: float) -> None:
    """What went wrong, and the figures of all cases, by what the rank did."""
    wrong = {case: faults for case, outcome in outcomes.items() if (faults := outcome.faults())}
    for case, faults in wrong.items():
        print(f"WRONG {case}: {'; '.join(faults)}")
    rows = []
    for kind in KINDS:
        some = [outcome for case, outcome in outcomes.items() if case.kind == kind and outcome.reached]
        times = sorted(outcome.seconds for outcome in some)
        classes = Counter(name or "nothing" for outcome in some for name, _ in outcome.errors.values())
        if some:
            raised = ", ".join(f"{name} {number}" for name, number in classes.most_common())
            rows.append((kind, len(some), f"{times[len(times) // 2]:.2f} s", f"{times[-1]:.2f} s", raised))
    print("\n".join(table(("the rank", "cases", "median until all others raised", "most", "raised"), rows)))
    print(
        f"{len(outcomes)} of {len(all_cases())} cases at {len({case.point for case in outcomes})} points in "
        f"{seconds:.0f} s, timeout {TIMEOUT:g} s: {len(outcomes) - len(wrong)} as promised, {len(wrong)} not"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after this time (default: 600)")
    parser.add_argument("--only", default="", help="cases whose text matches this regular expression")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases; those of a short run are a sample")
    given = parser.parse_args(arguments)
    cases = [case for case in all_cases() if re.search(given.only, str(case))]
    Random(given.seed).shuffle(cases)
    outcomes: dict[Case, Outcome] = {}
    start = time.monotonic()

    def note(case: Case, outcome: Outcome) -> None:
        outcomes[case] = outcome
        text = "; ".join(outcome.faults()) or f"as promised, after {outcome.seconds:.2f} s"
        print(f"{len(outcomes)}/{len(cases)} {case}: {text}", file=sys.stderr, flush=True)

    run_cases(cases, given.seconds, note)
    print_table(outcomes, time.monotonic() - start)
    return 1 if any(outcome.faults() for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
