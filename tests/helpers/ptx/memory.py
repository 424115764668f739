"""The memory that kernels access: this process's own, by address, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .forms import UNSIGNED

_LOWEST = 1 << 16  # no process has memory below it


class MemoryFault(AssertionError):
    """An access that a GPU would not survive, or that depends on the order of threads."""


class _Everything:
    """All memory of the process from `_LOWEST` on, as an array of words."""

    def __init__(self, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (_LOWEST, False), "shape": ((1 << 47) // nbytes - 1,), "typestr": f"<u{nbytes}", "version": 3,
        }  # fmt: skip


_WORDS = {nbytes: np.asarray(_Everything(nbytes)) for nbytes in (1, 2, 4, 8)}


class GlobalMemory:
    """The regions of this process's memory that kernels may access.

    Args:
        regions: of each the first address and the bytes.
    """

    def __init__(self, regions: Iterable[tuple[int, int]]) -> None:
        table = np.array(sorted(regions), dtype=np.int64).reshape(-1, 2)
        self._first, self._end = table[:, 0], table.sum(1)

    def check(self, addresses: np.ndarray, nbytes: int, text: str) -> None:
        """
        Raises:
            MemoryFault: an address is not a multiple of `nbytes`, or what is there is in no region.
        """
        at = addresses.astype(np.int64)
        if (at % nbytes).any():
            raise MemoryFault(f"{text}: {hex(int(at[at % nbytes != 0][0]))} is no multiple of {nbytes}")
        region = np.searchsorted(self._first, at, "right") - 1
        outside = (region < 0) | (at + nbytes > self._end[np.maximum(region, 0)])
        if outside.any():
            raise MemoryFault(f"{text}: {hex(int(at[outside][0]))} is in no tensor of the launch")

    @staticmethod
    def load(addresses: np.ndarray, nbytes: int) -> np.ndarray:
        return _WORDS[nbytes][(addresses - np.uint64(_LOWEST)) // np.uint64(nbytes)]

    @staticmethod
    def store(addresses: np.ndarray, values: np.ndarray) -> None:
        nbytes = values.dtype.itemsize
        _WORDS[nbytes][(addresses - np.uint64(_LOWEST)) // np.uint64(nbytes)] = values


class SharedMemory:
    """The shared memory of a block, in which two threads may not access a byte, one of them to store, without a barrier
    between. Threads may store the same value: those that have copies of one element do.

    Attributes:
        phase: the barriers of the block so far.
        warp_phases: those of each warp alone.
    """

    def __init__(self, nbytes: int, warps: int) -> None:
        self._bytes = np.zeros(nbytes + 16, np.uint8)
        self._limit = nbytes
        self.phase = 0
        self.warp_phases = np.zeros(warps, np.int64)
        self._stores, self._loads = (_Accesses(nbytes + 16) for _ in range(2))

    def load(self, addresses: np.ndarray, nbytes: int, threads: np.ndarray, text: str) -> np.ndarray:
        at = self._check(addresses, nbytes, text)
        self._stores.refuse(at, threads, self, text)
        self._loads.add(at, threads, self)
        return self._bytes[at].view(UNSIGNED[8 * nbytes])[:, 0]

    def store(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray, text: str) -> None:
        nbytes = values.dtype.itemsize
        at = self._check(addresses, nbytes, text)
        given = np.ascontiguousarray(values).view(np.uint8).reshape(-1, nbytes)
        self._loads.refuse(at, threads, self, text)
        differs = self._bytes[at] != given
        self._stores.refuse(at, threads, self, text, differs)
        self._stores.add(at, threads, self)
        self._bytes[at] = given
        if (self._bytes[at] != given).any():
            raise MemoryFault(f"{text}: two threads store different values to one address")

    def add(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray, text: str) -> np.ndarray:
        """Atomic additions, one after the other; returns what was there before each."""
        at = self._check(addresses, values.dtype.itemsize, text)
        before = np.empty_like(values)
        words = self._bytes.view(values.dtype)
        for i, word in enumerate(at[:, 0] // values.dtype.itemsize):
            before[i] = words[word]
            words[word] += values[i]
        return before

    def _check(self, addresses: np.ndarray, nbytes: int, text: str) -> np.ndarray:
        """The indices of the bytes of each access."""
        at = addresses.astype(np.int64)
        if (at % nbytes).any() or (at < 0).any() or (at + nbytes > self._limit).any():
            raise MemoryFault(f"{text}: not aligned to {nbytes}, or outside of {self._limit} bytes of shared memory")
        return at[:, None] + np.arange(nbytes)


class _Accesses:
    """The threads that accessed each byte last, and when."""

    def __init__(self, nbytes: int) -> None:
        self._thread, self._warp, self._phase, self._warp_phase = (np.full(nbytes, -1, np.int64) for _ in range(4))

    def refuse(
        self, at: np.ndarray, threads: np.ndarray, memory: SharedMemory, text: str, where: np.ndarray | bool = True
    ) -> None:
        me = threads[:, None]
        at_once = where & (self._thread[at] != me) & (self._phase[at] == memory.phase)
        at_once &= (self._warp[at] != me // 32) | (self._warp_phase[at] == memory.warp_phases[me // 32])
        if at_once.any():
            i, j = np.argwhere(at_once)[0]
            before = self._thread[at[i, j]]
            other = f"thread {before}" if before >= 0 else "others"
            raise MemoryFault(
                f"{text}: thread {threads[i]} and {other} access byte {at[i, j]} of shared memory without a barrier "
                f"between, and one of them stores"
            )

    def add(self, at: np.ndarray, threads: np.ndarray, memory: SharedMemory) -> None:
        """Several threads that load a byte are kept as thread -1, of several warps as warp -1."""
        me = np.broadcast_to(threads[:, None], at.shape)
        again = self._phase[at] == memory.phase
        thread = np.where(again & (self._thread[at] != me), -1, me)
        warp = np.where(again & (self._warp[at] != me // 32), -1, me // 32)
        self._thread[at], self._warp[at] = thread, warp
        # Lanes that load one byte in one access.
        flat, counts = np.unique(at, return_counts=True)
        self._thread[flat[counts > 1]] = -1
        self._phase[at] = memory.phase
        self._warp_phase[at] = memory.warp_phases[me // 32]
