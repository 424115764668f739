"""Tokens to the ranks that have their experts, and back: dispatch and combine, both with gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from ..errors import ArgumentError, CapacityError, UnsupportedError
from .in_process import InProcessWorld, run_all
from .pending import Turn
from .statistics import stats
from .token_autograd import Combine, Dispatch, combine_into
from .token_layout import DispatchLayout
from .token_memory import RowsAgain, unpack
from .token_ops import by_rank, register, routing_length, state_of
from .token_pushes import PushingRank
from .token_rank import TokenRank
from .token_routing import Sent
from .token_slabs import SlabRank
from .worlds import AnyWorld, current_worlds, why_not_backend

_WAYS = {
    PushingRank: "rows pushed straight to their group at the owner",
    SlabRank: "one slab of exact size for each pair of ranks; the host reads the counts once for each dispatch",
}
LATEST = 2
"""Dispatches after which lost tokens are raised at the latest."""


@dataclass(frozen=True)
class TokenLoad:
    """How tokens were spread, of all ranks; the same on all of them.

    Attributes:
        per_slot: int64 [S], tokens for each slot, dropped ones counted.
        per_rank: int64 [W], tokens for each rank.
        imbalance: float32 [], the largest of per_rank over their mean; 1 without tokens.
    """

    per_slot: torch.Tensor
    per_rank: torch.Tensor
    imbalance: torch.Tensor


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """What a rank's experts get. A pytree.

    Rows from `num_rows` on are not initialised: mask them, never multiply by them.

    Attributes:
        x: [R, H], rows grouped by slot, then by source rank, token and k; padding rows are zero. Batched: [S_local, C,
            H]. Differentiable.
        weights: float32 [R] (batched [S_local, C]), each row's weight, 0 for padding; for experts that apply it
            themselves. Differentiable.
        topk_weights: float32 [T, K], what this rank dispatched.
    """

    x: torch.Tensor
    weights: torch.Tensor
    topk_weights: torch.Tensor
    _sent: Sent
    _layout: DispatchLayout
    _of: tuple[int, int]
    """The number of its dispatcher, and of the rank of that."""
    _tokens: torch.Tensor | None = None
    """Where they are dispatched again in backward: what was."""
    _again: RowsAgain | None = None

    def kept(self) -> AbstractContextManager[Any]:
        """A context for the experts, in which autograd saves of `x` no more than the dispatcher's `save` says.

        With save="redispatch" it saves nothing on the memory of `x`, which is free once this object, `x` and what was
        made of them are dropped. With the others it does nothing.
        """
        if self._again is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._again.pack(self.x), unpack)

    @property
    def offsets(self) -> torch.Tensor:
        """int32 [S_local], where each group ends, padding included, as `torch._grouped_mm` takes them."""
        return self._sent.groups.offsets

    @property
    def counts(self) -> torch.Tensor:
        """int64 [S_local], rows of each group."""
        return self._sent.groups.counts

    @property
    def padded_counts(self) -> torch.Tensor:
        """int64 [S_local], rows of each group, padding included."""
        return self._sent.groups.padded_counts

    @property
    def num_rows(self) -> torch.Tensor:
        """int32 [1], where the last group ends."""
        return self._sent.groups.num_rows

    @property
    def dropped(self) -> torch.Tensor:
        """int64 [], rows of all ranks together that had no room; equal on all ranks."""
        return self._sent.groups.lost[0]

    @property
    def bad_ids(self) -> torch.Tensor:
        """int64 [], ids of all ranks together that are no expert's; equal on all ranks."""
        return self._sent.groups.lost[1]

    def load(self) -> TokenLoad:
        """How this dispatch's tokens were spread; no communication, nothing is read by the host."""
        per_slot = self._sent.matrix[:, :-1].sum(0)
        running = torch.nn.functional.pad(per_slot.cumsum(0), (1, 0))
        bounds = self._layout.bounds
        per_rank = torch.stack([running[b] - running[a] for a, b in zip(bounds, bounds[1:], strict=False)])
        mean = per_rank.sum() / self._layout.ranks
        return TokenLoad(per_slot, per_rank, torch.where(mean > 0, per_rank.amax() / mean, 1.0))


def _flatten(routed: RoutedTokens) -> tuple[list[Any], Any]:
    parts = [routed.x, routed.weights, routed.topk_weights, *routed._sent.tensors()]
    if routed._tokens is None:
        return parts, (routed._layout, routed._of, None)
    return [*parts, routed._tokens], (routed._layout, routed._of, routed._again)


