"""`make faults`: one of four ranks dies, stops, raises or exits at each of many points, on every
transport that CPUs have. What the other ranks raise, when, and what is left behind.

    python -m shardweave.bench.reliability.faults --seconds 600
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
        named: the ranks whose text names the victim.
        left: what was left behind: names in /dev/shm, processes, sockets.
        again: whether a new group in the processes that survived worked; or what went wrong.
    """

    reached: bool = False
    errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0.0
    named: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    again: str = "not tried"

    def faults(self) -> list[str]:
        """What breaks the promises of docs/reliability.md; empty if nothing does."""
        if not self.reached:
            return ["the point was not reached"]
        others = RANKS - 1
        texts = [f"rank {rank} raised {kind or 'nothing'}: {text}" for rank, (kind, text) in self.errors.items()
                 if kind not in ("PeerError", "MeetingTimeoutError")]  # fmt: skip
        if len(self.errors) < others:
            texts.append(f"only ranks {sorted(self.errors)} ended their calls")
        if self.seconds > TIMEOUT + SLACK:
            texts.append(f"raised after {self.seconds:.1f} s")
        texts += [f"rank {rank} does not name the victim: {text}" for rank, (_, text) in self.errors.items()
                  if rank not in self.named]  # fmt: skip
        if self.left:
            texts.append(f"left: {', '.join(self.left)}")
        if self.again != "works":
            texts.append(f"new group: {self.again}")
        return texts


def all_cases() -> list[Case]:
    return [
        Case(point, kind, transport)
        for point in POINTS
        for kind in KINDS
        for transport in TRANSPORTS
        if not (point.shared and transport == "process_group")
    ]


def listening() -> set[int]:
    """The ports on which this process listens."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError), open(path) as lines:
            for words in map(str.split, lines):
                if len(words) > 9 and words[3] == "0A" and words[9] in inodes:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def _rank_main(case: Case, rank: int, port: int, pipe: Any) -> None:
    end_with_parent()
    transport = case.transport.partition(",")[0]
    os.environ.update(TRANSPORTS[case.transport], SHARDWEAVE_TIMEOUT=str(TIMEOUT), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_PATIENCE))
    _join(dist.PrefixStore("first", store), rank, RANKS)
    ports = listening()
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
        # The connections of the first group were made after the ports were counted.
        left = sorted(f"port {port}" for port in listening() - ports)
        pipe.send(("again", "works", left))
    except Exception as error:
        pipe.send(("again", f"rank {rank}: {type(error).__name__}: {error}", []))


def _join(store: dist.Store, rank: int, size: int) -> None:
    limit = timedelta(seconds=_PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    store.set(f"joined/{rank}", "")  # a rank that ends now would break the connections that others still make
    store.wait([f"joined/{other}" for other in range(size)])


def _run_rounds(case: Case, transport: str, trap: Trap | None) -> None:
    stages = Stages(transport)
    for number in range(ROUNDS):
        for name, stage in stages:
            here = trap is not None and name == case.point.stage and number == (name != "set-up")
            if trap is not None and here:
                trap.arm()
            stage(number)
            if trap is not None and here:
                trap.disarm()


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
    pids = {process.pid for process in processes.values()}
    deadline, reached, raised, victim_ended = time.monotonic() + _PATIENCE, 0.0, 0.0, False
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    try:
        survivors = list(others)
        for rank, message in _messages(pipes, deadline, lambda: len(outcome.errors) == len(others)):
            if message[0] == "reached":
                outcome.reached, reached = True, message[1]
            elif rank == VICTIM:
                victim_ended = True
            else:
                outcome.errors[rank] = message[2:]
                raised = max(raised, message[1])
        outcome.seconds = max(raised - reached, 0.0) if outcome.reached else 0.0
        outcome.named = [r for r, (_, text) in outcome.errors.items() if re.search(rf"\brank {VICTIM}\b", text)]
        if case.kind == "stop":
            os.kill(processes[VICTIM].pid or 0, signal.SIGCONT)
            # It finds that its peers have failed, and raises as well.
            if not victim_ended:
                end = time.monotonic() + 2 * TIMEOUT
                _, message = next(_messages({VICTIM: pipes[VICTIM]}, end, lambda: False), (VICTIM, ("nothing",) * 4))
                if not message[2] or message[0] != "raised":
                    outcome.left.append("the stopped rank, which did not raise when it went on")
        if case.kind == "raise":
            survivors = list(range(RANKS))
        if len(outcome.errors) == len(others):
            for rank in range(RANKS):
                with suppress(OSError):
                    pipes[rank].send(survivors)
            answers: dict[int, tuple[Any, ...]] = {}
            for rank, message in _messages(
                {rank: pipes[rank] for rank in survivors}, deadline, lambda: len(answers) == len(survivors)
            ):
                if message[0] == "again":
                    answers[rank] = message
            wrong = [text for _, text, _ in answers.values() if text != "works"]
            wrong += [f"rank {rank} did not answer" for rank in survivors if rank not in answers]
            outcome.again = "; ".join(wrong) or "works"
            outcome.left += [name for _, _, left in answers.values() for name in left]
    finally:
        for process in processes.values():
            process.join(5.0 if outcome.again == "works" else 0.0)
            if process.is_alive():
                if outcome.again == "works":
                    outcome.left.append(f"process {process.pid}")
                process.kill()
                process.join()
        outcome.left += sorted({*_segments_of(pids), *_children()})
        del store
    return outcome


def _messages(
    pipes: dict[int, Any], deadline: float, done: Callable[[], bool]
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


def _segments_of(pids: Iterable[int | None]) -> list[str]:
    """The names in /dev/shm of processes that have ended."""
    owners = {str(pid) for pid in pids}
    return [name for name in os.listdir("/dev/shm") if name.startswith("shardweave-") and name.split("-")[2] in owners]


def _children() -> list[str]:
    """The processes that this one, or one that it started, left behind."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [f"process {pid}" for pid in file.read().split()]


