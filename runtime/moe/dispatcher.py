"""Tokens to the ranks that have their experts, and back: dispatch and combine, both with gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, UnsupportedError, shown
from ..executor.call import refuse
from ..executor.run import ExclusiveCall, run_to_end
from ..statistics import stats
from ..transports.in_process import InProcessTransport, run_all
from ..transports.select import AnyTransport, current_transports, why_not_backend
from ..transports.streams import order_on
from .config import DispatchLayout, DispatchSettings, spelled_out
from .engine import TokenEngine, placed
from .routed import RoutedTokens
from .transfer import RUNS, TokenRank
from .transfer_fixed import slab_rank, with_splits
from .transfer_push import PushingRank
from .transfer_window import WindowRank
from .validate import check_combine, check_dispatch

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TokenDispatcher(TokenEngine):
    """Expert-parallel dispatch and combine among the ranks of a process group.

    Every rank makes the same dispatchers in the same order, and calls the same methods in the same order, with tensors
    that need gradients alike; T may differ, and be 0. Nothing on the way depends on a number that the host has read,
    but for the CPU's own copies.

    y = combine(expert(dispatch(x))) is, for each token, over ranks ascending the float32 sum of the sums of its entries
    there, in order of k and rounded to the dtype. Ids may repeat within a token: each is an entry of its own.

    Args:
        group_or_mesh: a process group, a 1-D DeviceMesh, or None for the default group. All of its ranks construct
            one, with equal arguments.
        num_experts: E. Expert e is on the rank that has it by torch.chunk's rule made even: the first E mod W ranks
            have one more.
        top_k, hidden: K, H.
        max_tokens: the largest T of any rank.
        dtype: float32, bfloat16 or float16.
        capacity: rows of each rank's buffer, or, a float, a factor of max_tokens * top_k; rounded up to `align`.
            Default: the worst case.
        expert_capacity: rows of a group at most.
        align: rows that groups begin and end at a multiple of.
        overflow: "raise": `check`, or the second dispatch after, raises CapacityError, on all ranks alike, if rows had
            no room or ids were bad; of the last two dispatches `check` alone does. Of dispatches that a CUDA graph
            replays nothing is raised: `routed.dropped` and `routed.bad_ids` tell. "drop": their part of the result is
            zero, and so are their gradients. Of a group the rows after its first expert_capacity are dropped, then
            those beyond the buffer; rows are in order of source rank, token and k. Bad ids act as -1.
        layout: "grouped", or "batched": x is [S_local, C, H], C being expert_capacity rounded up to `align`.
        expert_map: the experts that each rank has, where some are on several or not in order. A rank sends to its own
            copy, else to copy r mod n of n.
        save: what backward keeps of `routed.x`. "lease": the buffer that peers wrote, which other dispatches cannot
            have until backward is done with it. "copy": a copy of it; the buffer itself is free at once. "redispatch":
            nothing of what experts do within `with routed.kept():`, but x, [T, H], which backward of combine sends once
            more; not under torch.compile. With all three, combine keeps expert_output for the gradient of weights (not
            with weighted=False), the weights of rows, and routing: integers. Under torch.compile `routed.x` is a copy.
        leases: with transport="symmetric_memory", so many dispatches' `routed.x` may be buffers that peers wrote, each
            until the last tensor on it is gone. While all are lent, rows are copied out of a window, and
            `shardweave.stats().copies` counts it. One will do where a layer's rows are gone before the next layer's
            come: in inference, under activation checkpointing, with save="redispatch"; where backward keeps them, as
            many as layers. Dispatchers of one group share them, and they stay as long as the process group. What CUDA
            graphs were captured with serves captures alone from then on. On a GPU such a buffer is for the stream of
            its dispatch: `record_stream` does nothing there, so streams that read it are waited for before the last
            tensor on it goes. Elsewhere buffers are as many as are needed.
        slab_capacity: of transports whose ranks send: rows that a rank sends to another at most, or, a float, a factor
            of max_tokens * top_k / W. Slabs of so many rows travel whole, and the host reads nothing; of the rows of a
            rank for another those after so many, in order of slot, token and k, have no room, as with the other
            capacities, and before them. `explain` has the bytes of either. Transports whose ranks write into each
            other's memory need no slabs, and drop nothing by this.
        splits: of transports whose ranks send. "host": slabs of exact size, for which the host reads the counts once
            for each dispatch. "slabs": of one size, `slab_capacity`, or with room for all rows of a rank. Default:
            slabs of one size with `slab_capacity`; else on CPUs "host", on GPUs the cheaper by a topology's prices,
            which `explain` states: slabs for a few tokens.
        zero_rows: True: rows from `routed.num_rows` on are zero, in `routed.x`, in `routed.weights` and in the gradient
            of `expert_output`, so that experts may work by all rows, as nn.Linear does: a weight's gradient sums over
            all of them, and 0 * NaN is NaN. False: they are not initialised, which is enough for experts by groups.
            Default: True with a `capacity` of up to 1.5 * max_tokens * top_k rows, where it costs little beside
            dispatch and combine; the number of ranks does not count. Batched buffers have no such rows.
        device: default: the CPU.
        transport: "shared_memory", "process_group", "hierarchical" or "symmetric_memory"; default: by what the ranks
            share, as for `redistribute`. "symmetric_memory" has ranks push into each other's memory and meet on the
            device, so that the host waits for no peer and calls like one before may be captured in a CUDA graph; where
            the ranks are on several nodes, slabs go between all of them as in "process_group".

    Raises:
        ArgumentError: a number or name that is not allowed.
        UnsupportedError: the process group cannot carry tensors of the device; there is no process group.
    """

    @spelled_out()
    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str = "cpu",
        transport: str | None = None,
        **settings: Unpack[DispatchSettings],
    ) -> None:
        if not dist.is_initialized():
            raise UnsupportedError(
                "TokenDispatcher: torch.distributed is not initialised; call init_process_group first, or take a "
                "VirtualTokenDispatcher, which has all ranks in one process"
            )
        group = group_or_mesh
        if group is not None and not isinstance(group, DeviceMesh | dist.ProcessGroup):
            # What new_group returns to a rank that is not in the group is none.
            raise ArgumentError(
                f"group_or_mesh: {shown(group)}; allowed: a process group that has this rank, a 1-D DeviceMesh, or None"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"group_or_mesh: a mesh of {group.ndim} dims; allowed: 1, such as mesh['ep']")
            group = group.get_group()
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        rank = dist.get_rank()
        if rank not in ranks:
            raise ArgumentError(f"group_or_mesh: ranks {ranks}; allowed: one that has this rank, {rank}")
        agreed = DispatchLayout.of(len(ranks), **settings)
        device = placed(device)
        self._transport: AnyTransport | InProcessTransport = InProcessTransport()
        name, number, why = "alone", 0, ""
        if len(ranks) > 1:
            obstacle = why_not_backend(device, transport)
            if obstacle is not None:
                raise UnsupportedError(f"TokenDispatcher: {obstacle}; allowed: gloo or nccl")
            chosen, _ = current_transports().choose(ranks, device, transport)
            self._transport, name = chosen, chosen.name
            number = current_transports().number_dispatcher(ranks)
            asked = settings.get("splits") is not None or agreed.slab_capacity is not None
            if device.type == "cuda" and not chosen.one_sided and not asked:
                agreed, why = with_splits(agreed, current_transports().nodes_of(ranks))
        self._ranks, self._company = ranks, tuple(sorted(ranks))
        self._words = (
            f"token dispatcher {number} of these ranks: {agreed.num_experts} experts, top "
            f"{agreed.top_k}, hidden {agreed.hidden}, {agreed.max_tokens} tokens at most, {agreed.dtype}"
        )
        self._said = {run: f"{said} of {self._words}" for run, said in RUNS.items()}
        text = f"token dispatch, {agreed.num_experts} experts, hidden {agreed.hidden}"
        self._kind = stats().kind(text, name, lambda: (text, 0, None))
        part: type[TokenRank] = PushingRank if self._transport.one_sided else slab_rank(agreed)
        if self._transport.one_sided and self._transport.windows is not None:
            part = WindowRank
        self._order = order_on(device)
        me, token = ranks.index(rank), agreed.token(number)
        with torch.inference_mode(False):  # what it keeps is written for as long as it lives
            if isinstance(self._transport, InProcessTransport):
                made = part(agreed, self._transport, ranks, me, device, token)
            else:
                with self._transport.rendezvous.making_ready(self._company, lambda: f"making {self._words}"):
                    made = part(agreed, self._transport, ranks, me, device, token)
        super().__init__(agreed, [made], name, why)
        if self._order is not None:
            self._order.join()  # what was uploaded is read by calls on other streams

    def run(self, what: int, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        transport, (run,) = self._transport, runs
        if self._order is not None:
            self._order.join(self)
        if isinstance(transport, InProcessTransport):
            return [run_all({self._ranks[0]: run})[self._ranks[0]]]
        while transport.pending is not None:
            transport.pending.finish()
        if (error := transport.error) is not None:
            raise error
        stats().calls[transport.name] += 1
        self._kind.calls += 1
        with ExclusiveCall(transport, self._kind):
            transport.rendezvous.begin(self._company, self.parts[0].token + what, self._said[what])
            return [run_to_end(run, transport.answer)]

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> RoutedTokens:
        """Send each token's row to the ranks that have its experts.

        Args:
            x: [T, H] of the dispatcher's dtype.
            topk_ids: int32 or int64 [T, K]; -1 is none.
            topk_weights: floats [T, K].

        Raises:
            ArgumentError: a shape or dtype that is not allowed; peers are told, but where ranks meet on the device.
            CapacityError: an earlier dispatch lost tokens, with overflow="raise".
            TransportError: a peer died, did not come, or asked for something else.
        """
        with self._telling():
            check_dispatch(self.layout, self.parts[0].device, x, topk_ids, topk_weights)
        return self._dispatch([x], [topk_ids], [topk_weights])[0]

    def combine(
        self,
        expert_output: torch.Tensor,
        routed: RoutedTokens,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        weighted: bool = True,
    ) -> torch.Tensor:
        """[T, H], the weighted sum of each token's rows of all ranks' `expert_output`, plus `add`.

        With `zero_rows=False`, rows from `routed.num_rows` on are not initialised, in `routed.x` and in the gradient of
        `expert_output` alike. Experts that go by groups, as `torch._grouped_mm` does, never see them. What goes by all
        rows asks for `zero_rows=True`, or masks both:

            there = torch.arange(len(routed.x), device=routed.x.device)[:, None] < routed.num_rows
            output = torch.where(there, f(torch.where(there, routed.x, 0)), 0)

        SHARDWEAVE_POISON_ROWS=1 fills these rows with NaN, so that code that reads them is found.

        Args:
            expert_output: of the shape and dtype of `routed.x`. Only rows of tokens are read.
            routed: of a dispatch; a result may be combined several times.
            out: [T, H], where no gradients are recorded.
            add: [T, H], added last.
            weighted: False where the experts applied `routed.weights`.

        Raises:
            ArgumentError, TransportError: as for `dispatch`.
        """
        with self._telling():
            part = self.parts[0]
            check_combine(self.layout, part.device, (self.handle, part.me), expert_output, routed, out, add)
        return self._combine([expert_output], [routed], [out], [add], weighted)[0]

    def check(self) -> None:
        """Wait for the dispatches so far.

        Raises:
            CapacityError: with overflow="raise", one of them dropped rows or had bad ids. Each is raised once.
            TransportError: a peer did not come, or asked for something else.
        """
        super().check()
        if not isinstance(self._transport, InProcessTransport) and self._transport.error is not None:
            raise self._transport.error

    def _telling(self) -> _Telling:
        return _Telling(self._transport, self._company)


class _Telling:
    """Peers are told when this rank refuses an argument."""

    def __init__(self, transport: AnyTransport | InProcessTransport, participants: tuple[int, ...]) -> None:
        self._transport, self._company = transport, participants

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ArgumentError) and not isinstance(self._transport, InProcessTransport):
            refuse(self._transport, self._company, self._company, error)
