"""Real processes that share pads and windows, each a rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from interpreter import patch_triton_once
from rank_preload import rank_context

from shardweave.kernels.channel import SLOT, Channel, Failure, pack

patch_triton_once()  # in ranks too
ARRIVED, RELEASED = 0, 1


class Rank:
    """One rank of `size`, with two channels to all others and windows of `words` int64 that each peer writes.

    Attributes:
        windows: [size, size, words], int64; `windows[r, p]` is in rank r's memory and written by p.
        words: [size, 2], int64, for a test's own use.
    """

    def __init__(self, rank: int, size: int, memory: dict[str, torch.Tensor], start: int) -> None:
        self.rank, self.size = rank, size
        self.windows, self.words = memory["windows"], memory["words"]
        self.peers = [p for p in range(size) if p != rank]
        self.failure = Failure(torch.device("cpu"))
        self.arrived, self.released = (self._channel(memory["pads"], c, start) for c in (ARRIVED, RELEASED))

    def _channel(self, pads: torch.Tensor, number: int, start: int) -> Channel:
        slots = [pads[number, p, self.rank - (self.rank > p)].data_ptr() for p in self.peers]
        codes = [pack(self.rank, p, number) for p in self.peers]
        channel = Channel(pads[number, self.rank], slots, codes, self.failure)
        channel.table[:2] = start
        return channel


def _main(pipe: Any, function: Callable, rank: int, size: int, memory: dict, start: int, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((function(Rank(rank, size, memory, start), *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def run_pads(
    function: Callable, size: int, *args: Any, words: int = 64, start: int = 0, timeout: float = 120
) -> list[Any]:
    """Run `function(Rank, *args)` on `size` processes whose counts start at `start`; return their results."""
    context = rank_context()
    memory = {
        "pads": torch.zeros(2, size, size - 1, SLOT, dtype=torch.int64),
        "windows": torch.full((size, size, words), -1, dtype=torch.int64),
        "words": torch.zeros(size, 2, dtype=torch.int64),
    }
    memory["pads"][..., 0] = start
    for tensor in memory.values():
        tensor.share_memory_()
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, function, rank, size, memory, start, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout), f"rank {rank} sent nothing within {timeout} s"
            results.append(pipe.recv())
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    wrong = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error]
    assert not wrong, "\n".join(wrong)
    return [value for value, _ in results]
