"""Ranks that share no memory exchange through torch.distributed, with the exact sizes the plan states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import DisagreementError, WorldError
from .meeting import Meet, Transfer
from .shared_memory import read_when_posted

_KEPT_POSTS = 64


class CollectiveWorld:
    """The ranks of the default process group, in any subsets: grouped sends and receives need no group of their own.

    Every call posts its number and request to the store without waiting; a rank that runs a request for the first time
    reads what its peers posted for the same call and refuses if they differ.
    """

    one_sided = False
    recycles = False
    name = "collective"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        self._calls: dict[tuple[int, ...], int] = {}
        self.error: WorldError | None = None
        self.busy = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def address(self, buffer: torch.Tensor) -> object:
        raise NotImplementedError("a two-sided world has no addresses")

    def open(self, address: object, nbytes: int) -> torch.Tensor:
        raise NotImplementedError("a two-sided world has no addresses")

    def landings(self, ranks: tuple[int, ...]) -> None:
        return None

    def announce(self, ranks: tuple[int, ...], peers: tuple[int, ...], token: int, compare: bool) -> None:
        """Post this call's request under the ranks of its mesh; if asked, compare with what the peers posted.

        Raises:
            DisagreementError: a peer posted another request for the same call.
            MeetingTimeoutError: a peer posted nothing within the timeout.
        """
        call = self._calls[ranks] = self._calls.get(ranks, 0) + 1
        where = f"shardweave/calls/{hash(ranks)}"
        slot = call % _KEPT_POSTS
        self._store.set(f"{where}/{self.rank}/{slot}", f"{call} {token}")
        for peer in peers if compare else ():
            text = read_when_posted(
                self._store, f"{where}/{peer}/{slot}", peer, self.timeout, lambda text: int(text.split()[0]) >= call
            )
            posted, theirs = map(int, text.split())
            # A peer that needs nothing from here may be far ahead and have reused the slot: nothing to compare then.
            if posted == call and theirs != token:
                raise DisagreementError(
                    f"rank {self.rank} and rank {peer} asked for different things (another mesh, shape, dtype, layout "
                    f"or order of calls): requests {token:#x} and {theirs:#x}; no tensor of yours was written"
                )

    def answer(self, request: Meet | Transfer) -> None:
        assert isinstance(request, Transfer)
        operations = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in request.receives]
        operations += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in request.sends]
        if not operations:
            return
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def fail(self, error: WorldError) -> None:
        self.error = self.error or error
