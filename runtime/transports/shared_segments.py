"""Memory that one process owns and others of the machine map: anonymous where the system lets them, named otherwise."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import re
from contextlib import suppress
from multiprocessing.util import Finalize

import numpy as np
import torch

from ...errors import TransportError
from ..environment import requested_segments

NAMED_FOLDER = "/dev/shm"
_serial = itertools.count(1)


def process_namespace() -> int:
    """Equal for processes that see each other under the same process ids."""
    return os.stat("/proc/self/ns/pid").st_ino


def uses_names() -> bool:
    """Whether peers can only open this process's segments by name: asked for, or its `/proc/<pid>/fd` is root's.

    Raises:
        ArgumentError: SHARDWEAVE_SEGMENTS is neither "anonymous" nor "named".
    """
    if (asked := requested_segments()) is not None:
        return asked == "named"
    # So it is with processes that may not be looked into ("not dumpable").
    return os.stat("/proc/self/fd").st_uid != os.geteuid()


class Segment:
    """Memory mapped here, that peers open by `path`.

    An anonymous one (memfd) goes with its last user, however that ends. A named one is unlinked when its process exits
    or its transport fails, by a peer that finds it dead, or by the next process that makes one.

    Args:
        reserve: take the pages of a named one now. Otherwise each part is reserved before it is first touched, and
            again after it was given back.

    Attributes:
        handle: with the process id and `named`, what `segment_path` makes the path of.

    Raises:
        TransportError: no room.
    """

    def __init__(self, name: str, nbytes: int, named: bool, reserve: bool = True) -> None:
        self.nbytes = nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if named:
            self.handle = next(_serial)
            self.path = segment_path(os.getpid(), self.handle, named)
            if self.handle == 1:
                unlink_names_of_the_dead()
                unlink_names(os.getpid())  # of an earlier process of this number
                # Not atexit, which the children of multiprocessing leave without; not run in a forked child.
                Finalize(None, unlink_names, args=(os.getpid(),), exitpriority=0)
            try:
                self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TransportError(f"shared memory in {NAMED_FOLDER}: {error}") from error
        else:
            # The descriptor stays open: it is what peers open.
            self.handle = self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
            self.path = segment_path(os.getpid(), self.handle, named)
        self.owner, self.named = os.getpid(), named
        try:
            os.ftruncate(self._descriptor, nbytes)
            if reserve:
                self.reserve(0, nbytes)
            self.map = mmap.mmap(self._descriptor, nbytes)
        except OSError as error:
            where = f" in {NAMED_FOLDER}" if named else ""
            raise TransportError(f"{nbytes} bytes of shared memory{where}: {error}") from error
        self.bytes = bytes_of(self.map)
        self.address = self.bytes.data_ptr()

    def __del__(self) -> None:
        if hasattr(self, "named") and self.owner == os.getpid():
            with suppress(OSError):
                os.close(self._descriptor)
            if self.named:
                with suppress(OSError):
                    os.unlink(self.path)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Have the pages of a part there: of a named segment, one that is not there when it is touched is a bus error.

        Raises:
            OSError: no room for them.
        """
        if self.named:
            os.posix_fallocate(self._descriptor, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Give pages back to the system, whoever has them mapped. Touched again they are zeros."""
        self.map.madvise(mmap.MADV_REMOVE, offset, nbytes)


def segment_path(pid: int, handle: int, named: bool) -> str:
    if named:
        return f"{NAMED_FOLDER}/shardweave-{process_namespace()}-{pid}-{handle}"
    return f"/proc/{pid}/fd/{handle}"


def bytes_of(mapped: mmap.mmap) -> torch.Tensor:
    """All of it, flat; to be written at any time, whatever mode this is called in."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def open_segment(path: str) -> mmap.mmap:
    """Map a peer's whole segment."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def unlink_names(pid: int) -> None:
    """Remove the names of a process's segments; who has mapped them keeps the memory."""
    for name, owner in _names():
        if owner == pid:
            with suppress(OSError):
                os.unlink(f"{NAMED_FOLDER}/{name}")


def unlink_names_of_the_dead() -> None:
    for pid in {owner for _, owner in _names()}:
        if not os.path.exists(f"/proc/{pid}"):
            unlink_names(pid)


def _names() -> list[tuple[str, int]]:
    pattern = re.compile(rf"shardweave-{process_namespace()}-(\d+)-\d+")
    found = map(pattern.fullmatch, os.listdir(NAMED_FOLDER) if os.path.isdir(NAMED_FOLDER) else [])
    return [(match[0], int(match[1])) for match in found if match]


_X86_64 = 202
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


if platform.system() == "Linux":
    _syscall = ctypes.CDLL(None).syscall
    _syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Timespec)]


def sleep_on(address: int, value: int, seconds: float) -> None:
    """Sleep until `wake`, `seconds` at most; not at all unless the 32-bit word at `address` is `value` modulo 2**32."""
    whole, rest = divmod(seconds, 1)
    _syscall(_X86_64, address, _WAIT, value & 0xFFFFFFFF, _Timespec(int(whole), int(rest * 1e9)))


def wake(address: int) -> None:
    """End the sleep of all processes that sleep on the word at `address`."""
    _syscall(_X86_64, address, _WAKE, _EVERYONE, None)