def _case_main(case: Case, pipe: Any) -> None:
    end_with_parent()
    os.setpgrp()
    _adopt_orphans()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # warnings of torch about connections that were lost
    os.dup2(null, 1)
    pipe.send(run_case(case))


def _adopt_orphans() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def run_cases(cases: Sequence[Case], lanes: int, seconds: float, on_outcome: Callable[[Case, Outcome], None]) -> None:
    """Run cases, several at once, until all are done or the time is over. This process may have no threads."""
    fork, waiting = get_context("fork"), list(reversed(cases))
    running: dict[Any, tuple[Case, Any]] = {}
    end = time.monotonic() + seconds
    while running or (waiting and time.monotonic() < end):
        while waiting and len(running) < lanes and time.monotonic() < end:
            case = waiting.pop()
            mine, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_case_main, args=(case, theirs))
            process.start()
            theirs.close()
            running[mine] = case, process
        pipe: Any
        for pipe in connection.wait(list(running)):
            case, process = running.pop(pipe)
            try:
                outcome = pipe.recv()
            except (EOFError, OSError):
                outcome = Outcome(again="the case itself ended")
            process.join()
            on_outcome(case, outcome)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    classes = Counter(kind or "nothing" for kind, _ in outcome.errors.values())
    text = "+".join(sorted({"PeerError": "peer", "MeetingTimeoutError": "timeout"}.get(c, c) for c in classes))
    return f"{text} {outcome.seconds:.2f} s, {len(outcome.named)}/{RANKS - 1}, {len(outcome.left)}"


def print_table(outcomes: dict[Case, Outcome], seconds: float) -> None:
    """One line for each point and transport; then what went wrong, and the figures of all cases."""
    rows = []
    for point in POINTS:
        for transport in TRANSPORTS:
            cells = [_cell(outcomes.get(Case(point, kind, transport))) for kind in KINDS]
            if cells != ["not run"] * len(KINDS):
                rows.append((point.name, transport, *cells))
    title = (
        "What the others raised (peer: PeerError, timeout: MeetingTimeoutError), seconds from the fault until the last "
        "of them raised, those that name the rank, things left behind"
    )
    try:
        from ..harness.terminal import console_of_tables, print_rows
    except ImportError:  # rich is an extra
        print(title)
        for row in (("point", "transport", *KINDS), *rows):
            print(" | ".join(row))
    else:
        print_rows(console_of_tables(), title, ("point", "transport"), KINDS, rows)
    wrong = {case: faults for case, outcome in outcomes.items() if (faults := outcome.faults())}
    for case, faults in wrong.items():
        print(f"WRONG {case}: {'; '.join(faults)}")
    for kind in KINDS:
        of_kind = sorted(o.seconds for case, o in outcomes.items() if case.kind == kind and o.reached)
        if of_kind:
            print(f"{kind}: {len(of_kind)} cases, raised after {of_kind[len(of_kind) // 2]:.2f} s in the median, "
                  f"{of_kind[-1]:.2f} s at most")  # fmt: skip
    print(
        f"{len(outcomes)} of {len(all_cases())} cases at {len({case.point for case in outcomes})} points in "
        f"{seconds:.0f} s, timeout {TIMEOUT:g} s: {len(outcomes) - len(wrong)} as promised, {len(wrong)} not"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after this time (default: 600)")
    parser.add_argument("--lanes", type=int, default=2, help="cases at once (default: 2)")
    parser.add_argument("--only", default="", help="cases whose text matches this regular expression")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases; those of a short run are a sample")
    given = parser.parse_args(arguments)
    cases = [case for case in all_cases() if re.search(given.only, str(case))]
    Random(given.seed).shuffle(cases)
    outcomes: dict[Case, Outcome] = {}
    start = time.monotonic()

    def note(case: Case, outcome: Outcome) -> None:
        outcomes[case] = outcome
        print(f"{len(outcomes)}/{len(cases)} {case}: {_cell(outcome)}", file=sys.stderr, flush=True)

    run_cases(cases, given.lanes, given.seconds, note)
    print_table(outcomes, time.monotonic() - start)
    return 1 if any(outcome.faults() for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
