"""`make soak`: all kinds of calls on four ranks, again and again, with checked results, while memory, descriptors and
mappings are watched.

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
from .fault_stages import Stages

RANKS = 4
TRANSPORTS = ("shared_memory", "process_group")
_OF_FIRST = 20  # rounds on the first transport for each on the other one
_AGREE_EVERY = 10  # rounds after which the ranks agree on whether the time is over
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
    has no limit. They begin empty: the process that this one was forked from may have used them."""
    smaller: dict[int, Any] = {}
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("shardweave.")]
    for names in modules:
        for name, value in list(names.items()):
            if not isinstance(value, functools._lru_cache_wrapper):
                continue
            value.cache_clear()
            if limit := value.cache_parameters()["maxsize"]:
                if id(value) not in smaller:
                    smaller[id(value)] = functools.lru_cache(max(limit // _SMALLER, 16))(value.__wrapped__)
                names[name] = smaller[id(value)]
    for cache in process_group_cache._caches:
        if isinstance(cache, ProcessGroupCache):
            cache._max_entries = max(cache._max_entries // _SMALLER, 16)
    statistics._MAX_KINDS //= _SMALLER


def _rank_main(rank: int, size: int, config: Message, send: Send) -> None:
    lower_limits()
    stages = [Stages(transport) for transport in TRANSPORTS]
    mesh = DeviceMesh("cpu", list(range(size)), _init_backend=False)
    start, samples, part = time.monotonic(), 0, 0.0
    for number in range(config["rounds"]):
        stages[number % _OF_FIRST == 1].run_all(number)
        if number % _AGREE_EVERY and number + 1 < config["rounds"]:
            continue
        part = max((time.monotonic() - start) / config["seconds"], (number + 1) / config["rounds"])
        flag = DTensor.from_local(torch.tensor([part]), mesh, [Partial("max")], run_check=False)
        part = float(redistribute(flag, [Replicate()]).to_local())
        if part * _SAMPLES >= samples + 1:
            samples = int(part * _SAMPLES)
            gc.collect()
            send({"case": f"{number}", "rounds": number + 1, "seconds": time.monotonic() - start, **measures()})
        if part >= 1:
            return


def faults(samples: Sequence[Sequence[Message]]) -> list[str]:
    """What breaks the promises of docs/reliability.md in what the ranks have sent; empty if nothing does."""
    middle, last = samples[len(samples) // 2], samples[-1]
    wrong = {}
    for name, (share, amount) in _GROWTH.items():
        for rank, (before, after) in enumerate(zip(middle, last, strict=True)):
            if after[name] - before[name] > max(share * before[name], amount):
                wrong[name] = f"{name} grew: {before[name]:.1f} → {after[name]:.1f} on rank {rank}"
    return list(wrong.values())


def soak(seconds: float, rounds: int = 1 << 30) -> list[list[Message]]:
    """Run until the rounds are made or the time is over; returns the measures of all ranks, sample by sample. This
    process may have no threads.

    Raises:
        RanksFailed: a rank raised, of a wrong result too; its traceback goes to stderr.
    """
    samples: list[list[Message]] = []
    config = {"seconds": seconds, "rounds": rounds}
    run_ranks(_rank_main, RANKS, config, lambda case, messages: samples.append(messages))
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="end after this time (default: 600)")
    given = parser.parse_args(arguments)
    print(f"{RANKS} ranks on {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}")
    samples = soak(given.seconds)
    rows = [
        (f"{messages[0]['seconds']:.0f}", messages[0]["rounds"],
         *(f"{max(message[name] for message in messages):.0f}" for name in _GROWTH))
        for messages in samples
    ]  # fmt: skip
    print(f"\nThe largest of {RANKS} ranks; every result was right.\n")
    print("\n".join(table(("seconds", "rounds of all calls", *_GROWTH), rows)))
    wrong = faults(samples)
    print("\n".join(f"WRONG {text}" for text in wrong) or "\nmemory, descriptors and mappings are flat")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
