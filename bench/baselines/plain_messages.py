"""The messages of a program between hosts, by plain `isend` and `irecv`: how fast gloo and the network carry them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

import shardweave
from shardweave.planner import FILL

Messages = list[tuple[int, torch.Tensor]]


def plain_messages(
    program: shardweave.Program, host_of: Sequence[int], rank: int, itemsize: int, host: dist.ProcessGroup
) -> Callable[[], None]:
    """A call in which this rank sends and receives, step by step, as many bytes as `program` moves between hosts, after
    which the ranks of a host wait for each other, as they do who pass on what they receive. What is in the messages,
    and what ranks of a host exchange, is left out.

    Args:
        program: of all ranks of the default group, whose positions in the mesh are the ranks.
        host_of: the host of each rank.
        itemsize: bytes of an element.
        host: the ranks of this rank's host.
    """
    steps: list[tuple[Messages, Messages]] = []
    hosts = np.asarray(host_of)
    for step in program.steps:
        sender = step.boxes.sender
        receiver = np.broadcast_to(step.boxes.receiver[:, None], sender.shape)
        far = (sender != FILL) & (hosts[sender] != hosts[receiver])
        nbytes = np.zeros((len(hosts), len(hosts)), dtype=np.int64)
        elements = np.broadcast_to(step.boxes.elements[:, None], sender.shape)[far]
        np.add.at(nbytes, (sender[far], receiver[far]), elements * itemsize)
        sends, receives = (
            [(peer, torch.zeros(int(n), dtype=torch.uint8)) for peer, n in enumerate(row) if n]
            for row in (nbytes[rank], nbytes[:, rank])
        )
        steps.append((sends, receives))

    def call() -> None:
        for sends, receives in steps:
            works = [dist.irecv(buffer, peer) for peer, buffer in receives]
            works += [dist.isend(buffer, peer) for peer, buffer in sends]
            for work in works:
                assert work is not None
                work.wait()
            dist.barrier(group=host)

    return call
