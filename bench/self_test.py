"""A few redistributions on two ranks of this machine, on each world, checked: does it work here?"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from ..errors import ShardweaveError
from ..runtime.dtensor import redistribute
from ..runtime.shared_memory import why_not_here
from ..runtime.worlds import NAMES
from .ranks import Ranks, RanksFailed, Send

_SIZE = 2
_TIMEOUT = 30.0  # seconds, of machines that are busy with something else
_CASES = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Partial(), Shard(0))]


def self_test() -> list[tuple[str, float, str | None]]:
    """What was tried, the seconds it took and what went wrong, if anything: two forked ranks on each world that this
    machine could have."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return [("two ranks", 0.0, "no gloo to start them with")]
    outcomes = []
    for world in NAMES:
        if world == "shared_memory" and why_not_here():
            continue
        start = time.perf_counter()
        error = _try(world)
        outcomes.append((f"two ranks on {world}", time.perf_counter() - start, error))
    return outcomes


def _try(world: str) -> str | None:
    said: list[str] = []
    wrong: list[str] = []
    try:
        with Ranks(_rank, _SIZE, {"world": world}, _TIMEOUT) as ranks:
            ranks.supervise(lambda rank, message: wrong.extend(message["wrong"]), lambda rank, line: said.append(line))
    except (RanksFailed, ShardweaveError, OSError) as error:
        return "; ".join([str(error), *said[-3:]])
    return "; ".join(wrong) or None


def _rank(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    wrong = []
    for source, target in _CASES:
        # Of a partial every rank holds a half.
        given = distribute_tensor(whole, mesh, [source], src_data_rank=None)
        moved = redistribute(given, [target], world=config["world"])
        wanted = distribute_tensor(whole, mesh, [target], src_data_rank=None)
        if not moved.to_local().equal(wanted.to_local()):
            wrong.append(f"rank {rank}: {source} to {target} is wrong on {config['world']}")
    send({"wrong": wrong})
