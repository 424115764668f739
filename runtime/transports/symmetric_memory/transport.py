"""The transport of ranks that share symmetric memory: they synchronise on the device, and the host only enqueues."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
import torch.distributed as dist

from ....errors import DisagreementError, MeetingTimeoutError, PeerError, TransportError
from ....kernels import Code, Failure, Turn, wait_limit
from ..backend_limits import PooledOutputs, WindowPolicy
from ..buffer_pool import BufferPool
from ..comm_requests import PendingCall
from ..rendezvous.rendezvous import Rendezvous
from ..rendezvous.store_texts import malformed
from ..streams import SideStream, refuse_capture
from ..watchdog import Watchdog, WatchedWait
from .memory import Provider
from .outputs import OutputPool
from .window import ALIGNMENT, Use, Window, channel_name, pad_bytes, padding_of_pieces, window_size

_logger = logging.getLogger(__name__)


@contextmanager
def _logged(attempt: str) -> Iterator[None]:
    """Log what a device that is broken raises, so that the first error stays the one that is reported."""
    try:
        yield
    except Exception as error:
        _logger.warning("could not %s: %s: %s", attempt, type(error).__name__, error)


class SymmetricMemoryTransport:
    """Ranks of a process group that exchange through symmetric windows and synchronise on the device.

    A window belongs to a group of ranks. A step takes the smallest window of its group that is large enough; if there
    is none, all ranks of the group allocate one while they bind the program. Windows stay as long as the transport, so
    all ranks of a group take the same window for a step, whatever else they have bound. **Binding a program that needs
    a larger window is collective**: all ranks of the group bind it, in the same order among the group's programs in
    which they will run it. `prepare` allocates windows ahead.

    A call of a bound program allocates only the output, does not synchronise the host with other ranks, and may be
    captured in a CUDA graph: all counters are on the device, so that replays and calls may follow each other in any
    order that is the same on all ranks. The calls of a process are ordered by one stream; asynchronous calls run on
    another stream, which the next call joins.

    A rank whose wait times out stores rank, peer and channel in a word of the host, poisons the outputs that it works
    on, and notifies its peers, which do the same. The transport is then invalid: the next call raises, or the same call
    if the device is the CPU. A rank that refuses its arguments signals so in every window that the call may use.

    Args:
        timeout: seconds that a wait may take.
        provider: allocates the memory.

    Attributes:
        windows: whether steps push or pull.

    Raises:
        TransportError: from every call after the first failure.
    """

    one_sided = True
    name = "symmetric_memory"
    answer = None  # ranks synchronise on the device: steps yield no requests

    def __init__(self, rank: int, size: int, timeout: float, provider: Provider, rendezvous: Rendezvous) -> None:
        refuse_capture(provider.device, "the transport symmetric_memory")
        self.rank, self.size, self.timeout, self.provider = rank, size, timeout, provider
        self.rendezvous = rendezvous
        self.windows = WindowPolicy()
        self._of_group: dict[tuple[tuple[int, ...], int], list[Window]] = {}
        self._all: list[Window] = []
        self._pools: dict[tuple[int, ...], list[BufferPool]] = {}
        self._outputs: dict[tuple[int, ...], OutputPool] = {}
        self._outputs_made: Counter[tuple[int, ...]] = Counter()
        self.failure = Failure(provider.device)
        self._failed = self.failure.host_word
        self.wait_limit = wait_limit(timeout, provider.device)
        self._error: TransportError | None = None
        # On CPUs a thread of this process waits.
        self._watchdog = Watchdog(rendezvous.errors, self._end_waits) if provider.device.type == "cpu" else None
        self.busy = False
        self.side = SideStream(provider.device)
        self.pending: PendingCall | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def node_of(self, rank: int) -> int:
        return 0  # all ranks reach each other

    def window(self, ranks: tuple[int, ...], nbytes: int, halves: int = 1, exact: bool = False) -> Window:
        """The smallest window with `halves` of at least `nbytes` of a group, given by its ascending ranks. Collective
        if it has to be allocated: with `nbytes` if `exact`, else with the next power of two, so that a group has few
        windows, and the padding of pieces.

        Raises:
            DisagreementError: the ranks of the group allocate different windows.
            MeetingTimeoutError: a rank of the group did not arrive.
            UnsupportedError: it has to be allocated, while a CUDA graph is captured.
        """
        windows = self._of_group.setdefault((ranks, halves), [])
        for window in windows:  # the smallest first
            if window.nbytes >= nbytes:
                return window
        room = 0 if exact else padding_of_pieces(len(ranks))
        size = window_size(nbytes - room, exact) + room
        windows.append(self._new_window(ranks, size, halves, f"windows/{halves}/{len(windows)}"))
        window = windows[-1]
        windows.sort(key=lambda made: made.nbytes)
        return window

    def _new_window(self, ranks: tuple[int, ...], nbytes: int, halves: int, key: str) -> Window:
        memory = self._memory(ranks, pad_bytes(len(ranks)) + halves * nbytes, key)
        watch = None if self._watchdog is None else partial(WatchedWait, self._watchdog)
        window = Window(self.rank, memory, len(self._all), self.failure, halves, watch)
        self._all.append(window)
        return window

    def pool_outputs(self, ranks: tuple[int, ...], nbytes: int, number: int) -> bool:
        """Let steps of a group, given by its ascending ranks, write directly into outputs of up to `nbytes`, `number`
        of which may be in use at a time. Collective. Return False if that was so before. Else programs have to be
        bound again on all ranks.

        Raises:
            DisagreementError, MeetingTimeoutError, UnsupportedError: as for `window`.
        """
        before = self._outputs.get(ranks)
        if before is not None and before.nbytes >= nbytes and before.number >= number:
            return False
        window = self._new_window(ranks, window_size(nbytes, True), number + 1, f"outputs/{self._outputs_made[ranks]}")
        self._outputs_made[ranks] += 1
        self._outputs[ranks] = OutputPool(window, number)
        self.windows.outputs[ranks] = PooledOutputs(window.nbytes, number)
        return True

    def outputs(self, ranks: tuple[int, ...]) -> OutputPool:
        """The output pool of a group, given by its ascending ranks, which `windows.outputs` names."""
        return self._outputs[ranks]

    def buffer_pool(self, ranks: tuple[int, ...], nbytes: int, number: int) -> BufferPool:
        """A buffer pool of a group, given by its ascending ranks, with at least `number` buffers of at least `nbytes`.
        Collective if it has to be allocated; it stays as long as the transport.

        Raises:
            DisagreementError, MeetingTimeoutError, UnsupportedError: as for `window`.
        """
        of_group = self._pools.setdefault(ranks, [])
        large = [pool for pool in of_group if pool.nbytes >= nbytes and len(pool.pieces) >= number]
        if large:
            return min(large, key=lambda pool: pool.nbytes * len(pool.pieces))
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._memory(ranks, size * number, f"buffer_pools/{len(of_group)}")
        of_group.append(BufferPool(self.rank, memory, size, number))
        return of_group[-1]

    def _memory(self, ranks: tuple[int, ...], nbytes: int, key: str) -> dict[int, torch.Tensor]:
        """Allocate zeros on all ranks of a group, by rank. Collective; `key` is new to the group."""
        self.check()
        refuse_capture(self.provider.device, f"a symmetric buffer of {nbytes} bytes of ranks {ranks}")
        try:
            with torch.inference_mode(False):  # later calls write it, whatever their mode
                return self._joined(ranks, nbytes, key)
        except TransportError as error:
            self.fail(error)
            raise

    def _joined(self, ranks: tuple[int, ...], nbytes: int, key: str) -> dict[int, torch.Tensor]:
        if len(ranks) == 1:  # on its own on a node: nobody else addresses it
            return {self.rank: torch.zeros(nbytes, dtype=torch.uint8, device=self.provider.device)}
        own, handle = self.provider.make(nbytes)
        handles = self.exchange_text(key, ranks, f"{nbytes} {handle}")
        for rank, text in handles.items():
            peer_nbytes, _, handles[rank] = text.partition(" ")
            if not peer_nbytes.isdecimal():
                raise malformed(rank, text)
            if int(peer_nbytes) != nbytes:
                raise DisagreementError(
                    f"rank {self.rank} and rank {rank} made different requests (another mesh, shape, dtype, layout, "
                    f"`pooled_buffers` or order of calls): memory of {nbytes} and {peer_nbytes} bytes among ranks "
                    f"{ranks}; no tensor of yours was written"
                )
        for rank in ranks:
            # A rank that failed after its allocation will not use it.
            if rank != self.rank and (failure := self.rendezvous.reports.failure(rank)):
                call = self.rendezvous.calls.current
                raise PeerError(f"rank {self.rank} was waiting for rank {rank} in {call}: {failure}")
        name = f"{self.rendezvous.session(ranks)}/{key}"
        try:
            return self.provider.join(own, handles, name)
        except PeerError as error:
            raise PeerError(f"{error}; rank {self.rank} was in {self.rendezvous.calls.current}") from error

    def exchange_text(self, key: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        """All-gather a text among the ranks of a group, by rank. Collective; `key` is new to the group.

        Raises:
            MeetingTimeoutError: a rank did not arrive.
        """
        # The key contains the call: a rank that refuses this call may use the same `key` in the next one.
        call = self.rendezvous.calls.current
        key = f"{self.provider.device.type}/{self.rendezvous.session(ranks)}/{key}/{call.ranks}/{call.number}"
        self.rendezvous.write(f"{key}/{self.rank}", text)
        return {r: self.rendezvous.read(f"{key}/{r}", r) for r in ranks}

    def signal(self, window: Window, use: Use, fingerprint: int = 0, poison: torch.Tensor | None = None) -> None:
        """Enqueue `Window.signal`, bounded by the transport's timeout."""
        if self._watchdog is None or use not in ("acquire", "barrier"):
            window.signal(use, fingerprint, self.wait_limit, poison)
            return
        with WatchedWait(self._watchdog, partial(window.late, use)):
            window.signal(use, fingerprint, self.wait_limit, poison)

    def turn(self, fingerprint: int, send: bool = True, out: torch.Tensor | None = None) -> Turn:
        """The arguments of a launch that writes or reads a window, bounded by the transport's timeout. `send`: it is
        the last one that does so in this exchange; `out`: the output to overwrite on failure."""
        return Turn(fingerprint, self.wait_limit, send, out)

    def _end_waits(self) -> None:
        for window in self._all:
            window.end_waits()

    @property
    def error(self) -> TransportError | None:
        """The error that invalidated this transport, as far as the host knows. Does not wait."""
        if self._error is None and self._failed.value:
            code, error = self.failure.read(), None if self._watchdog is None else self._watchdog.error
            assert code is not None
            self._error = type(error)(f"{error}; outputs since then are overwritten") if error else self._error_of(code)
        return self._error

    def check(self) -> None:
        """
        Raises:
            TransportError: an earlier call failed, as far as the host knows.
        """
        error = self.error
        if error is not None:
            raise error

    def _error_of(self, code: Code) -> TransportError:
        number, channel = channel_name(code.channel)
        # The host may have made further calls before it learned of the error.
        where = f"{channel} at {self._all[number]}, in {self.rendezvous.calls.current} or a call before"
        if code.kind == "late":
            return MeetingTimeoutError(
                f"rank {code.peer} did not arrive within {self.timeout:g} s; rank {code.rank} was waiting for it "
                f"({where}); outputs since then are overwritten{self.rendezvous.errors.why_late(code.peer)}"
            )
        if code.kind == "failed":
            return PeerError(
                f"rank {code.peer} failed{self._why(code.peer)}; rank {code.rank} was waiting for it ({where}); "
                f"outputs since then are overwritten"
            )
        error = self.rendezvous.errors.disagreement(code.peer)
        return DisagreementError(f"{error} ({where}; outputs since then are overwritten)")

    def _why(self, peer: int) -> str:
        with suppress(dist.DistError):  # the rank that hosts the store is gone
            failure = self.rendezvous.reports.failure(peer)
            return f": {failure}" if failure else ""
        return ""

    def fail(self, error: TransportError) -> None:
        """Notify all peers, from here on in the stream, that this rank has failed. The first error is kept."""
        self._error = self.error or error
        self.rendezvous.reports.fail(f"rank {self.rank} failed: {self._error}")
        with _logged("signal that this rank has failed"):
            self.failure.fail()
            for window in self._all:
                window.signal_failure()

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...], all_meet: bool) -> None:
        """Enqueue in every window that the call may use a notice that this rank refuses the call. Does not wait.

        If all ranks refuse the same call, the transport stays valid.
        """
        with _logged("signal that this rank refuses a call"):
            for window in self._all:
                if set(window.ranks) <= set(participants):
                    window.refuse()
