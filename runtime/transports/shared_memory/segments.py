"""Shared-memory segments that one process owns and others map, and futex waits on them.

Segments are anonymous if the system lets peers open them, and named otherwise. Their names contain a random token of
the process, which peers get through the process group's store. A peer maps a segment only if it has that token and
belongs to its own user: a process may have ended, and another one may have its number, descriptors or names.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import re
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import NamedTuple

import numpy as np
import torch

from ....errors import TransportError
from ...environment import requested_segments
from ..own_limits import own_limit

NAMED_FOLDER = "/dev/shm"
_serial = itertools.count(1)  # of this process's named segments


def process_namespace() -> int:
    """The id of the process namespace: equal for processes that see each other under the same process ids."""
    return os.stat("/proc/self/ns/pid").st_ino


def _count_anew() -> None:
    global _serial
    _serial = itertools.count(1)


os.register_at_fork(after_in_child=_count_anew)


def uses_names() -> bool:
    """Whether segments need names: requested by SHARDWEAVE_SEGMENTS, or because `/proc/<pid>/fd` belongs to root.

    Raises:
        ArgumentError: SHARDWEAVE_SEGMENTS is neither "anonymous" nor "named".
    """
    if (requested := requested_segments()) is not None:
        return requested == "named"
    # It belongs to root in processes that are not dumpable.
    return os.stat("/proc/self/fd").st_uid != os.geteuid()


_tokens: dict[int, str] = {}


def process_token() -> str:
    """A random text of this process."""
    return _tokens.setdefault(os.getpid(), secrets.token_hex(8))


class SegmentKey(NamedTuple):
    """What a peer needs to map a segment.

    Attributes:
        pid: the process that owns it.
        handle: its number among the process's descriptors, or among its named segments.
        named: whether it has a name in `NAMED_FOLDER`.
        token: of the process.
    """

    pid: int
    handle: int
    named: bool
    token: str

    @classmethod
    def parse(cls, text: str) -> SegmentKey | None:
        """The key that `str` made this text of; None if it is something else."""
        match = re.fullmatch(r"(\d{1,10}) (\d{1,10}) (anonymous|named) ([0-9a-f]{16})", text, re.ASCII)
        return match and cls(int(match[1]), int(match[2]), match[3] == "named", match[4])

    def __str__(self) -> str:
        return f"{self.pid} {self.handle} {'named' if self.named else 'anonymous'} {self.token}"

    @property
    def path(self) -> str:
        if self.named:
            return f"{NAMED_FOLDER}/shardweave-{process_namespace()}-{self.pid}-{self.handle}-{self.token}"
        return f"/proc/{self.pid}/fd/{self.handle}"


class Segment:
    """A segment mapped into this process, which peers open by `key`.

    An anonymous segment (memfd) is released with its last user, however that ends. A named segment is unlinked when its
    process exits or its transport fails, by a peer that notices its death, or by the next process that creates one.

    Args:
        reserve: allocate the pages of a named segment now. Otherwise each part has to be reserved before it is first
            used, and again after `give_back`.

    Raises:
        TransportError: there is not enough shared memory.
    """

    def __init__(self, name: str, nbytes: int, named: bool, reserve: bool = True) -> None:
        self.nbytes = nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pid, token = os.getpid(), process_token()
        if named:
            self.key = SegmentKey(pid, next(_serial), named, token)
            if self.key.handle == 1:
                unlink_names_of_the_dead()
                unlink_names(pid)  # of an earlier process with this id
                # Not atexit, which children of multiprocessing do not run. A forked child does not run this.
                Finalize(None, unlink_names, args=(pid,), exitpriority=0)
            try:
                self._descriptor = os.open(self.key.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TransportError(f"shared memory in {NAMED_FOLDER}: {own_limit(error) or error}") from error
        else:
            # The descriptor stays open, because peers open it.
            try:
                self._descriptor = os.memfd_create(f"{name}-{token}", os.MFD_CLOEXEC)
            except OSError as error:
                raise TransportError(f"{nbytes} bytes of shared memory: {own_limit(error) or error}") from error
            self.key = SegmentKey(pid, self._descriptor, named, token)
        self.named = named
        try:
            os.ftruncate(self._descriptor, nbytes)
            if reserve:
                self.reserve(0, nbytes)
            self.map = mmap.mmap(self._descriptor, nbytes)
        except OSError as error:
            where = f" in {NAMED_FOLDER}" if named else ""
            raise TransportError(f"{nbytes} bytes of shared memory{where}: {own_limit(error) or error}") from error
        self.bytes = bytes_of(self.map)
        self.address = self.bytes.data_ptr()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A finalizing interpreter has cleared the modules; the system closes what is open.
        if not is_finalizing() and hasattr(self, "named") and self.key.pid == os.getpid():
            with suppress(OSError):
                os.close(self._descriptor)
            if self.named:
                with suppress(OSError):
                    os.unlink(self.key.path)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a part: in a named segment, access to a page that cannot be allocated is a bus error.

        Raises:
            OSError: there is not enough shared memory.
        """
        if self.named:
            os.posix_fallocate(self._descriptor, offset, nbytes)

    def resident(self, offset: int, nbytes: int) -> int:
        """The bytes of pages that a part has: in a named segment all of them (`reserve`)."""
        return nbytes if self.named else _resident(self.address + offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the system, even if peers have them mapped. They are zeros when used again."""
        self.map.madvise(mmap.MADV_REMOVE, offset, nbytes)


class PrivateSegment:
    """Memory of this process alone.

    Raises:
        TransportError: there is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.map = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TransportError(f"{nbytes} bytes of memory: {own_limit(error) or error}") from error
        self.address = bytes_of(self.map).data_ptr()

    def reserve(self, offset: int, nbytes: int) -> None:
        """Does nothing: pages are allocated on use."""

    def resident(self, offset: int, nbytes: int) -> int:
        """The bytes of pages that a part has."""
        return _resident(self.address + offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the system. They are zeros when used again."""
        self.map.madvise(mmap.MADV_DONTNEED, offset, nbytes)


def bytes_of(mapped: mmap.mmap) -> torch.Tensor:
    """uint8 [nbytes]: a whole mapping, as a tensor that may be written outside of inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def open_segment(key: SegmentKey, owner: str = "a peer") -> mmap.mmap:
    """Map a peer's whole segment. `owner`: the peer, for errors.

    Raises:
        FileNotFoundError: it is gone; what is there in its place has another token.
        PermissionError: this process may not open it, or it belongs to another user.
        TransportError: this process has run out of descriptors or of address space.
    """
    try:
        return _open_segment(key)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        if limit := own_limit(error):
            raise TransportError(
                f"mapping the memory of {owner}: {limit}, or SHARDWEAVE_TRANSPORT=process_group, which maps none"
            ) from error
        raise FileNotFoundError(f"{key.path} is no segment now: {error}") from error  # a directory, a socket, …


def _open_segment(key: SegmentKey) -> mmap.mmap:
    descriptor = os.open(key.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status, opened = os.fstat(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")
        if key.token not in os.path.basename(opened):
            raise FileNotFoundError(f"{key.path} is {opened} now")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{key.path} belongs to user {status.st_uid}, this process to {os.geteuid()}")
        return mmap.mmap(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def unlink_names(pid: int) -> None:
    """Remove the names of a process's segments; processes that have mapped them keep the memory."""
    for name, owner in _names():
        if owner == pid:
            with suppress(OSError):
                os.unlink(f"{NAMED_FOLDER}/{name}")


def unlink_names_of_the_dead() -> None:
    for pid in {owner for _, owner in _names()}:
        if not is_running(pid):
            unlink_names(pid)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie; where that cannot be read, whether it exists."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process has no free descriptors, say
        try:
            os.kill(pid, 0)  # asks only
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def _names() -> list[tuple[str, int]]:
    pattern = re.compile(rf"shardweave-{process_namespace()}-(\d+)-\d+-[0-9a-f]+")
    try:
        matches = map(pattern.fullmatch, os.listdir(NAMED_FOLDER))
    except OSError:  # there is none, or this process has no free descriptors: names stay for the next process
        return []
    return [(match[0], int(match[1])) for match in matches if match]


_X86_64 = 202
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


if platform.system() == "Linux":
    _libc = ctypes.CDLL(None)
    _syscall, _mincore = _libc.syscall, _libc.mincore
    _syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Timespec)]
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _resident(address: int, nbytes: int) -> int:
    """The bytes of pages in memory of a range of this process that begins at a page; all of them where the system does
    not tell. Pages that were swapped out are not in memory."""
    of_pages = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)  # the lowest bit of each: whether it is there
    if platform.system() != "Linux" or _mincore(address, nbytes, of_pages.ctypes.data):
        return nbytes
    return int(np.count_nonzero(of_pages & 1)) * mmap.PAGESIZE


def sleep_on(address: int, value: int, seconds: float) -> None:
    """Sleep until `wake`, at most for `seconds`, if the 32-bit word at `address` is `value` modulo 2**32."""
    whole, rest = divmod(seconds, 1)
    _syscall(_X86_64, address, _WAIT, value & 0xFFFFFFFF, _Timespec(int(whole), int(rest * 1e9)))


def wake(address: int) -> None:
    """Wake all processes that sleep on the word at `address`."""
    _syscall(_X86_64, address, _WAKE, _ALL_WAITERS, None)
