"""`make soak`: random redistributions and dispatches of all kinds on four ranks, some of them verified, while memory,
descriptors and mappings are watched.

    python -m shardweave.bench.reliability.soak --seconds 600
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...runtime import process_group_cache, statistics
from ...runtime.dtensor.redistribute import redistribute
from ...runtime.process_group_cache import ProcessGroupCache
from ..harness.markdown import table
from ..harness.ranks import Message, Send, run_ranks
from .soak_calls import Dispatches, Redistributions

RANKS = 4
REDISTRIBUTIONS, DISPATCHES = 200_000, 50_000
VERIFY_EVERY = 1000
_AGREE_EVERY = 250  # redistributions after which the ranks agree on whether the time is over
_SMALLER = 8  # limits of caches are divided by it
_SAMPLES = 8  # of memory, at equal parts of the run
_GROWTH = {
    "RSS, MiB": (0.05, 8.0), "shared memory, MiB": (0.05, 8.0), "descriptors": (0.0, 4.0), "mappings": (0.05, 40.0),
    "/dev/shm, names": (0.0, 0.0),
}  # fmt: skip
"""How much each measure may grow in the second half of a run: a share of it, or an amount, whichever is larger."""


def measures() -> dict[str, float]:
    """What this process has now."""
    fields = {}
    with open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields[name] = value
    with open("/proc/self/maps") as lines:
        mappings = sum(1 for _ in lines)
    return {
        "RSS, MiB": (int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])) / 1024,
        "shared memory, MiB": int(fields["RssShmem"].split()[0]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings,
        "/dev/shm, names": sum(f"-{os.getpid()}-" in name for name in os.listdir("/dev/shm")),
    }


def lower_limits() -> None:
    """Make caches smaller, so that they are full early in the run, and drop entries from then on: what grows after that
    has no limit."""
    smaller: dict[int, Any] = {}
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("shardweave.")]
    for names in modules:
        for name, value in list(names.items()):
            if isinstance(value, functools._lru_cache_wrapper) and (limit := value.cache_parameters()["maxsize"]):
                if id(value) not in smaller:
                    smaller[id(value)] = functools.lru_cache(max(limit // _SMALLER, 16))(value.__wrapped__)
                names[name] = smaller[id(value)]
    for cache in process_group_cache._caches:
        if isinstance(cache, ProcessGroupCache):
            cache._max_entries = max(cache._max_entries // _SMALLER, 16)
    statistics._MAX_KINDS //= _SMALLER


def _rank_main(rank: int, size: int, config: Message, send: Send) -> None:
    transports = config["transports"]
    lower_limits()
    calls, dispatches = Redistributions(config["seed"], transports), Dispatches(config["seed"], transports)
    mesh = DeviceMesh("cpu", list(range(size)), _init_backend=False)
    goals = config["redistributions"], config["dispatches"]
    start, done, samples = time.monotonic(), [0, 0], 0
    every = goals[0] / goals[1]
    while done[0] < goals[0]:
        calls.run((done[0] + 1) % config["verify_every"] == 0)
        done[0] += 1
        while done[1] < min(done[0] / every, goals[1]):
            dispatches.run((done[1] + 1) % config["verify_every"] == 0)
            done[1] += 1
        if done[0] % _AGREE_EVERY and done[0] < goals[0]:
            continue
        part = max((time.monotonic() - start) / config["seconds"], done[0] / goals[0])
        flag = DTensor.from_local(torch.tensor([part]), mesh, [Partial("max")], run_check=False)
        part = float(redistribute(flag, [Replicate()]).to_local())
        if part * _SAMPLES >= samples + 1 or part >= 1:
            samples = int(part * _SAMPLES)
            gc.collect()
            seconds, verified = time.monotonic() - start, [calls.verified, dispatches.verified]
            send({"case": f"sample {done[0]}", "done": list(done), "seconds": seconds, "verified": verified,
                  **measures()})  # fmt: skip
        if part >= 1:
            break


class Report:
    """What the ranks have sent, sample by sample."""

    def __init__(self) -> None:
        self.samples: list[list[Message]] = []

    def faults(self) -> list[str]:
        """What breaks the promises of docs/reliability.md; empty if nothing does."""
        middle, last = self.samples[len(self.samples) // 2], self.samples[-1]
        wrong = {}
        for name, (share, amount) in _GROWTH.items():
            for rank, (before, after) in enumerate(zip(middle, last, strict=True)):
                if after[name] - before[name] > max(share * before[name], amount):
                    wrong[name] = f"{name} grew: {before[name]:.1f} → {after[name]:.1f} on rank {rank}"
        return list(wrong.values())

    def print(self, goals: tuple[int, int]) -> None:
        """The largest measures of any rank over the run, the calls, and what went wrong."""
        rows = []
        for messages in self.samples:
            done, seconds = messages[0]["done"], max(message["seconds"] for message in messages)
            rows.append((f"{seconds:.0f}", *done, *(f"{max(m[name] for m in messages):.0f}" for name in _GROWTH)))
        print("\n".join(table(("seconds", "redistributions", "dispatches", *_GROWTH), rows)))
        verified = self.samples[-1][0]["verified"]
        print(
            f"\n{done[0]} redistributions and {done[1]} dispatches with their combines in {seconds:.0f} s; verified: "
            f"{verified[0]} and {verified[1]}, all right"
        )
        if done[0] < goals[0]:
            print(f"at this rate {goals[0]} and {goals[1]} take {seconds * goals[0] / done[0]:.0f} s: not run")
        faults = self.faults()
        for text in faults:
            print(f"WRONG {text}")
        print("memory, descriptors and mappings " + ("are not as promised" if faults else "flat"))


def soak(
    seconds: float,
    redistributions: int = REDISTRIBUTIONS,
    dispatches: int = DISPATCHES,
    *,
    transports: Sequence[str] = ("shared_memory", "process_group"),
    verify_every: int = VERIFY_EVERY,
    seed: int = 0,
) -> Report:
    """Run until the calls are made or the time is over. This process may have no threads.

    Raises:
        RanksFailed: a rank raised, of a wrong result too; its traceback goes to stderr.
    """
    report = Report()
    config = {"seconds": seconds, "redistributions": redistributions, "dispatches": dispatches, "seed": seed,
              "transports": list(transports), "verify_every": verify_every}  # fmt: skip
    run_ranks(_rank_main, RANKS, config, lambda case, messages: report.samples.append(messages))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="end after this time (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(f"{RANKS} ranks on {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}")
    report = soak(given.seconds, seed=given.seed)
    report.print((REDISTRIBUTIONS, DISPATCHES))
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