def _unflatten(parts: Iterable[Any], context: Any) -> RoutedTokens:
    x, weights, topk_weights, *sent = parts
    layout, of, again = context
    if again is None:
        return RoutedTokens(x, weights, topk_weights, Sent.of(sent), layout, of)
    return RoutedTokens(x, weights, topk_weights, Sent.of(sent[:-1]), layout, of, sent[-1], again)


_pytree.register_pytree_node(RoutedTokens, _flatten, _unflatten)


class _Losses:
    """Lost tokens of the dispatches so far, on their way to the host; read once the device has passed them."""

    def __init__(self, layout: DispatchLayout) -> None:
        self._layout = layout
        self._waiting: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._calls = 0

    def add(self, lost: torch.Tensor) -> None:
        if self._layout.overflow != "raise" or _capturing(lost.device):
            return
        event = None
        if lost.device.type == "cuda":
            host = torch.empty(2, dtype=torch.int64, pin_memory=True)
            host.copy_(lost, non_blocking=True)
            lost, event = host, torch.cuda.Event()
            event.record()
        else:
            lost = lost.clone()  # the operator's belongs to its caller
        self._waiting.append((self._calls, lost, event))
        self._calls += 1

    def check(self, later: int) -> None:
        """Raise for dispatches that are at least `later` calls ago."""
        if self._waiting and _capturing(self._waiting[0][1].device):
            return
        while self._waiting and self._waiting[0][0] + later <= self._calls:
            call, lost, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            dropped, bad = lost.tolist()
            if dropped or bad:
                raise CapacityError(
                    f"dispatch {call}: {dropped} rows had no room (capacity: {self._layout.rows} rows for each rank, "
                    f"expert_capacity: {self._layout.expert_capacity}) and {bad} ids were not in -1 to "
                    f'{self._layout.num_experts - 1}, all ranks together; overflow="drop" goes on without them'
                )


