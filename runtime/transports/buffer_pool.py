"""Memory that the ranks of a group write into, lent by each rank to one tensor at a time.

A rank lends a piece without asking anyone, and tells peers its number with what else it tells them. A piece is free
when the last tensor on it is gone, whenever the host finds that out: what read it was enqueued before, and whoever is
lent it next tells peers to write from behind that in the same stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

from ...kernels import on_device
from .base import WindowedTransport


class LendingTransport(WindowedTransport, Protocol):
    """What ranks of a token dispatcher ask of their transport."""

    def leases(self, ranks: tuple[int, ...], nbytes: int, number: int) -> Leases: ...


class _Loan:
    """What a tensor on a piece holds; with the last such tensor the piece is free.

    It holds the memory in turn: a tensor may outlive who lent it.
    """

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "_free", "_number", "_piece")

    def __init__(self, piece: torch.Tensor, free: deque[int], number: int) -> None:
        self._piece, self._free, self._number = piece, free, number
        said = {"data": (piece.data_ptr(), False), "shape": tuple(piece.shape), "typestr": "|u1", "version": 3}
        if piece.is_cuda:
            self.__cuda_array_interface__ = {**said, "strides": None}
        else:
            self.__array_interface__ = said

    def tensor(self) -> torch.Tensor:
        """A tensor that holds this, of a storage of its own."""
        if not self._piece.is_cuda:
            return torch.from_numpy(np.asarray(self))
        found = torch.as_tensor(self, device=self._piece.device)
        assert found.data_ptr() == self._piece.data_ptr(), "memory that is lent was copied"
        return found

    def __del__(self) -> None:
        # May run on any thread: a deque's append is atomic.
        self._free.append(self._number)


class Leases:
    """Memory of each rank, as pieces of one size.

    Args:
        memory: by rank, flat bytes; that of peers as this rank addresses it.

    Attributes:
        nbytes: of a piece.
        pieces: by number, by rank, uint8 [nbytes].
    """

    def __init__(self, rank: int, memory: Mapping[int, torch.Tensor], nbytes: int, number: int) -> None:
        self.nbytes = nbytes
        self.pieces = [{r: m[i * nbytes :][:nbytes] for r, m in memory.items()} for i in range(number)]
        self._memory, self._device = memory, memory[rank].device
        self._own = [piece[rank] for piece in self.pieces]
        self._addresses = {piece.data_ptr(): i for i, piece in enumerate(self._own)}
        self._free, self._of_graphs = deque(reversed(range(number))), deque[int]()
        self._streams: list[Any] = [None] * number

    def lend(self) -> torch.Tensor | None:
        """A piece, uint8, as long as any tensor on it lives; None while all are lent.

        On a GPU it is for work of the current stream, as torch's own memory is. What was lent in the capture of a CUDA
        graph, which writes it whenever it is replayed, is lent again in captures alone.
        """
        with on_device(self._device):
            captures = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        number = self._taken(captures)
        if number is None:
            return None
        if self._device.type == "cuda":
            stream, last = torch.cuda.current_stream(self._device), self._streams[number]
            # A capture begins with nothing under way, and waits for no stream but its own.
            if last is not None and last != stream and not captures:
                stream.wait_stream(last)
            self._streams[number] = stream
        return _Loan(self._own[number], self._of_graphs if captures else self._free, number).tensor()

    def _taken(self, captures: bool) -> int | None:
        for free in (self._of_graphs, self._free) if captures else (self._free,):
            with suppress(IndexError):
                return free.pop()
        return None

    def number(self, tensor: torch.Tensor) -> int | None:
        """Which of the pieces a tensor begins with; None if it is on none of them."""
        return self._addresses.get(tensor.data_ptr())
