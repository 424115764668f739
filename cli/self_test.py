"""A few redistributions on two ranks of this machine, on each transport, checked: does it work here?"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from ..bench.harness.ranks import Ranks, RanksFailed, Send
from ..errors import ArgumentError, ShardweaveError, UnsupportedError
from ..runtime.dtensor.redistribute import redistribute
from ..runtime.environment import pretended_node_size, requested_timeout
from ..runtime.transports.select import why_no_memory
from ..runtime.transports.selection_rule import NAMES, choose_transport

_SIZE = 2
_TIMEOUT = 15.0  # seconds that one transport may take, on machines that are busy with something else
_ALL = 30.0  # seconds that all may take
_CASES = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Partial(), Shard(0))]


def self_test() -> list[tuple[str, float, str | None]]:
    """What was tried, the seconds it took and what went wrong, if anything: two forked ranks on each transport that
    they may ask for on this machine. Those that hang are ended, after half a minute in all."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return [("two ranks", 0.0, "no gloo to start them with")]
    try:
        pretended_node_size()
        requested_timeout()
    except ArgumentError as unset:  # no transport starts then
        return [("two ranks", 0.0, str(unset))]
    outcomes: list[tuple[str, float, str | None]] = []
    left = _ALL
    for transport in NAMES:
        if not _allowed(transport):
            continue
        start = time.perf_counter()
        error = _try(transport, min(left, _TIMEOUT)) if left > 0 else f"not tried: the others took {_ALL:.0f} s"
        took = time.perf_counter() - start
        left -= took
        outcomes.append((f"two ranks on {transport}", took, error))
    return outcomes


def _allowed(transport: str) -> bool:
    """Whether two ranks of this machine that ask for it are not refused."""
    node_size, memory = pretended_node_size(), why_no_memory(torch.device("cpu"), transport)
    try:
        choose_transport(
            transport, range(_SIZE), 0, lambda rank: rank // node_size if node_size else 0,
            no_memory=memory, no_messages=None, node_size=node_size,
        )  # fmt: skip
    except UnsupportedError:
        return False
    return True


def _try(transport: str, seconds: float) -> str | None:
    said: list[str] = []
    wrong: list[str] = []
    try:
        with Ranks(_rank, _SIZE, {"transport": transport}, seconds) as ranks:
            ranks.supervise(
                lambda rank, message: wrong.extend(message["wrong"]),
                lambda rank, line: said.append(line),
                within=seconds,
            )
    except (RanksFailed, ShardweaveError, OSError, dist.DistError) as error:
        # Of a rank's traceback its last line alone, which names the error; not who stopped after whom, in which order.
        told = [line for line in said if line and not line[0].isspace() and not line.startswith("Traceback")]
        causes = [line for line in told if not line.startswith("error: rank")]
        return "; ".join([str(error), *(causes or told)[-2:]])
    return "; ".join(wrong) or None


def _rank(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    wrong = []
    for source, target in _CASES:
        # Of a partial every rank holds a half.
        given = distribute_tensor(whole, mesh, [source], src_data_rank=None)
        moved = redistribute(given, [target], transport=config["transport"])
        wanted = distribute_tensor(whole, mesh, [target], src_data_rank=None)
        if not moved.to_local().equal(wanted.to_local()):
            wrong.append(f"rank {rank}: {source} to {target} is wrong on {config['transport']}")
    send({"wrong": wrong})
