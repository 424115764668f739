"""BufferPool: memory that the ranks of a group write into; each rank hands out its own buffers, one tensor at a time.

A rank takes a buffer without communication and sends its number to peers with its next message. A buffer is free once
the last tensor on it is gone, whenever the host notices: its readers were enqueued before, and the message of its next
use is enqueued behind them in the same stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ...kernels import capturing
from .base import WindowedTransport


class BufferPoolTransport(WindowedTransport, Protocol):
    """A windowed transport with buffer pools, as WindowTransfer uses it."""

    def buffer_pool(self, ranks: tuple[int, ...], nbytes: int, number: int) -> BufferPool: ...


class _Buffer:
    """The owner of a tensor on a piece; when the last such tensor is gone the piece is free.

    It also holds the memory, since a tensor may outlive the pool.
    """

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "_free", "_number", "_piece")

    def __init__(self, piece: torch.Tensor, interface: dict[str, Any], free: deque[int], number: int) -> None:
        self._piece, self._free, self._number = piece, free, number
        if piece.is_cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface

    def tensor(self) -> torch.Tensor:
        """Return a tensor that holds this object, with its own storage."""
        if not self._piece.is_cuda:
            return torch.from_numpy(np.asarray(self))
        tensor = torch.as_tensor(self, device=self._piece.device)
        assert tensor.data_ptr() == self._piece.data_ptr(), "as_tensor copied a pooled buffer"
        return tensor

    def __del__(self) -> None:
        # May run on any thread; appending to a deque is atomic.
        self._free.append(self._number)


class BufferPool:
    """Memory of each rank, divided into pieces of equal size.

    Args:
        rank: this rank.
        memory: flat bytes of each rank; those of peers as this rank addresses them.
        nbytes: bytes of a piece.
        number: the number of pieces.

    Attributes:
        nbytes: bytes of a piece.
        pieces: uint8 [nbytes] by number and rank.
    """

    def __init__(self, rank: int, memory: Mapping[int, torch.Tensor], nbytes: int, number: int) -> None:
        self.nbytes = nbytes
        self.pieces = [{r: m[i * nbytes :][:nbytes] for r, m in memory.items()} for i in range(number)]
        self._memory, self._device = memory, memory[rank].device
        self._own = [piece[rank] for piece in self.pieces]
        self._interfaces: list[dict[str, Any]] = [
            {"data": (piece.data_ptr(), False), "shape": (nbytes,), "strides": None, "typestr": "|u1", "version": 3}
            for piece in self._own
        ]
        self._addresses = {piece.data_ptr(): i for i, piece in enumerate(self._own)}
        self._free, self._of_graphs = deque(reversed(range(number))), deque[int]()
        self._streams: list[Any] = [None] * number
        self._lent: set[int] = set()
        self._captured: set[int] = set()  # taken in captures, of which some are free by now

    def take(self, lend: bool = False) -> torch.Tensor | None:
        """Return a piece of this rank, uint8, in use until the last tensor on it is gone; None if all are in use.

        With `lend` it is for the caller of this library to write: see `lent`.

        On a GPU it belongs to the current stream, as torch's own memory does. A piece taken in the capture of a CUDA
        graph, whose replays write it, is reused only in captures.
        """
        captures = capturing(self._device)
        number = self._taken(captures)
        if number is None:
            return None
        if self._device.type == "cuda":
            stream, last = torch.cuda.current_stream(self._device), self._streams[number]
            # A capture cannot wait for other streams; nothing is enqueued when it begins.
            if last is not None and last != stream and not captures:
                stream.wait_stream(last)
            self._streams[number] = stream
        (self._lent.add if lend else self._lent.discard)(number)
        (self._captured.add if captures else self._captured.discard)(number)
        free = self._of_graphs if captures else self._free
        return _Buffer(self._own[number], self._interfaces[number], free, number).tensor()

    def follow(self, tensor: torch.Tensor) -> None:
        """Let the stream of the next tensor on this one's piece wait for the current stream, which waits for peers that
        read it."""
        number = self.number(tensor)
        if number is None or self._device.type != "cuda":
            return
        if not capturing(self._device):  # a capture enqueues nothing
            self._streams[number] = torch.cuda.current_stream(self._device)

    def _taken(self, captures: bool) -> int | None:
        for free in (self._of_graphs, self._free) if captures else (self._free,):
            try:
                return free.pop()
            except IndexError:  # not asked before: another thread may take the last one in between
                pass
        return None

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the piece that a tensor starts at; None if there is none."""
        return self._addresses.get(tensor.data_ptr())

    def lent(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the piece that a tensor starts at if it was taken with `lend`, else None.

        In the capture of a CUDA graph also None if it was taken outside of captures: its replays would write it again
        while peers read it.
        """
        number = self.number(tensor)
        if number not in self._lent or (number not in self._captured and capturing(self._device)):
            return None
        return number

    def captured(self, tensor: torch.Tensor) -> bool:
        """Whether the piece that a tensor starts at was taken in the capture of a CUDA graph."""
        return self.number(tensor) in self._captured
