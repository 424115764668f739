"""A self-test: a few redistributions on two ranks of this machine, on each transport, with checked results."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from ..bench.harness.ranks import RanksFailed, Send, supervise
from ..errors import ArgumentError, ShardweaveError, UnsupportedError
from ..runtime.dtensor.redistribute import redistribute
from ..runtime.environment import pretended_node_size, requested_timeout
from ..runtime.transports.choose_transport import NAMES, choose_transport, why_no_memory

_SIZE = 2
_TIMEOUT = 15.0  # seconds per transport, on a busy machine
_TOTAL_TIMEOUT = 30.0  # seconds for all transports
_CASES = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Partial(), Shard(0))]


def self_test() -> list[tuple[str, float, str | None]]:
    """Run two forked ranks on each transport that is available on this machine. Ranks that hang are ended, after half a
    minute in total.

    Returns:
        For each transport a description, the seconds that it took, and the error or None.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        return [("two ranks", 0.0, "gloo is not available")]
    try:
        pretended_node_size()
        requested_timeout()
    except ArgumentError as error:  # no transport starts with an invalid setting
        return [("two ranks", 0.0, str(error))]
    outcomes: list[tuple[str, float, str | None]] = []
    left = _TOTAL_TIMEOUT
    for transport in NAMES:
        if not _is_available(transport):
            continue
        start = time.perf_counter()
        reason = f"not run: the other transports took {_TOTAL_TIMEOUT:.0f} s"
        failure = _try(transport, min(left, _TIMEOUT)) if left > 0 else reason
        seconds = time.perf_counter() - start
        left -= seconds
        outcomes.append((f"two ranks on {transport}", seconds, failure))
    return outcomes


def _is_available(transport: str) -> bool:
    """Whether two ranks of this machine may request the transport."""
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
    """Run the ranks on a transport. Returns the error, or None."""
    output: list[str] = []
    wrong: list[str] = []
    try:
        supervise(
            _rank, _SIZE, {"transport": transport},
            lambda rank, message: wrong.extend(message["wrong"]),
            lambda rank, line: output.append(line),
            within=seconds,
        )  # fmt: skip
    except (RanksFailed, ShardweaveError, OSError, dist.DistError) as error:
        # The last lines of tracebacks, which name the errors; without the lines about ranks that were stopped after it.
        errors = [line for line in output if line and not line[0].isspace() and not line.startswith("Traceback")]
        causes = [line for line in errors if not line.startswith("error: rank")]
        return "; ".join([str(error), *(causes or errors)[-2:]])
    return "; ".join(wrong) or None


def _rank(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    wrong = []
    for source, target in _CASES:
        # distribute_tensor gives every rank a half of a partial tensor.
        x = distribute_tensor(whole, mesh, [source], src_data_rank=None)
        result = redistribute(x, [target], transport=config["transport"])
        expected = distribute_tensor(whole, mesh, [target], src_data_rank=None)
        if not result.to_local().equal(expected.to_local()):
            wrong.append(f"rank {rank}: {source} to {target} is wrong on {config['transport']}")
    send({"wrong": wrong})