def _capturing(device: torch.device) -> bool:
    """Whether what is enqueued now becomes part of a CUDA graph, of which the host learns nothing."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Dispatcher:
    """What real and virtual ranks have in common. Everything is a list: one for each rank in this process."""

    def __init__(self, layout: DispatchLayout, parts: Sequence[TokenRank], name: str) -> None:
        self.layout, self.parts, self._name = layout, parts, name
        self._losses = _Losses(layout)
        self.handle, self.state = register(self), state_of(parts[0].world, parts[0].device)

    def before_dispatch(self) -> None:
        self._losses.check(LATEST)

    def after_dispatch(self, lost: torch.Tensor) -> None:
        self._losses.add(lost)

    def run(self, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Wait for the dispatches so far.

        Raises:
            CapacityError: with overflow="raise", one of them dropped rows or had bad ids. Each is raised once.
        """
        self._losses.check(0)

    def explain(self) -> str:
        """The settings, and the memory that they take on each rank."""
        layout = self.layout
        slots = [b - a for a, b in zip(layout.bounds, layout.bounds[1:], strict=False)]
        held = f"{slots[0]}" if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
        most = layout.max_tokens * layout.top_k
        lines = [
            f"token dispatch over {layout.ranks} ranks, {self._name}: {layout.num_experts} experts in "
            f"{layout.bounds[-1]} slots, {held} for each rank; top {layout.top_k}, hidden {layout.hidden}, "
            f"{str(layout.dtype).removeprefix('torch.')}",
            f"  {_WAYS[type(self.parts[0])]}",
            f"  {layout.rows} rows for each rank "
            f"(all tokens of all ranks: {layout.ranks * most}), aligned to {layout.align}, "
            f"{'batched' if layout.batched else 'grouped'}",
            f"  expert capacity: {layout.expert_capacity if layout.expert_capacity is not None else 'no limit'}; "
            f"overflow: {layout.overflow}; save: {layout.save}",
            "  memory of a rank, bytes at most:",
            *[f"    {nbytes:>16,}  {what}" for what, nbytes in layout.nbytes(self.parts[0].in_slabs).items()],
        ]
        return "\n".join(lines)

    def _dispatch(
        self, xs: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> list[RoutedTokens]:
        layout = self.layout
        again = layout.save == "redispatch"
        if again and torch.compiler.is_compiling():
            raise UnsupportedError('save="redispatch" under torch.compile; allowed: "lease", "copy"')
        weights = [w.float() for w in weights]
        given = Dispatch.apply(self, *xs, *weights, *ids)
        found = []
        by_part = by_rank(given, 2 + routing_length(self))
        for part, tokens, w, (x, *sent) in zip(self.parts, xs, weights, by_part, strict=True):
            numbers = sent[0]
            if layout.batched:
                slots = layout.bounds[part.me + 1] - layout.bounds[part.me]
                assert layout.expert_capacity is not None
                shape = slots, layout.expert_capacity
                n = shape[0] * shape[1]
                x, numbers = x[:n].view(*shape, layout.hidden), numbers[:n].view(shape)
            kept = (tokens.detach(), RowsAgain(x)) if again else ()
            found.append(RoutedTokens(x, numbers, w, Sent.of(sent), layout, (self.handle, part.me), *kept))
        return found

    def _combine(
        self,
        values: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        outs: Sequence[torch.Tensor | None],
        adds: Sequence[torch.Tensor | None],
        weighted: bool,
    ) -> list[torch.Tensor]:
        layout = self.layout
        flat = []
        for v in values:
            if layout.batched:
                v = v.reshape(-1, layout.hidden)
                if len(v) < layout.rows:  # a rank with fewer slots than others
                    v = torch.cat([v, v.new_zeros(layout.rows - len(v), layout.hidden)])
            flat.append(v)
        weights: list[Any] = [r.topk_weights if weighted else None for r in routed]
        routing = [tensor for r in routed for tensor in r._sent.tensors()[1:]]
        adds = list(adds)
        given = [o for o in outs if o is not None]
        if given:
            if len(given) < len(outs):
                raise ArgumentError(f"out: {len(given)} of {len(outs)} given; allowed: one for each rank, or None")
            with torch.no_grad():
                combine_into(self, given, flat, routing, weights if weighted else [], adds)
            return given
        dispatched, tokens = [r._sent.weights for r in routed], [r._tokens for r in routed if r._tokens is not None]
        again = [r._again for r in routed if r._again is not None]
        return list(Combine.apply(self, weighted, again, *flat, *weights, *adds, *dispatched, *tokens, *routing))

    def _check_dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        counts: torch.Tensor | None = None,
        at: str = "",
    ) -> None:
        layout = self.layout
        if x.dim() != 2 or x.shape[1] != layout.hidden or x.dtype is not layout.dtype or x.shape[0] > layout.max_tokens:
            raise ArgumentError(
                f"x{at}: {x.dtype} of shape {tuple(x.shape)}; allowed: {layout.dtype} of shape [T, {layout.hidden}], "
                f"T up to max_tokens, {layout.max_tokens}"
            )
        shape = len(x), layout.top_k
        if ids.shape != shape or ids.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"topk_ids{at}: {ids.dtype} of shape {tuple(ids.shape)}; allowed: int32 or int64 of shape {shape}"
            )
        if weights.shape != shape or not weights.dtype.is_floating_point:
            raise ArgumentError(
                f"topk_weights{at}: {weights.dtype} of shape {tuple(weights.shape)}; allowed: floats of shape {shape}"
            )
        if counts is not None and (
            counts.shape != (layout.num_experts,) or counts.dtype not in (torch.int32, torch.int64)
        ):
            raise ArgumentError(
                f"counts{at}: {counts.dtype} of shape {tuple(counts.shape)}; allowed: int32 or int64 of shape "
                f"{(layout.num_experts,)}"
            )
        for name, tensor in (("x", x), ("topk_ids", ids), ("topk_weights", weights), ("counts", counts)):
            if tensor is not None:
                self._check_device(name + at, tensor)

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.parts[0].device:
            raise ArgumentError(f"{name}: on {tensor.device}; allowed: {self.parts[0].device}")

    def _check_combine(
        self,
        me: int,
        values: torch.Tensor,
        routed: RoutedTokens,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
        at: str = "",
    ) -> None:
        layout = self.layout
        if not isinstance(routed, RoutedTokens) or routed._of[0] != self.handle:
            raise ArgumentError(f"routed{at}: allowed: what this dispatcher's dispatch returned")
        if routed._of[1] != me:
            raise ArgumentError(f"routed{at}: what rank {routed._of[1]} dispatched; allowed: what rank {me} did")
        self._check_device(f"expert_output{at}", values)
        if values.shape != routed.x.shape or values.dtype is not layout.dtype:
            raise ArgumentError(
                f"expert_output{at}: {values.dtype} of shape {tuple(values.shape)}; allowed: {layout.dtype} of shape "
                f"{tuple(routed.x.shape)}, that of routed.x"
            )
        shape = len(routed.topk_weights), layout.hidden
        for name, tensor in (("out", out), ("add", add)):
            if tensor is None:
                continue
            self._check_device(name + at, tensor)
            if tensor.shape != shape or tensor.dtype is not layout.dtype or (shape[1] > 1 and tensor.stride(1) != 1):
                raise ArgumentError(
                    f"{name}{at}: {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}; allowed: "
                    f"{layout.dtype} of shape {shape}, the elements of a row adjacent"
                )
        needing = (
            values.requires_grad
            or routed.weights.requires_grad
            or routed.topk_weights.requires_grad
            or (add is not None and add.requires_grad)
        )
        if out is not None and torch.is_grad_enabled() and (needing or out.requires_grad):
            raise ArgumentError(f"out{at}: gradients are recorded; allowed: None, or under torch.no_grad()")


