"""TokenDispatcher: send tokens to the ranks that have their experts, and combine the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, TransportError, UnsupportedError, shown
from ...kernels import on_device
from ..executor.call import binding, naming, refuse, refuse_among, refuse_unplanned
from ..executor.dispatch_modes import below_modes, hidden_from_modes, is_fake
from ..executor.ranges import wants_ranges
from ..executor.run import ExclusiveCall, run_profiled, run_to_end, start_in_background
from ..flight_recorder import Details
from ..statistics import stats
from ..transports.choose_transport import TransportName, check_name
from ..transports.hierarchical import HierarchicalTransport
from ..transports.in_process import InProcessTransport, run_all
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyTransport, transports_of, why_not_backend
from ..transports.streams import SideStream, order_on
from .active_ranks import ActiveRanks, check_active
from .autograd import combine_tokens, dispatch_tokens
from .check_calls import check_combine, check_dispatch, packed_tokens
from .config import DispatchConfig
from .dispatch_record import Tokens
from .engine import TokenEngine, device_of
from .options import DEFAULT_OPTIONS, OF_ROWS, DispatchOptions
from .overflow import LATEST
from .pending import PendingTokens
from .phases import start_combines, start_dispatch
from .routed import RoutedTokens
from .transfer.base import DISPATCH, OPERATIONS, Steps, TokenTransfer
from .transfer.dedupe import DedupedTransfer, with_dedupe
from .transfer.levels import pushed_inside, two_sided_transfer, windows_inside, with_levels
from .transfer.push import PushTransfer
from .transfer.window import WindowTransfer

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class TokenDispatcher(TokenEngine):
    """Expert-parallel dispatch and combine among the ranks of a process group.

    Every rank constructs the same dispatchers in the same order and calls the same methods in the same order, with
    tensors that all require gradients or all do not. The number of tokens T may differ between ranks and may be 0. No
    device-to-host sync, except for chunks of exact size; CPU tensors are read on the host.

    y = combine(expert(dispatch(x))) is, for each token, the float32 sum over ranks ascending of the sums of its pairs
    there, each in order of k and rounded to the dtype. With ranks on several nodes it is the sum over nodes, in order
    of their first ranks, of such sums over a node's ranks, each rounded to the dtype. Ids may repeat within a token;
    each is a pair of its own.

    Args:
        group_or_mesh: a process group, a 1-D DeviceMesh, or None for the default group. All of its ranks construct
            a dispatcher, with equal settings.
        num_experts: E. The ranks have consecutive experts, E // W each; the first E mod W ranks have one more.
        top_k: K, the width of topk_ids. It may exceed num_experts, since an id may be -1 or occur twice.
        hidden: H.
        max_tokens: the largest T of any rank.
        dtype: float32, bfloat16 or float16.
        options: all other settings.
        device: default: the CPU.
        transport: "shared_memory", "process_group", "hierarchical" or "symmetric_memory"; default: by what the ranks
            share, as for `redistribute`. With "symmetric_memory" ranks push into each other's memory and synchronise
            on the device, so that the host does not wait for peers, and a call like an earlier one may be captured in
            a CUDA graph; if they are on several nodes, so they do inside each on two levels with `chunk_capacity`,
            beside messages between nodes; otherwise chunks travel between all of them as with "process_group".

    Raises:
        ArgumentError: an argument that is not allowed. Peers are told, here and with an UnsupportedError; not of a
            `group_or_mesh` that is neither, or does not have this rank.
        UnsupportedError: the process group does not support the device; there is no process group; with
            transport="symmetric_memory", a buffer has to be allocated while a CUDA graph is captured.
    """

    @hidden_from_modes
    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        options: DispatchOptions = DEFAULT_OPTIONS,
        device: torch.device | str = "cpu",
        transport: TransportName | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UnsupportedError(
                "TokenDispatcher: torch.distributed is not initialised; call init_process_group first, or use "
                "VirtualTokenDispatcher, which runs all ranks in one process"
            )
        group = group_or_mesh
        if group is not None and not isinstance(group, DeviceMesh | dist.ProcessGroup):
            # Such as what new_group returns on a rank outside the group.
            raise ArgumentError(
                f"group_or_mesh: {shown(group)}; allowed: a process group with this rank, a 1-D DeviceMesh, or None"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                error = ArgumentError(f"group_or_mesh: a mesh of {group.ndim} dims; allowed: 1, such as mesh['ep']")
                raise refuse_unplanned(error, [group])
            group = group.get_group()
        group = dist.group.WORLD if group is None else group
        assert group is not None
        ranks = tuple(dist.get_process_group_ranks(group))
        rank = dist.get_rank()
        if rank not in ranks:
            raise ArgumentError(f"group_or_mesh: ranks {ranks}; allowed: a group with this rank, {rank}")
        self._group, device, self.group_name = group, device_of(device), str(group.group_name)
        try:
            config = DispatchConfig.of(
                len(ranks), num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype,
                options=options,
            )  # fmt: skip
            config, name, number, why = self._choose(config, ranks, device, transport)
        except (ArgumentError, UnsupportedError) as error:
            if len(ranks) > 1:
                refuse_among(error, ranks, [group])
            raise
        self._ranks = ranks
        self._meet_with(ranks)
        rows = [f", {name} {value}" for name in (*OF_ROWS, "quantize_output") if (value := getattr(config, name))]
        description = (
            f"token dispatcher {number} of these ranks: {config.num_experts} experts, top {config.top_k}, hidden "
            f"{config.hidden}, at most {config.max_tokens} tokens, {config.dtype}{''.join(rows)}"
        )
        self._descriptions = {operation: f"{text} of {description}" for operation, text in OPERATIONS.items()}
        self._details = Details(name, device)
        text = f"token dispatch, {config.num_experts} experts, hidden {config.hidden}"
        self._calls, self._kind = stats().calls, stats().kind(text, name, lambda: (text, 0, None))
        inside = pushed_inside(config, device, name), windows_inside(config.nodes, name)
        kind: type[TokenTransfer] = PushTransfer
        if not self._transport.one_sided:
            kind = two_sided_transfer(config, *inside)
        if self._transport.one_sided and self._transport.windows is not None:
            kind = DedupedTransfer if config.dedupe else WindowTransfer
        self._order = order_on(device)
        self._side = SideStream(device) if device.type == "cuda" else None
        arguments = config, self._transport, ranks, ranks.index(rank), device, config.fingerprint(number)
        with torch.inference_mode(False), on_device(device):  # its buffers are written for as long as it lives
            if isinstance(self._transport, InProcessTransport):
                transfer = kind(*arguments)
            else:
                with (
                    binding(),
                    self._transport.rendezvous.making_ready(self._participants, lambda: f"making {description}"),
                ):
                    if isinstance(self._transport, ProcessGroupTransport | HierarchicalTransport):
                        self._transport.use_groups([group])  # not the default group, whose ranks would all connect
                    transfer = kind(*arguments)
            super().__init__(config, [transfer], name, why)
            self._active = ActiveRanks(transfer)
            _logger.debug("made %s: %s, %s", description, name, transfer.algorithm)
            if self._order is not None:
                self._order.join()  # calls on other streams read the uploaded tables

    def _choose(
        self, config: DispatchConfig, ranks: tuple[int, ...], device: torch.device, transport: TransportName | None
    ) -> tuple[DispatchConfig, str, int, str]:
        """Choose the transport; return the config for it, its name, the number of this dispatcher among those of these
        ranks, and the reasons for what was chosen."""
        check_name(transport)
        self._transport: AnyTransport | InProcessTransport = InProcessTransport()
        if len(ranks) == 1:
            return replace(config, dedupe=False), "alone", 0, ""
        obstacle, why = why_not_backend(device, transport), ""
        if obstacle is not None:
            raise UnsupportedError(f"TokenDispatcher: {obstacle}; allowed: gloo or nccl")
        sizes = f"{config.num_experts} experts, top {config.top_k}, hidden {config.hidden}"
        title = f"making a token dispatcher of {sizes}"
        # A new transport has pinned memory and streams of the device.
        with on_device(device), binding(), naming(ranks, lambda: title, groups=[self._group]):
            transports = transports_of(ranks, [self._group])
            machines = transports.machines
            chosen, _ = transports.choose(ranks, device, transport, [self._group])
            number = transports.number_dispatcher(ranks)
            self._transport, name = chosen, chosen.name
            if isinstance(chosen, ProcessGroupTransport | HierarchicalTransport):
                config = replace(config, nodes=machines.nodes_of(ranks))
            if not chosen.one_sided:
                topology = partial(machines.find_topology, tuple(sorted(ranks)), device)
                config, why = with_levels(config, device, name, topology)
            in_windows = chosen.one_sided and chosen.windows is not None
            figures = partial(machines.figures_of_first, tuple(sorted(ranks)), device)
            config, crossing = with_dedupe(config, device, in_windows, figures)
        return config, name, number, "\n  ".join(filter(None, (why, crossing)))

    def run(self, operation: int, runs: Sequence[Steps[Any]]) -> list[Any]:
        transport, (run,) = self._transport, runs
        if isinstance(transport, InProcessTransport):
            if self._order is not None:
                self._order.join(self)
            return [run_all({self._ranks[0]: run})[self._ranks[0]]]
        with ExclusiveCall(transport, self._kind):
            if self._order is not None:
                self._order.join(self)
            self._calls[transport.name] += 1
            self._kind.calls += 1
            fingerprint = self.transfers[0].fingerprint + operation
            transport.rendezvous.begin(self._participants, fingerprint, self._descriptions[operation], self._details)
            if wants_ranges():
                return [run_profiled(run, transport.answer, f"shardweave::{OPERATIONS[operation]}")]
            return [run_to_end(run, transport.answer)]

    def start(
        self, operation: int, runs: Sequence[Steps[Any]], given: Iterable[torch.Tensor]
    ) -> Callable[[], list[Any]]:
        transport = self._transport
        if isinstance(transport, InProcessTransport):
            return super().start(operation, runs, given)
        if self._side is not None:
            return self._side.start(given, partial(self.run, operation, runs))
        inference = torch.is_inference_mode_enabled()

        def call() -> list[Any]:
            with torch.inference_mode(inference), torch.no_grad():  # a thread has modes of its own
                return self.run(operation, runs)

        return start_in_background(transport, call).result

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
    ) -> RoutedTokens:
        """Send each token's row to the ranks of its experts.

        Arguments may be overwritten once it has returned, but for x with save="redispatch" until backward has run.

        Args:
            x: [T, H] of the dispatcher's dtype. With `payloads` a list of tensors [T, ...], as the dispatcher has them,
                of any strides; their bytes are sent as they are, and gradients do not flow to them.
            topk_ids: int32 or int64 [T, K]; -1 is none.
            topk_weights: float32, bfloat16, float16 or float64 [T, K].
            scale: with `payloads`, the payload after those of `x`: `dispatch(x, …, scale=s)` is `dispatch([x, s], …)`.

        Raises:
            ArgumentError: unsupported shape, dtype or device; peers are told, except with device-side synchronisation.
            CapacityError: with overflow="raise", an earlier dispatch dropped rows or had bad ids.
            DisagreementError: a peer made another call, or refused its arguments; then, if it is `recoverable`, the
                next dispatch works on all ranks.
            TransportError: a peer died or timed out.
        """
        return dispatch_tokens(self, [self._checked_tokens(x, topk_ids, topk_weights, scale, self.run)])[0]

    def dispatch_start(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
    ) -> PendingTokens[RoutedTokens]:
        """Start a dispatch; `finish()` of the result waits for it and returns what `dispatch` does, to the bit.

        Rows travel while the caller computes: shared experts, or another microbatch. On CPUs a thread carries out
        started calls, on GPUs a stream, in the order in which they were started. Neither waits for peers here, except
        for the counts of a dispatch with chunks of exact size on GPUs.

            pending = dispatcher.dispatch_start(x, topk_ids, topk_weights)
            shared = shared_experts(x)
            routed = pending.finish()
            pending = dispatcher.combine_start(experts(routed), routed)
            # Compute something else.
            y = shared + pending.finish()

        Any number may be in flight, also of several dispatchers; all use the same buffers, one after another. Every
        rank starts and makes the same calls in the same order, and finishes those of a dispatcher in the order of their
        start; with overflow="raise" they finish them between the same starts. Other calls of shardweave wait for those
        in flight. Arguments must not be written until `finish` has returned; from then on as after `dispatch`.

        Differentiable; backward is in one phase, as that of `dispatch`. Graphs of torch.compile do not have it. Under
        dispatch modes, which see one operator, the dispatch is complete when this returns.

        Args:
            x, topk_ids, topk_weights, scale: as for `dispatch`.

        Raises:
            ArgumentError, CapacityError: as for `dispatch`. Failures of peers are raised by `finish`.
            UnsupportedError: in a graph of torch.compile.
        """
        tokens = self._checked_tokens(x, topk_ids, topk_weights, scale, partial(self.start, given=()))
        return start_dispatch(self, [tokens], _only)

    def combine(
        self,
        expert_output: torch.Tensor,
        routed: RoutedTokens,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        weighted: bool = True,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's rows of all ranks' `expert_output`, plus `add`: [T, H].

        With `zero_rows=False`, rows from `routed.num_rows` on are not initialised, in `routed.x` and in the gradient of
        `expert_output`. Grouped GEMMs such as `torch._grouped_mm` never read them. Experts that process all rows need
        `zero_rows=True`, or mask both:

            there = torch.arange(len(routed.x), device=routed.x.device)[:, None] < routed.num_rows
            output = torch.where(there, f(torch.where(there, routed.x, 0)), 0)

        SHARDWEAVE_POISON_ROWS=1 fills these rows with NaN, to find code that reads them.

        Args:
            expert_output: of the shape and dtype of `routed.x`, or with payloads [R, H] (batched [S_local, C, H]) of
                the dispatcher's dtype. Only rows of tokens are read.
            routed: the result of a dispatch; may be combined several times. If topk_weights require gradients, which
                the backward of dispatch returns, of a dispatch with gradients enabled.
            out: [T, H], the output, in other memory than `expert_output`; only without gradients.
            add: [T, H], added last; may be `out` itself.
            weighted: False if the experts applied `routed.weights`.

        Raises:
            ArgumentError, TransportError: as for `dispatch`.
        """
        self._check_combine(expert_output, routed, out, add, weighted)
        return combine_tokens(self, [expert_output], [routed], [out], [add], weighted)[0]

    def combine_start(
        self,
        expert_output: torch.Tensor,
        routed: RoutedTokens,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        weighted: bool = True,
    ) -> PendingTokens[torch.Tensor]:
        """Start a combine; `finish()` of the result waits for it and returns what `combine` does, to the bit.

        Otherwise as `dispatch_start`. Neither `expert_output`, `add` nor `out` may be written until `finish` has
        returned.

        Args:
            expert_output, routed, out, add, weighted: as for `combine`.

        Raises:
            ArgumentError: as for `combine`. Failures of peers are raised by `finish`.
            UnsupportedError: in a graph of torch.compile.
        """
        self._check_combine(expert_output, routed, out, add, weighted)
        return start_combines(self, [expert_output], [routed], [out], [add], weighted, _only)

    @hidden_from_modes
    def check(self) -> None:
        """Wait for the dispatches so far.

        Raises:
            CapacityError: with overflow="raise", one of them dropped rows or had bad ids. Each is raised once.
            TransportError: a peer died, timed out, or made another call.
        """
        super().check()
        if not isinstance(self._transport, InProcessTransport) and self._transport.error is not None:
            raise self._transport.error

    @hidden_from_modes
    def set_active_ranks(self, ranks: Sequence[int] | None) -> None:
        """Mask ranks out of the calls from now on, or take them back, without communicating or new buffers.

        A rank that is masked out need not call anything, may have stalled, and on CPUs may have ended. No tokens are
        sent to its experts: pairs of those with replicas on active ranks go to these, as `expert_map` distributes them
        among the active ones; the others are dropped, and counted by `routed.masked`. `routed.dropped`, `num_rows` and
        capacities refer to the remaining pairs, and `load()` to all pairs of active ranks.

        All active ranks call it between the same calls. It waits for the calls in flight. A rank is taken back by a
        list that has it, or None; it has made no call of this dispatcher meanwhile, and if it has called this method as
        well, it does so again. A dispatch that started before cannot be finished, nor `routed` of one be combined or
        differentiated.

        - "process_group", "shared_memory", "hierarchical": only the active ranks meet. A rank that ends or stalls
          within a call fails that call, which invalidates the transport for good: mask it out before. The rank that
          hosts the process group's store has to be running, unless active ranks have made a call together before.
        - "hierarchical" on two levels: on one level while ranks are masked out.
        - "symmetric_memory": not supported on one node, because all ranks of the group synchronise on the device. On
          several nodes in messages, on one level while ranks are masked out.

        Args:
            ranks: numbered within the group, 0 to W - 1, as in `expert_map`; None: all.

        Raises:
            ArgumentError: no rank, or one that does not exist or is given twice; peers are told.
            UnsupportedError: the transport does not allow it.
        """
        try:
            config, transfer = self._active.choose(self.config, ranks)
        except ArgumentError as error:
            Reporting(self._transport, self._participants, in_place_of_call=False).report(error)
            raise
        with self._between_calls():
            self.transfers = [transfer]
            self._use_config(config)
            self._meet_with([r for i, r in enumerate(self._ranks) if config.is_active(i)])

    def _use_config(self, config: DispatchConfig) -> None:
        with self._between_calls():
            super()._use_config(config)

    def _between_calls(self) -> AbstractContextManager[Any]:
        """Return a context in which no call is in flight, which waits for those that are."""
        return nullcontext() if isinstance(self._transport, InProcessTransport) else binding()

    def _meet_with(self, ranks: Sequence[int]) -> None:
        """Make the calls from now on among these ranks."""
        self._participants = tuple(sorted(ranks))
        self._reporting = Reporting(self._transport, self._participants)

    def _checked_tokens(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        ids: torch.Tensor,
        weights: torch.Tensor,
        scale: torch.Tensor | None,
        run: Callable[[int, list[Steps[Any]]], object],
    ) -> Tokens:
        """Return the arguments of a dispatch; `run`: how it will run."""
        if self.config.active_ranks is not None:
            check_active(self.config, self.transfers[0].me)
        device = self.transfers[0].device
        try:
            tokens = Tokens(packed_tokens(self.config, device, x, scale), ids, weights)
            check_dispatch(self.config, device, tokens)
        except ArgumentError as error:
            self.refuse_dispatch(error, run)
            raise
        return tokens

    def refuse_dispatch(self, error: ArgumentError, run: Callable[[int, list[Steps[Any]]], object]) -> None:
        """Tell peers that this rank refuses the arguments of a dispatch: in their exchange of counts, if all of them
        read these, so that none makes the dispatch and the next one works.

        Args:
            run: `self.run`, or starts the run.

        Raises:
            CapacityError: as on all ranks in place of this dispatch.
        """
        if not is_fake():
            with below_modes():
                self._refuse_dispatch(error, run)

    def _refuse_dispatch(self, error: ArgumentError, run: Callable[[int, list[Steps[Any]]], object]) -> None:
        self._overflow.check(LATEST)
        transport, (transfer,) = self._transport, self.transfers
        if isinstance(transport, InProcessTransport) or not transfer.tells_refusals:
            self._reporting.report(error)
            return
        error.peers_know = True
        with suppress(TransportError), torch.no_grad(), on_device(transfer.device):
            run(DISPATCH, [transfer.refuse_dispatch(str(error))])

    def _check_combine(
        self,
        values: torch.Tensor,
        routed: RoutedTokens,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
        weighted: bool,
    ) -> None:
        if self.config.active_ranks is not None:
            check_active(self.config, self.transfers[0].me)
        try:
            transfer = self.transfers[0]
            check_combine(self.config, transfer.device, (self.handle, transfer.me), values, routed, out, add, weighted)
        except ArgumentError as error:
            self._reporting.report(error)
            raise


def _only(of_ranks: list[T]) -> T:
    return of_ranks[0]


class Reporting:
    """A context that reports an ArgumentError of this rank to its peers. Dynamo does not enter it: calls that it traces
    use `report`.

    Args:
        in_place_of_call: what this rank refuses is exactly one dispatch or combine of the participants.
    """

    def __init__(
        self,
        transport: AnyTransport | InProcessTransport,
        participants: tuple[int, ...],
        in_place_of_call: bool = True,
    ) -> None:
        self._transport, self._participants, self._all_meet = transport, participants, in_place_of_call

    def report(self, error: ArgumentError) -> None:
        transport = self._transport
        # Others wait for no rank that is masked out.
        if isinstance(transport, InProcessTransport) or transport.rank not in self._participants or is_fake():
            return
        with below_modes():
            refuse(transport, self._participants, self._participants, error, self._all_meet)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ArgumentError):
            self.report(error)
