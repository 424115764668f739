"""Ranks that reach each other's memory meet on the device: the host enqueues, and learns nothing from its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from ...errors import DisagreementError, MeetingTimeoutError, PeerError, TransportError
from ...kernels import Code, Failure, polls_within
from .base import Barrier, CommRequest, PendingCall
from .buffer_pool import BufferPool
from .capabilities import WindowPolicy
from .rendezvous import Rendezvous
from .streams import SideStream
from .symmetric_memory import Provider
from .symmetric_window import ALIGNMENT, Use, Window, channel_name, pad_bytes, window_size
from .wait_watcher import WaitWatcher


class SymmetricMemoryTransport:
    """The ranks of a process group whose memory comes from a provider.

    Steps go through windows (`WindowStep`). A window belongs to a group of ranks; a step takes the group's smallest
    that is large enough, and where none is, all ranks of the group make one as they bind the program. So a group's
    windows only grow, what a step takes never changes, and all ranks of the group take the same, whatever else they
    have bound. Windows stay for as long as the transport. **Binding a program that needs a larger one is collective**:
    all ranks of the group bind it, in the same order among the group's programs, as they are going to run it. `prepare`
    makes windows ahead.

    Calls of a program that is bound allocate nothing but the output, meet nobody on the host, and may be captured in a
    CUDA graph: all counts are on the device, so replays and calls may follow each other in any order that is the same
    on all ranks. All calls of one process are ordered by one stream; those that are waited for later run on another,
    which the next call joins.

    A rank that waits in vain leaves rank, peer and channel in a word of the host, overwrites the outputs it works on,
    and tells its peers, which do the same: the transport is dead, and the next call raises, or the same call where the
    device is the CPU. A rank that refuses its arguments says so in every window that the call may use.

    Attributes:
        windows: whether steps push or pull.

    Raises:
        TransportError: from every call after the first failure.
    """

    one_sided = True
    recycles = False
    name = "symmetric_memory"
    backend = ""

    def __init__(self, rank: int, size: int, timeout: float, provider: Provider, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.timeout, self.provider = rank, size, timeout, provider
        self.rendezvous = rendezvous
        self.windows = WindowPolicy()
        self._of_group: dict[tuple[int, ...], list[Window]] = {}
        self._all: list[Window] = []
        self._pools: dict[tuple[int, ...], list[BufferPool]] = {}
        self.failure = Failure(provider.device)
        self.polls = polls_within(timeout, provider.device)
        self._error: TransportError | None = None
        # On CPUs it is a thread of this process that waits.
        self._watcher = WaitWatcher(rendezvous, self._end_waits) if provider.device.type == "cpu" else None
        self.busy = False
        self.side = SideStream(provider.device)
        self.pending: PendingCall | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def addressable(self, tensor: torch.Tensor) -> bool:
        return False

    def address(self, buffer: torch.Tensor) -> object:
        raise NotImplementedError("steps go through windows: buffers have no addresses")

    def open(self, address: object, nbytes: int) -> torch.Tensor:
        raise NotImplementedError("steps go through windows: buffers have no addresses")

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[object, object]:
        raise NotImplementedError("steps go through windows: buffers have no addresses")

    def offered(self, address: object, number: int) -> Sequence[object]:
        raise NotImplementedError("steps go through windows: buffers have no addresses")

    def node_of(self, rank: int) -> int:
        return 0  # all reach each other

    def group_order(self, ranks: Sequence[int]) -> None:
        return None

    def receive_buffers(self, ranks: tuple[int, ...]) -> None:
        return None

    def answer(self, request: CommRequest) -> None:
        raise NotImplementedError("ranks meet on the device: steps ask nothing of the host")

    def begin(self, request: CommRequest) -> Callable[[], None]:
        assert request == Barrier((), 0, None), "ranks meet on the device: steps ask nothing of the host"
        return lambda: None

    def window(self, ranks: tuple[int, ...], nbytes: int) -> Window:
        """The window of a group, of ascending ranks, for steps that need `nbytes`. Collective where there is none yet.

        Raises:
            DisagreementError: the ranks of the group are at different windows.
            MeetingTimeoutError: a rank of the group did not come.
        """
        windows = self._of_group.setdefault(ranks, [])
        for window in windows:  # the smallest first
            if window.nbytes >= nbytes:
                return window
        memory = self._memory(ranks, pad_bytes(len(ranks)) + window_size(nbytes), f"windows/{len(windows)}")
        windows.append(Window(self.rank, memory, len(self._all), self.failure))
        self._all.append(windows[-1])
        return windows[-1]

    def buffer_pool(self, ranks: tuple[int, ...], nbytes: int, number: int) -> BufferPool:
        """Return a pool of at least `number` pieces of at least `nbytes` bytes on each of a group's ascending ranks.

        Collective if there is none yet. The pool lives as long as the transport.

        Raises:
            DisagreementError, MeetingTimeoutError: as for `window`.
        """
        of_group = self._pools.setdefault(ranks, [])
        large = [pool for pool in of_group if pool.nbytes >= nbytes and len(pool.pieces) >= number]
        if large:
            return min(large, key=lambda pool: pool.nbytes * len(pool.pieces))
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._memory(ranks, size * number, f"buffer_pools/{len(of_group)}")
        of_group.append(BufferPool(self.rank, memory, size, number))
        return of_group[-1]

    def _memory(self, ranks: tuple[int, ...], nbytes: int, where: str) -> dict[int, torch.Tensor]:
        """By rank, zeros of each of a group, which all ask for them; `where` is new to the group."""
        self.check()
        try:
            with torch.inference_mode(False):  # it is written for as long as the transport lives
                return self._joined(ranks, nbytes, where)
        except TransportError as error:
            self.fail(error)
            raise

    def _joined(self, ranks: tuple[int, ...], nbytes: int, where: str) -> dict[int, torch.Tensor]:
        own, text = self.provider.make(nbytes)
        told = self.told(where, ranks, f"{nbytes} {text}")
        for rank, said in told.items():
            theirs, _, told[rank] = said.partition(" ")
            if int(theirs) != nbytes:
                raise DisagreementError(
                    f"rank {self.rank} and rank {rank} asked for different things (another mesh, shape, dtype, layout, "
                    f"`pooled_buffers` or order of calls): memory of {nbytes} and {theirs} bytes among ranks {ranks}; "
                    f"no tensor of yours was written"
                )
        for rank in ranks:
            # Who has failed does not use what it made.
            if rank != self.rank and (failure := self.rendezvous.failure(rank)):
                raise PeerError(f"rank {self.rank} was waiting for rank {rank}: {failure}")
        return self.provider.join(own, told, f"{self.session(ranks)}/{where}")

    def session(self, ranks: tuple[int, ...]) -> str:
        """What a group's keys in the store begin with. The first time all its ranks call."""
        return self.rendezvous.meet(ranks)

    def told(self, where: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        """What each rank of a group, which all call, says at a place that nobody has used before.

        Raises:
            MeetingTimeoutError: a rank did not come.
        """
        # Of one call: who refuses it may make the next one, and ask for the same.
        call = self.rendezvous.call
        where = f"{self.provider.device.type}/{self.session(ranks)}/{where}/{call.ranks}/{call.number}"
        self.rendezvous.store.set(f"{where}/{self.rank}", text)
        return {r: self.rendezvous.read(f"{where}/{r}", r) for r in ranks}

    def signal(self, window: Window, use: Use, fingerprint: int = 0, poison: torch.Tensor | None = None) -> None:
        if self._watcher is None or use not in ("enter", "meet"):
            window.signal(use, fingerprint, self.polls, poison)
            return
        self._watcher.began(partial(window.late, use))
        try:
            window.signal(use, fingerprint, self.polls, poison)
        finally:
            self._watcher.ended()

    def _end_waits(self) -> None:
        for window in self._all:
            window.end_waits()

    @property
    def error(self) -> TransportError | None:
        """What ended this transport, as far as the host knows; nothing is waited for."""
        if self._error is None:
            code = self.failure.read()
            if code is not None:
                found = None if self._watcher is None else self._watcher.error
                self._error = type(found)(f"{found}; outputs since then are overwritten") if found else self._told(code)
        return self._error

    def check(self) -> None:
        """
        Raises:
            TransportError: the transport is dead, as far as the host knows.
        """
        error = self.error
        if error is not None:
            raise error

    def _told(self, code: Code) -> TransportError:
        number, tells = channel_name(code.channel)
        where = f"{tells} at {self._all[number]}"
        if code.kind == "late":
            return MeetingTimeoutError(
                f"rank {code.peer} did not come within {self.timeout:g} s; rank {code.rank} was waiting for it "
                f"({where}); outputs since then are overwritten"
            )
        if code.kind == "failed":
            return PeerError(
                f"rank {code.peer} failed{self._why(code.peer)}; rank {code.rank} was waiting for it ({where}); "
                f"outputs since then are overwritten"
            )
        error = self.rendezvous.disagreement(code.peer)
        return DisagreementError(f"{error} ({where}; outputs since then are overwritten)")

    def _why(self, peer: int) -> str:
        with suppress(dist.DistError):  # the store went with its rank
            failure = self.rendezvous.failure(peer)
            return f": {failure}" if failure else ""
        return ""

    def fail(self, error: TransportError) -> None:
        """Tell every peer, from here on in the stream, that this rank will not come. The first error stays."""
        self._error = self.error or error
        self.rendezvous.fail(f"rank {self.rank} failed: {self._error}")
        # A device that is broken itself says nothing more; the error that is on its way tells of it.
        with suppress(RuntimeError):
            self.failure.fail()
            for window in self._all:
                window.say_failed()

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...]) -> None:
        """Enqueue in every window that the call may use that this rank does not make it; wait for nobody.

        Where all ranks refuse alike their transport lives on.
        """
        with suppress(RuntimeError):  # as in `fail`
            for window in self._all:
                if set(window.ranks) <= set(participants):
                    window.refuse()