class TokenDispatcher(_Dispatcher):
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
        device: default: the CPU.
        world: "shared_memory" or "collective"; default: by what the ranks share, as for `redistribute`.

    Raises:
        ArgumentError: a number or name that is not allowed.
        UnsupportedError: the process group cannot carry tensors of the device.
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        capacity: int | float | None = None,
        expert_capacity: int | None = None,
        align: int = 1,
        overflow: str = "raise",
        layout: str = "grouped",
        expert_map: Sequence[Sequence[int]] | None = None,
        save: str = "lease",
        device: torch.device | str = "cpu",
        world: str | None = None,
    ) -> None:
        group = group_or_mesh
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"group_or_mesh: a mesh of {group.ndim} dims; allowed: 1, such as mesh['ep']")
            group = group.get_group()
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        rank = dist.get_rank()
        if rank not in ranks:
            raise ArgumentError(f"group_or_mesh: ranks {ranks}; allowed: one that has this rank, {rank}")
        agreed = DispatchLayout.of(
            len(ranks), num_experts, top_k, hidden, max_tokens, dtype, capacity, expert_capacity, align, overflow,
            layout, expert_map, save,
        )  # fmt: skip
        device = _placed(device)
        self._world: AnyWorld | InProcessWorld = InProcessWorld()
        name, number = "alone", 0
        if len(ranks) > 1:
            obstacle = why_not_backend(device)
            if obstacle is not None:
                raise UnsupportedError(f"TokenDispatcher: {obstacle}; allowed: gloo or nccl")
            chosen, _ = current_worlds().choose(ranks, device, world)
            if chosen.windows is not None:
                raise UnsupportedError(
                    f"world: {chosen.name} has no token dispatch; allowed: shared_memory, collective, mixed"
                )
            self._world, name = chosen, chosen.name
            number = current_worlds().number_dispatcher(ranks)
        self._ranks = ranks
        self._kind = stats().kind(f"token dispatch, {num_experts} experts, hidden {hidden}", name, 0, None)
        part = PushingRank if self._world.one_sided else SlabRank
        me, token = ranks.index(rank), agreed.token(number)
        super().__init__(agreed, [part(agreed, self._world, ranks, me, device, token)], name)

    def run(self, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        world, (run,) = self._world, runs
        if isinstance(world, InProcessWorld):
            return [run_all({self._ranks[0]: run})[self._ranks[0]]]
        if world.pending is not None:
            world.pending.finish()
        if world.error is not None:
            raise world.error
        stats().calls[world.name] += 1
        self._kind.calls += 1
        with Turn(world, self._kind):
            reply: Any = None
            try:
                while True:
                    reply = world.answer(run.send(reply))
            except StopIteration as end:
                return [end.value]

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
    ) -> RoutedTokens:
        """Send each token's row to the ranks that have its experts.

        Args:
            x: [T, H] of the dispatcher's dtype.
            topk_ids: int32 or int64 [T, K]; -1 is none.
            topk_weights: floats [T, K].
            counts: int32 or int64 [E], the tokens of this rank for each expert, where the caller has them. Their values
                are not read: routing, which places each entry among those of its expert, counts them on its way.

        Raises:
            ArgumentError: a shape or dtype that is not allowed; the peers are told.
            CapacityError: an earlier dispatch lost tokens, with overflow="raise".
            WorldError: a peer died, did not come, or asked for something else.
        """
        with self._telling():
            self._check_dispatch(x, topk_ids, topk_weights, counts)
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

        Rows from `routed.num_rows` on are not initialised, in `routed.x` and in the gradient of `expert_output` alike.
        Experts that go by groups, as `torch._grouped_mm` does, never see them. What goes by all rows masks both:

            there = torch.arange(len(routed.x), device=routed.x.device)[:, None] < routed.num_rows
            output = torch.where(there, f(torch.where(there, routed.x, 0)), 0)

        Args:
            expert_output: of the shape and dtype of `routed.x`. Only rows of tokens are read.
            routed: of a dispatch; a result may be combined several times.
            out: [T, H], where no gradients are recorded.
            add: [T, H], added last.
            weighted: False where the experts applied `routed.weights`.

        Raises:
            ArgumentError, WorldError: as for `dispatch`.
        """
        with self._telling():
            self._check_combine(self.parts[0].me, expert_output, routed, out, add)
        return self._combine([expert_output], [routed], [out], [add], weighted)[0]

    def _telling(self) -> _Telling:
        return _Telling(self._world, self._ranks)


def _placed(device: torch.device | str) -> torch.device:
    """As tensors on it say: the current one where none is named."""
    return torch.empty(0, device=device).device


class _Telling:
    """An argument that is refused here is not waited for by peers."""

    def __init__(self, world: AnyWorld | InProcessWorld, ranks: tuple[int, ...]) -> None:
        self._world, self._ranks = world, ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ArgumentError) and not isinstance(self._world, InProcessWorld) and not self._world.error:
            self._world.decline(self._ranks)


class VirtualTokenDispatcher(_Dispatcher):
    """All ranks of a TokenDispatcher in this process, on one device: for tests, and for kernels of W ranks on one GPU.

    Its methods take and return lists, one item for each of `size` ranks; otherwise they are TokenDispatcher's, and so
    are the results, bit for bit. With `one_sided=False` ranks send and receive, as over a network.
    """

    def __init__(
        self,
        size: int,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        capacity: int | float | None = None,
        expert_capacity: int | None = None,
        align: int = 1,
        overflow: str = "raise",
        layout: str = "grouped",
        expert_map: Sequence[Sequence[int]] | None = None,
        save: str = "lease",
        device: torch.device | str = "cpu",
        one_sided: bool = True,
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"size: {size!r}; allowed: a number of ranks from 1 on")
        agreed = DispatchLayout.of(
            size, num_experts, top_k, hidden, max_tokens, dtype, capacity, expert_capacity, align, overflow, layout,
            expert_map, save,
        )  # fmt: skip
        world, ranks, device = InProcessWorld(one_sided), tuple(range(size)), _placed(device)
        part = PushingRank if one_sided else SlabRank
        parts = [part(agreed, world, ranks, r, device, agreed.token(0)) for r in ranks]
        super().__init__(agreed, parts, "in process")

    def run(self, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        ended = run_all(dict(enumerate(runs)))
        return [ended[rank] for rank in range(len(runs))]

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        *,
        counts: Sequence[torch.Tensor | None] | None = None,
    ) -> list[RoutedTokens]:
        """TokenDispatcher.dispatch of all ranks."""
        counts = [None] * self.layout.ranks if counts is None else counts
        self._check_lists(x=xs, topk_ids=topk_ids, topk_weights=topk_weights, counts=counts)
        for rank, (x, ids, weights, c) in enumerate(zip(xs, topk_ids, topk_weights, counts, strict=True)):
            self._check_dispatch(x, ids, weights, c, f"[{rank}]")
        return self._dispatch(xs, topk_ids, topk_weights)

    def combine(
        self,
        expert_outputs: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        *,
        out: Sequence[torch.Tensor] | None = None,
        add: Sequence[torch.Tensor] | None = None,
        weighted: bool = True,
    ) -> list[torch.Tensor]:
        """TokenDispatcher.combine of all ranks."""
        outs: Sequence[Any] = [None] * self.layout.ranks if out is None else out
        adds: Sequence[Any] = [None] * self.layout.ranks if add is None else add
        self._check_lists(expert_output=expert_outputs, routed=routed, out=outs, add=adds)
        for rank, (values, r, o, a) in enumerate(zip(expert_outputs, routed, outs, adds, strict=True)):
            self._check_combine(rank, values, r, o, a, f"[{rank}]")
        return self._combine(expert_outputs, routed, outs, adds, weighted)

    def _check_lists(self, **lists: Sequence[Any]) -> None:
        for name, given in lists.items():
            if len(given) != self.layout.ranks:
                raise ArgumentError(f"{name}: {len(given)} of them; allowed: one for each of {self.layout.ranks} ranks")
