"""`supervise`: output and messages of ranks, and ranks that die, fail or hang."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from shardweave.bench.harness.ranks import RanksFailed, Send, supervise

pytestmark = pytest.mark.multi


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    print(f"hello from {rank}")
    send({"pid": os.getpid()})
    dist.barrier()  # so that all have sent it
    if rank == 1:
        exec(config["code"], {"os": os, "time": time})
    dist.barrier()


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("", None),
        ("os._exit(0)", r"rank 1 \(pid \d+\) ended with status 0"),
        ("raise ValueError", r"rank 1 \(pid \d+\) ended with status 1"),
        ("os.kill(os.getpid(), 9)", r"rank 1 \(pid \d+\) was killed by SIGKILL"),
        ("time.sleep(100)", "not done within 3 s"),
    ],
)
def test_supervise_names_the_rank_that_failed_and_ends_the_others(code: str, failure: str | None) -> None:
    pids: dict[int, int] = {}
    output: list[str] = []
    with pytest.raises(RanksFailed, match=failure) if failure else nullcontext():
        supervise(
            rank_main, 3, {"code": code},
            lambda rank, message: pids.update({rank: message["pid"]}),
            lambda rank, line: output.append(f"{rank}: {line}"),
            within=3.0,
        )  # fmt: skip
    assert len(pids) == 3
    assert {f"{rank}: hello from {rank}" for rank in range(3)} <= set(output)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())
