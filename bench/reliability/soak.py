"""`make soak`: random redistributions and dispatches of all kinds on four ranks, some of them verified, while memory,
descriptors, mappings and caches are watched.

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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...runtime import process_group_cache, statistics
from ...runtime.dtensor.redistribute import redistribute
from ...runtime.process_group_cache import ProcessGroupCache
from ..harness.ranks import Message, Send, run_ranks
from .soak_calls import Dispatches, Redistributions

RANKS = 4
REDISTRIBUTIONS, DISPATCHES = 200_000, 50_000
VERIFY_EVERY = 1000
_AGREE_EVERY = 250  # redistributions after which the ranks agree on whether the time is over
_MOST_UNLIMITED = 64
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


def containers() -> Counter[str]:
    """The items of the containers of this package: globals of its modules, and attributes of its objects, of which the
    largest of each name counts."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()

    def add(name: str, value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper):
            sizes[name] = max(sizes[name], value.cache_info().currsize)
        elif hasattr(value, "__len__") and not isinstance(value, str | bytes | tuple | torch.Tensor):
            with suppress(Exception):
                sizes[name] = max(sizes[name], len(value))

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("shardweave."):
            for name, value in list(vars(module).items()):
                add(f"{module_name}.{name}", value)
    for value in gc.get_objects():
        kind = type(value)
        if str(kind.__module__).startswith("shardweave.runtime") and hasattr(value, "__dict__"):
            for name, attribute in list(vars(value).items()):
                add(f"{kind.__module__}.{kind.__qualname__}.{name}", attribute)
    return sizes


def _caches() -> Iterator[tuple[str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("shardweave."):
            for name, value in list(vars(module).items()):
                if isinstance(value, functools._lru_cache_wrapper | ProcessGroupCache):
                    yield f"{module_name}.{name}", value


def unbounded_caches() -> list[str]:
    """The caches of this package that exceed their limit, or have none and many entries: those of the kernels' launches
    have one for each setting of a program."""
    wrong = []
    for name, cache in _caches():
        if isinstance(cache, ProcessGroupCache):
            if len(cache) > cache._max_entries:
                wrong.append(f"{name} has {len(cache)} entries, above {cache._max_entries}")
        elif cache.cache_info().maxsize is None and cache.cache_info().currsize > _MOST_UNLIMITED:
            wrong.append(f"{name} has no limit, and {cache.cache_info().currsize} entries")
    return wrong


def growing(half: Counter[str], end: Counter[str]) -> list[str]:
    """The containers that grew in the second half, by so much that they may have no bound."""
    return [
        f"{name}: {half[name]} → {size}" for name, size in end.items() if size > 1000 and size > 1.25 * half[name] + 500
    ]


def lower_limits() -> None:
    """Make caches smaller, so that they are full early in the run, and drop entries from then on. They begin empty: the
    process that this one was forked from may have used them."""
    smaller: dict[int, Any] = {}
    for _, cache in list(_caches()):
        if isinstance(cache, ProcessGroupCache):
            continue
        cache.cache_clear()
        limit, typed = cache.cache_parameters()["maxsize"], cache.cache_parameters()["typed"]
        if limit is not None:
            smaller[id(cache)] = functools.lru_cache(max(limit // _SMALLER, 16), typed)(cache.__wrapped__)
    for name, module in list(sys.modules.items()):
        if name.startswith("shardweave."):
            vars(module).update({n: smaller[id(v)] for n, v in vars(module).items() if id(v) in smaller})
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
    start, cpu, done, samples, half = time.monotonic(), time.process_time(), [0, 0], 0, Counter[str]()
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
            if not half and part >= 0.5:
                half = containers()
            seconds = time.monotonic() - start
            send({"case": f"sample {done[0]}", "done": list(done), "seconds": seconds, **measures()})
        if part >= 1:
            break
    seconds = time.monotonic() - start
    send({"case": "end", "done": done, "seconds": seconds, "cpu": time.process_time() - cpu,
          "verified": [calls.verified, dispatches.verified], "unbounded": unbounded_caches(),
          "growing": growing(half, containers())})  # fmt: skip


class Report:
    """What the ranks have sent."""

    def __init__(self) -> None:
        self.samples: list[list[Message]] = []
        self.end: list[Message] = []

    def add(self, case: str, messages: list[Message]) -> None:
        if case == "end":
            self.end = messages
        else:
            self.samples.append(messages)

    def faults(self) -> list[str]:
        """What breaks the promises of docs/reliability.md; empty if nothing does."""
        if not self.end:
            return ["the run did not end"]
        wrong = [text for message in self.end for text in (*message["unbounded"], *message["growing"])]
        wrong += [f"{name} grew: {text}" for name, text in self._grown().items()]
        return list(dict.fromkeys(wrong))

    def _grown(self) -> dict[str, str]:
        middle, last = self.samples[len(self.samples) // 2], self.samples[-1]
        wrong = {}
        for name, (share, amount) in _GROWTH.items():
            for rank, (before, after) in enumerate(zip(middle, last, strict=True)):
                if after[name] - before[name] > max(share * before[name], amount):
                    wrong[name] = f"{before[name]:.1f} → {after[name]:.1f} on rank {rank}"
        return wrong

    def print(self, goals: tuple[int, int]) -> None:
        """The largest measures of any rank over the run, the calls, and what went wrong."""
        rows = []
        for messages in self.samples:
            done, seconds = messages[0]["done"], max(m["seconds"] for m in messages)
            figures = [f"{max(m[name] for m in messages):.0f}" for name in _GROWTH]
            rows.append((f"{seconds:.0f}", f"{done[0]}", f"{done[1]}", *figures))
        columns = ("seconds", "redistributions", "dispatches", *_GROWTH)
        title = f"The largest of {len(self.end)} ranks"
        try:
            from ..harness.terminal import console_of_tables, print_rows
        except ImportError:  # rich is an extra
            print(title)
            for row in (columns, *rows):
                print(" | ".join(row))
        else:
            print_rows(console_of_tables(), title, (), columns, rows)
        done, verified = self.end[0]["done"], self.end[0]["verified"]
        seconds, cpu = (max(message[name] for message in self.end) for name in ("seconds", "cpu"))
        print(
            f"{done[0]} redistributions and {done[1]} dispatches with their combines in {seconds:.0f} s, {cpu:.0f} s "
            f"of a core for each rank; verified: {verified[0]} and {verified[1]}, all right"
        )
        if done[0] < goals[0]:
            print(f"at this rate {goals[0]} and {goals[1]} take {seconds * goals[0] / max(done[0], 1):.0f} s: not run")
        faults = self.faults()
        for text in faults:
            print(f"WRONG {text}")
        print("memory, descriptors, mappings and caches " + ("are not as promised" if faults else "flat"))


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
    run_ranks(_rank_main, RANKS, config, report.add)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="end after this time (default: 600)")
    parser.add_argument("--redistributions", type=int, default=REDISTRIBUTIONS)
    parser.add_argument("--dispatches", type=int, default=DISPATCHES)
    parser.add_argument("--verify-every", type=int, default=VERIFY_EVERY)
    parser.add_argument("--transports", default="shared_memory,process_group", help="separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(f"{RANKS} ranks on {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}")
    report = soak(
        given.seconds, given.redistributions, given.dispatches, transports=given.transports.split(","),
        verify_every=given.verify_every, seed=given.seed,
    )  # fmt: skip
    report.print((given.redistributions, given.dispatches))
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
