"""Ranks that share no memory exchange through torch.distributed, with the exact sizes the plan states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import DisagreementError, MeetingTimeoutError, PeerError, WorldError
from .agreement import REFUSED, Agreement
from .meeting import Agree, AllGather, AllToAll, Ask, Collective, ReduceScatter, Transfer
from .shared_memory import post_failure, read_failure, read_when_posted

if TYPE_CHECKING:
    from .pending import Pending

_KEPT_POSTS = 64
_SHORTEST_WAIT = timedelta(milliseconds=1)

# Of messages on gloo, which pairs sends with receives by it: those of the user's own are others.
_TAG = 0x5EED
_NEVER_SENT = _TAG + 1


class Members(tuple[int, ...]):
    """The ranks of a process group in its order, and the group itself."""

    process_group: dist.ProcessGroup


class CollectiveWorld:
    """The ranks of the default process group, in any subsets: grouped sends and receives need no group of their own.

    One for each backend that the group has. Compiling and running never make a group; collectives use those that the
    meshes have.

    Every call posts its number and request to the store without waiting; a rank that runs a request for the first time
    reads what its peers posted for the same call and refuses if they differ.

    Where sizes follow from data, what ranks run is compared before (`Agree`): on gloo, which ends a process that gets
    more than it expects, by a message each time; elsewhere by what they post, the first time.
    """

    one_sided = False
    recycles = False
    windows = None
    name = "collective"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, backend: str) -> None:
        self.rank, self.size, self.timeout, self.backend = rank, size, timeout, backend
        self._store = store
        self._calls: dict[tuple[int, ...], int] = {}
        self._announced = ("", 0)
        self._groups: dict[tuple[int, ...], Members] = {}
        self._used: set[dist.ProcessGroup] = set()
        self.error: WorldError | None = None
        self._agreement = Agreement()
        self._agreed: set[int] = set()
        self.busy = self._left = False
        self.pending: Pending | None = None

    def node_of(self, rank: int) -> int:
        return rank

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def addressable(self, tensor: torch.Tensor) -> bool:
        return False

    def address(self, buffer: torch.Tensor) -> object:
        raise NotImplementedError("a two-sided world has no addresses")

    def open(self, address: object, nbytes: int) -> torch.Tensor:
        raise NotImplementedError("a two-sided world has no addresses")

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[object, object]:
        raise NotImplementedError("a two-sided world has no addresses")

    def offered(self, address: object, number: int) -> Sequence[object]:
        raise NotImplementedError("a two-sided world has no addresses")

    def landings(self, ranks: tuple[int, ...]) -> None:
        return None

    def announce(self, ranks: tuple[int, ...], token: int, compare: bool) -> None:
        """Post this call's request under the ranks that run it in step; if asked, compare with what the others posted.

        Raises:
            DisagreementError: a peer posted another request for the same call.
            MeetingTimeoutError: a peer posted nothing within the timeout.
        """
        call = self._calls[ranks] = self._calls.get(ranks, 0) + 1
        where = f"shardweave/calls/{self.backend}/{hash(ranks)}"
        self._announced = where, call
        slot = call % _KEPT_POSTS
        self._store.set(f"{where}/{self.rank}/{slot}", f"{call} {token}")
        for peer in ranks if compare else ():
            if peer == self.rank:
                continue
            text = read_when_posted(
                self._store, f"{where}/{peer}/{slot}", peer, self.timeout, lambda text: int(text.split()[0]) >= call
            )
            posted, theirs = map(int, text.split())
            # A peer that needs nothing from here may be far ahead and have reused the slot: nothing to compare then.
            if posted == call and theirs == REFUSED:
                raise _refused(peer, self.rank)
            if posted == call and theirs != token:
                raise _differs(peer, self.rank, token, theirs)

    def refuse(self, first_met: tuple[int, ...], company: tuple[int, ...]) -> None:
        """Post, where peers that compile the request look, that this rank's argument is wrong; wait for nobody."""
        if len(company) > 1:
            self.announce(company, REFUSED, False)

    def decline(self, ranks: tuple[int, ...]) -> None:
        """In place of an `Agree` with the others of `ranks`: this rank's argument is wrong; wait for nobody.

        Not on gloo, those that have agreed on this before are not told. Where all ranks decline alike their world lives
        on.
        """
        peers = tuple(rank for rank in ranks if rank != self.rank)
        if self.backend == "gloo":
            self._agreement.refuse(peers)
        elif peers:
            self.announce(ranks, REFUSED, False)

    def _agree(self, request: Agree) -> None:
        """
        Raises:
            DisagreementError: a peer runs something else.
            MeetingTimeoutError, PeerError: a peer did not come.
        """
        peers, token = request.peers, request.token
        ranks = tuple(sorted((*peers, self.rank)))
        if self.backend != "gloo":
            self.announce(ranks, token, token not in self._agreed)
            self._agreed.add(token)
            return
        self._calls[ranks] = self._calls.get(ranks, 0) + 1
        for peer, theirs in self._agreement.exchange(peers, token, self._messages).items():
            if theirs == REFUSED:
                raise _refused(peer, self.rank)
            if theirs != token:
                raise _differs(peer, self.rank, token, theirs)

    def knows(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Process groups that the programs bound next may use, of several with the same ranks the first.

        Those of one request, whatever was bound before: what a rank has seen is its own, and its peers choose alike.
        """
        self._groups = {}
        for group in groups:
            members = Members(dist.get_process_group_ranks(group))
            members.process_group = group
            self._groups.setdefault(tuple(sorted(members)), members)

    def group_order(self, ranks: Sequence[int]) -> Members | None:
        return self._groups.get(tuple(sorted(ranks)))

    def connect(self, ranks: tuple[int, ...], device: torch.device) -> None:
        """Exchange a byte with every rank and in every group that programs bound next may use: backends connect ranks
        when they first meet, which no captured graph can do. Collective among `ranks`.

        Raises:
            WorldError: a rank did not come.
        """
        first = ranks.index(self.rank)
        peers = ranks[first + 1 :] + ranks[:first]
        sent, came = (torch.zeros(len(peers), dtype=torch.uint8, device=device) for _ in range(2))
        each = range(len(peers))
        sends, receives = (tuple((peers[i], x[i : i + 1]) for i in each) for x in (sent, came))
        self.answer(Transfer(sends, receives, group=self.group_order(ranks)))
        for group in self._groups.values():
            if len(group) > 1 and set(group) <= set(ranks):
                sent, came = (torch.zeros(len(group), dtype=torch.uint8, device=device) for _ in range(2))
                self.answer(AllToAll(group, sent, [1] * len(group), came, [1] * len(group)))

    def _began(self, request: Collective) -> Callable[[], None]:
        assert isinstance(request.group, Members)
        group = request.group.process_group
        start = time.monotonic()

        def told(error: RuntimeError) -> WorldError:
            who = " or ".join(f"rank {rank}" for rank in self._absent(request.group))
            if time.monotonic() - start >= self.timeout:
                text = f"{who} did not come within {self.timeout:g} s; rank {self.rank} was waiting for it"
                return MeetingTimeoutError(text)
            return PeerError(f"rank {self.rank} lost {who}: {self._why(self._absent(request.group), error)}")

        def wait() -> None:
            try:
                if request[1].device.type == "cpu":
                    work.wait(timedelta(seconds=self.timeout))
                else:
                    work.wait()  # the stream waits, not this process
            except RuntimeError as error:
                raise told(error) from error

        try:
            self._used.add(group)
            work = _started(request, group)
        except RuntimeError as error:
            raise told(error) from error
        return wait

    def _absent(self, group: Sequence[int]) -> list[int]:
        """The other ranks of a group that have not announced this call; all of them if they have: a collective that
        fails does not say because of whom."""
        others = [rank for rank in group if rank != self.rank]
        where, call = self._announced
        try:
            posts = {rank: f"{where}/{rank}/{call % _KEPT_POSTS}" for rank in others}
            there = {r: self._store.get(key).decode() for r, key in posts.items() if self._store.check([key])}
        except dist.DistError:  # the store went with its rank
            return others
        return [rank for rank in others if int(there.get(rank, "0").split()[0]) < call] or others

    def answer(self, request: Ask) -> None:
        self.begin(request)()

    def begin(self, request: Ask) -> Callable[[], None]:
        """`answer`, but what it returns waits for the peers."""
        if isinstance(request, Collective):
            return self._began(request)
        if isinstance(request, Agree):
            return partial(self._agree, request)
        assert isinstance(request, Transfer)
        # A backend may connect the ranks of a group when it is first used, all of them at once: so it is the group of
        # exactly those that exchange, where there is one.
        group = None
        if isinstance(request.group, Members):
            group = request.group.process_group
            self._used.add(group)
        operations = [dist.P2POp(dist.irecv, buffer, peer, group, _TAG) for peer, buffer in request.receives]
        operations += [dist.P2POp(dist.isend, buffer, peer, group, _TAG) for peer, buffer in request.sends]
        return self._messages(operations) if operations else lambda: None

    def _messages(self, operations: list[dist.P2POp]) -> Callable[[], None]:
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            peers = sorted({operation.peer for operation in operations})
            raise PeerError(f"rank {self.rank} lost one of ranks {peers}: {self._why(peers, error)}") from error
        return partial(self._wait, operations, works)

    def _wait(self, operations: list[dist.P2POp], works: list[dist.Work]) -> None:
        if operations[0].tensor.device.type != "cpu":
            for work in works:
                work.wait()  # the stream waits, not this process
            return
        deadline = time.monotonic() + self.timeout
        for operation, work in zip(operations, works, strict=True):
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
            except RuntimeError as error:
                if time.monotonic() >= deadline:
                    raise MeetingTimeoutError(
                        f"rank {operation.peer} did not come within {self.timeout:g} s; rank {self.rank} was waiting "
                        f"for it"
                    ) from error
                why = self._why([operation.peer], error)
                raise PeerError(f"rank {self.rank} lost rank {operation.peer}: {why}") from error

    def _why(self, ranks: Iterable[int], error: RuntimeError) -> str:
        """What ranks that left said, or what torch.distributed says."""
        with suppress(dist.DistError):  # the store went with its rank
            said = [failure for rank in ranks if (failure := read_failure(self._store, rank))]
            return "; ".join(said) or str(error)
        return str(error)

    def fail(self, error: WorldError) -> None:
        self.error = self.error or error

    def leave(self) -> None:
        """After a failure, tell ranks that wait for this one, now or later, that it will not come.

        gloo tells them when it closes their connections, as it does when a wait takes too long; other backends only
        at their own timeout.
        """
        if self._left:
            return
        self._left = True
        with suppress(dist.DistError):
            post_failure(self._store, self.rank, f"rank {self.rank} failed: {self.error}")
        if self.backend != "gloo" or not self._calls:
            return
        everyone: Any = dist.distributed_c10d.GroupMember.WORLD
        for group in (everyone, *self._used):
            for peer in dist.get_process_group_ranks(group):
                if peer != self.rank and _close(group, peer):
                    break


def _refused(peer: int, rank: int) -> DisagreementError:
    return DisagreementError(
        f"rank {peer} refused: its arguments do not fit, see the error there; rank {rank} was waiting for it"
    )


def _differs(peer: int, rank: int, token: int, theirs: int) -> DisagreementError:
    return DisagreementError(
        f"rank {rank} and rank {peer} asked for different things (another mesh, shape, dtype, layout or order of "
        f"calls): requests {token:#x} and {theirs:#x}; no tensor of yours was written"
    )


def _close(group: dist.ProcessGroup, peer: int) -> bool:
    """Wait too long for what nobody sends: this closes all connections of a group, unless that to `peer` is closed."""
    try:
        dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=_NEVER_SENT).wait(_SHORTEST_WAIT)  # type: ignore[union-attr]
    except RuntimeError as error:
        return "timed out" in str(error).lower()
    return False


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def _started(request: Collective, group: dist.ProcessGroup) -> dist.Work:
    options: Any = {"group": group, "async_op": True}
    if isinstance(request, AllToAll):
        sizes = request.receive_sizes, request.send_sizes
        return dist.all_to_all_single(request.receives, request.sends, *sizes, **options)
    if isinstance(request, AllGather):
        return dist.all_gather_into_tensor(request.receives, request.sends, **options)
    if isinstance(request, ReduceScatter):
        return dist.reduce_scatter_tensor(request.receives, request.sends, op=_OPS[request.op], **options)
    return dist.all_reduce(request.values, op=_OPS[request.op], **options)
