"""WindowTransfer: a rank on a transport whose ranks synchronise on the device; rows go to pooled buffers or a window.

A group's window holds the counts of all ranks, then the weights of the rows that a rank receives, then rows, at the
same offsets on all ranks. A dispatch enters it, has one barrier when the counts are there and one when the rows are,
copies what arrived, and leaves. With its counts a rank sends which buffer it wants its rows in: one of its pooled
buffers (`BufferPool`), where they stay, or, while all of these are in use, the window. Reading from peers copies the
values into the own window, has a barrier, reads the peers' windows and leaves. Values that lie in a pooled buffer which
was lent to the experts are not copied: before the barrier each rank sends where its values are. The host neither waits
for peers nor reads device values. The dispatchers of a group take turns with one window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from ....kernels import (
    Buffers,
    ChosenBuffers,
    Columns,
    CountedPairs,
    CountShare,
    Groups,
    QuantizedRows,
    RepeatedDispatch,
    WindowBarrier,
    WindowSignals,
    capturing,
    contiguous_rows,
    copy_rows,
    gather_values,
    offer_rows,
    push_rows,
    quantize_rows,
    receive_rows,
    recorded_launches,
)
from ...statistics import stats
from ...transports.buffer_pool import BufferPool, BufferPoolTransport
from ...transports.symmetric_memory.window import ALIGNMENT, window_size
from ..config import DispatchConfig, round_up
from ..dispatch_record import DispatchRecord, Tokens
from .base import COMBINE, DISPATCH, PAIR_NUMBERS, UNDISPATCH, Delivery, Read, Shared, Steps, TokenTransfer

_LAST = 1  # the second barrier of an operation, added to its number
# Of a transfer; each keeps memory for the (token, k) pairs. More shapes are dispatched without.
_MOST_REPEATED = 16


def uses_buffer_pool(config: DispatchConfig) -> bool:
    """Whether rows may stay in the buffer that peers wrote. With `dedupe` they are copied to their places anyway."""
    return bool(config.pooled_buffers and buffer_nbytes(config)) and config.save != "copy" and not config.dedupe


def buffer_nbytes(config: DispatchConfig) -> int:
    """Return the bytes of the rows of one dispatch, or of the experts' output, whichever are more."""
    return config.rows * max(config.dispatched_nbytes, config.hidden * config.dtype.itemsize, config.combined_nbytes)


def _nothing() -> None:
    pass


class WindowTransfer(TokenTransfer):
    """Peers write into this rank's memory and read its window."""

    in_windows = True
    quantizes_rows = True
    extra_words = 1  # the index of the wanted buffer
    algorithm = "rows pushed into a pooled buffer of their destination, or into its window and copied from there"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config = self.config
        self._windows, self._among = self._sharing()
        self._at = self._among.index(self.ranks[self.me])
        group = tuple(sorted(self._among))
        self._window = self._windows.window(group, self.window_nbytes(config), exact=True)
        self._error = self._window.failure.error  # after a failure the window holds counts and indices of any dispatch
        self._signals = self._window.signals(self._windows.turn(0).limit)
        self._repeated: dict[tuple[Any, ...], RepeatedDispatch] = {}
        packed = [torch.int32] * (config.packed is not None or config.packed_output is not None)
        for dtype in (config.dtype, torch.float32, *packed):
            self._window.build(dtype)
        first, parts = 0, []
        for nbytes in self.parts(config):
            parts.append({r: data[first : first + nbytes] for r, data in self._window.data.items()})
            first += round_up(nbytes, ALIGNMENT)
        counts, numbers, *others = parts
        self._matrices = self._buffers([counts], (len(group), config.bounds[-1] + 2), torch.int32)
        self._numbers = self._buffers([numbers], (config.rows,), torch.float32)
        self._like_numbers = self._numbers.tensors[self._at][:1].expand(config.rows)  # contiguous ones are made of it
        # As `new_scale` makes it: of one element each.
        self._like_scale: torch.Tensor | None = None
        if self._signals is not None and config.packed is not None and len(config.packed.sizes) > 1:
            self._like_scale = config.scale_words(self.me, self.device)
        self._pool: BufferPool | None = None
        self._set_row_buffers(*others)

    def _sharing(self) -> tuple[BufferPoolTransport, tuple[int, ...]]:
        """Return the transport that has the window, and the ranks that share it: the destinations of
        `DispatchRecord.rows`, in order."""
        return cast("BufferPoolTransport", self.transport), self.ranks

    def _set_row_buffers(self, *parts: Mapping[int, torch.Tensor]) -> None:
        """Make the buffers of rows of the parts of windows that come last, by rank."""
        config, group = self.config, self._window.ranks
        pieces = list(parts)
        if uses_buffer_pool(config) and len(group) > 1:
            self._pool = self._windows.buffer_pool(group, buffer_nbytes(config), config.pooled_buffers)
            pieces += self._pool.pieces
        # For each destination its window, then its pooled buffers.
        self._each = len(pieces)
        of_output = (config.rows, config.hidden), config.dtype
        of_dispatch = (config.rows, config.dispatched[0]), config.dispatched[1]
        self._rows, self._candidates = self._buffers(pieces[:1], *of_output), self._buffers(pieces, *of_output)
        # Rows of dispatch lie in the same memory.
        packed = config.packed is not None
        self._received = self._buffers(pieces[:1], *of_dispatch) if packed else self._rows
        self._received_candidates = self._buffers(pieces, *of_dispatch) if packed else self._candidates
        self._outputs, self._output_candidates = self._rows, self._candidates
        if config.packed_output is not None:
            of_combine = (config.rows, config.packed_output.words), torch.int32
            self._outputs = self._buffers(pieces[:1], *of_combine)
            self._output_candidates = self._buffers(pieces, *of_combine)
        # The buffers whose indices all ranks have sent, until they leave the window: of dispatch, and of combine.
        self._wanted, self._wanted_outputs, self._wanted_received = (
            ChosenBuffers(candidates, self._matrices.tensors[self._at][:, -1], self._window.failure.error)
            for candidates in (self._candidates, self._output_candidates, self._received_candidates)
        )

    def _buffers(
        self, pieces: Sequence[Mapping[int, torch.Tensor]], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Buffers:
        """Return the beginnings of each rank's pieces of memory, rank by rank in the order of destinations."""
        nbytes = math.prod(shape) * dtype.itemsize
        tensors = [piece[rank][:nbytes].view(dtype).view(shape) for rank in self._among for piece in pieces]
        buffers = Buffers(tensors, self.tables)
        buffers.table()  # uploaded here, since a call may be captured in a CUDA graph
        return buffers

    @classmethod
    def window_nbytes(cls, config: DispatchConfig) -> int:
        """Return the bytes of a rank's part of a window."""
        return sum(round_up(nbytes, ALIGNMENT) for nbytes in cls.parts(config))

    @classmethod
    def parts(cls, config: DispatchConfig) -> tuple[int, ...]:
        """Return the bytes of counts and the index of the wanted buffer, of the weights of rows, and of rows."""
        return config.ranks * (config.bounds[-1] + 2) * 4, config.rows * 4, buffer_nbytes(config)

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        window = "window, which the dispatchers of these ranks share"
        purposes = super().nbytes(config, chunk_capacity)
        purposes[window] = window_size(cls.window_nbytes(config), exact=True)
        if uses_buffer_pool(config):
            pooled = f"buffers that peers write rows into, pooled_buffers={config.pooled_buffers}"
            purposes[pooled] = config.pooled_buffers * buffer_nbytes(config)
        return purposes

    @classmethod
    def layers_nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> tuple[int, int]:
        once, each = super().layers_nbytes(config, chunk_capacity)
        if not uses_buffer_pool(config) or config.save == "redispatch":
            return once, each
        # The rows of as many layers lie in the pool.
        return once - config.pooled_buffers * buffer_nbytes(config), each

    @classmethod
    def received(cls, config: DispatchConfig) -> str:
        if config.save == "copy":
            return "rows received, held until backward"
        return super().received(config) + (", while all pooled buffers are in use" if uses_buffer_pool(config) else "")

    def use_config(self, config: DispatchConfig) -> None:
        super().use_config(config)
        self._repeated.clear()  # they have the table of experts and the fingerprint of the config before

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None or self._signals is None:
            return (yield from super().dispatch(tokens, outs, record))
        own = outs or (self._rows_to_receive(), self._new_numbers(), *self._new_scales())
        (x, ids, weights), (out, weights_out, *scale) = tokens, own
        pooled = self._pooled(out)
        # What the launches depend on besides the settings.
        key = (
            ids.shape, ids.dtype, x.stride(0), weights.stride(0), x.data_ptr() & 15, ids.data_ptr() & 15,
            weights.data_ptr() & 15, (out.data_ptr() | weights_out.data_ptr()) & 15, pooled is None, len(scale),
        )  # fmt: skip
        repeated = self._repeated.get(key)
        if repeated is not None and ids.is_contiguous() and weights.stride(1) == 1:
            tensors = repeated(x, ids, weights, out, weights_out, scale, self._candidate(pooled))
            self._acquired()
            self._windows.check()
            return out, DispatchRecord.of(tensors)._replace(scale=scale[0] if scale else None)
        with recorded_launches() as launches:
            _, record = yield from super().dispatch(tokens, own)
        # Where there is no room for rows, the launches do not take all of the tensors.
        may_repeat = self.config.rows > 0 and ids.is_contiguous() and weights.stride(1) == 1
        if may_repeat and len(self._repeated) < _MOST_REPEATED:
            results = record.tensors()[1:]
            self._repeated[key] = RepeatedDispatch(launches, self._signals, ids, weights, weights_out, scale, results)
        return out, record._replace(scale=scale[0] if scale else None)

    def combine(
        self,
        record: DispatchRecord,
        values: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> Steps[torch.Tensor | None]:
        # The output to overwrite on failure has to be contiguous.
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        try:
            if numbers is None or self._signals is None:
                return (yield from super().combine(record, values, whole, weights, add, numbers))
            # Apart from the rows: the launches of each signal for themselves.
            of_pairs = yield from self._fetch_numbers(record, numbers)
            yield from self._sum(UNDISPATCH, record, (values,), whole, weights, add)
            return of_pairs
        finally:
            if whole is not out:
                out.copy_(whole)

    def _rows_to_receive(self) -> torch.Tensor:
        otherwise = "rows of a token dispatch: all pooled buffers are in use"
        return self._pooled_rows(False, otherwise, *self.config.dispatched)

    def _new_numbers(self) -> torch.Tensor:
        return torch.empty_like(self._like_numbers)

    def new_scale(self) -> torch.Tensor | None:
        return None if self._like_scale is None else torch.empty_like(self._like_scale)

    def _new_scales(self) -> list[torch.Tensor]:
        scale = self.new_scale()
        return [] if scale is None else [scale]

    def _columns(self, operation: int, own: Sequence[torch.Tensor], groups: Groups) -> Columns | None:
        """Return what `receive_rows` copies out of the rows of a dispatch."""
        packed = self.config.packed
        if operation != DISPATCH or packed is None or len(own) < 3:
            return None
        blocked = self.config.scale_layout is not None
        return Columns(packed.begins[1], packed.sizes[1], own[2], groups.offsets if blocked else None)

    def _output(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        # `_fetch` casts them as it offers them.
        return values if values.stride(1) == 1 else contiguous_rows(values)

    def output_rows(self, received: torch.Tensor) -> torch.Tensor:
        # Replays write the same memory each time: only behind a dispatch, which waits until peers have read it.
        if self._pool is not None and capturing(self.device) and not self._pool.captured(received):
            stats().copies["expert output of a token combine: its dispatch is not in a CUDA graph"] += 1
            return self._new_rows()
        return self._pooled_rows(True, "expert output of a token combine: all pooled buffers are in use")

    def _pooled_rows(
        self, lend: bool, otherwise: str, elements: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `_new_rows`, on a pooled buffer if one is free; `otherwise`: the copy that its lack costs."""
        if self._pool is None:
            return self._new_rows(elements, dtype)
        buffer = self._pool.take(lend)
        if buffer is None:
            stats().copies[otherwise] += 1
            return self._new_rows(elements, dtype)
        elements = elements or self.config.hidden
        # Not a view: autograd forbids in-place writes to views that custom functions return.
        rows = torch.empty(0, dtype=dtype or self.config.dtype, device=self.device)
        return rows.set_(buffer.untyped_storage(), 0, (self.config.rows, elements), (elements, 1))

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        yield from ()  # a generator, as in all transfers
        if ids is None:
            self._acquire()
            return Shared((self._received if operation == DISPATCH else self._rows, own))
        counted = self._share_counts(operation, ids, self._candidate(self._pooled(own[0])))
        return Shared((self._wanted_received, own), counted, self._matrices.tensors[self._at])

    def _share_counts(self, operation: int, ids: torch.Tensor, word: int) -> CountedPairs:
        """Enter the window, and write the counts of `ids` and a word to all ranks."""
        share = CountShare(self._matrices, self._at, word, self._barrier(operation))
        if share.barrier is None:
            self._acquire()
        counted = self._count(ids, share)
        if share.barrier is None:
            self._signal("barrier", operation)
        else:
            self._acquired()
        return counted

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        yield from ()
        operation, record, x, (buffers, _), weights, _ = delivery
        weight_buffers, padding = None if weights is None else self._numbers, self.config.most_padding
        barrier = self._barrier(operation + _LAST)
        launch = self._launch_of(x)
        push_rows(
            x, record.rows, buffers, record.groups, self._at, weights, weight_buffers, padding, launch, barrier,
            self._quantized(operation),
        )  # fmt: skip
        if barrier is None:
            self._signal("barrier", operation + _LAST)
        self._take_out(delivery)

    def _take_out(self, delivery: Delivery) -> None:
        """Process what has arrived in this rank's window, and leave it."""
        operation, record, _, (_, own), weights, take = delivery
        of_window, num_rows = self._received if operation == DISPATCH else self._rows, record.groups.num_rows
        rows, numbers = of_window.tensors[self._at], self._numbers.tensors[self._at]
        copied = take is None and self._pooled(own[0]) is None
        if take is not None:
            take(rows)
        given = None if weights is None else (numbers, own[1])
        columns = self._columns(operation, own, record.groups)
        receive_rows(rows if copied else None, own[0], num_rows, self._unused_rows, given, self._signals, columns)
        if self._signals is None:
            self._leave(own)
        else:
            self._windows.check()

    def _fill_unused(self, groups: Groups, *buffers: torch.Tensor) -> None:
        """Nothing: `_deliver` fills them with the launch that copies."""

    def _fetch(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor], read: Read
    ) -> Steps[list[torch.Tensor]]:
        yield from ()
        buffers = self._offer(operation, record, given)
        if self._signals is None:
            result = read(buffers)
            self._leave(result)
        else:
            result = read(buffers, self._signals)
            self._windows.check()
        return result

    def _offer(self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor]) -> list[Buffers]:
        """Enter the window, and let peers read `given`, one tensor where kernels run; return those of all ranks."""
        num_rows, barrier = record.groups.num_rows, self._barrier(operation)
        quantized = self.config.quantized_output if operation == COMBINE else None
        if barrier is None:
            self._acquire()
        buffers = []
        for values in given:
            if values.dim() > 1:
                buffers.append(self._offered(values, num_rows, barrier, quantized))
                continue
            self._copied_to_window(values, self._numbers, num_rows, barrier)
            buffers.append(self._numbers)
        if barrier is None:
            self._signal("barrier", operation)
        return buffers

    def _fetch_numbers(self, record: DispatchRecord, numbers: torch.Tensor) -> Steps[torch.Tensor]:
        """Return each pair's number of all ranks' `numbers`, float32 [rows]: [T, K]."""

        def read(buffers: Sequence[Buffers], release: WindowSignals | None = None) -> list[torch.Tensor]:
            return [gather_values(record.rows, buffers[0], release)]

        (of_pairs,) = yield from self._fetch(PAIR_NUMBERS, record, (numbers,), read)
        return of_pairs

    def _copied_to_window(
        self,
        values: torch.Tensor,
        to: Buffers,
        num_rows: torch.Tensor,
        barrier: WindowBarrier | None,
        quantized: QuantizedRows | None = None,
    ) -> None:
        window = to.tensors[self._at]
        if quantized is None:
            values = values.contiguous()
        if barrier is not None:
            offer_rows(values, window, num_rows, None, 0, 0, barrier, quantized)
            self._acquired()
        elif quantized is not None:
            quantize_rows(values, window, quantized.scales_at, quantized.how, num_rows)
        else:
            copy_rows(values, window, num_rows)

    def _offered(
        self,
        values: torch.Tensor,
        num_rows: torch.Tensor,
        barrier: WindowBarrier | None = None,
        quantized: QuantizedRows | None = None,
    ) -> Buffers:
        """Bring rows to where peers read them; return the buffers that all ranks' rows are in after the barrier.
        `quantized`: how they are cast on the way."""
        of_window, wanted = self._rows, self._wanted
        if quantized is not None:
            of_window, wanted = self._outputs, self._wanted_outputs
        if self._pool is None:
            self._copied_to_window(values, of_window, num_rows, barrier, quantized)
            return of_window
        lent, to = None, None
        if quantized is None:
            lent = self._pool.lent(values) if values.is_contiguous() else None
            values = values.contiguous()
        if lent is None:
            to = of_window.tensors[self._at]
        matrix = self._matrices.tensors[self._at]
        place = (self._at + 1) * matrix.shape[1] - 1  # where dispatch has the index of the wanted buffer
        offer_rows(values, to, num_rows, self._matrices, place, self._candidate(lent), barrier, quantized)
        if barrier is not None:
            self._acquired()
        if lent is not None:
            # Kept until this rank has waited for the peers that read it: then it may be written again.
            self._window.after_acquire[capturing(self.device)] = partial(self._pool.follow, values)
        return wanted

    def _candidate(self, number: int | None) -> int:
        """Return the index among all candidates of this rank's pooled buffer; None: of its window."""
        return self._at * self._each + (0 if number is None else 1 + number)

    def _acquire(self) -> None:
        """Enter the window."""
        self._signal("acquire")
        self._acquired()

    def _acquired(self) -> None:
        """To be called when the wait for the window is enqueued."""
        waiting = self._window.after_acquire
        if waiting:
            for captured in (True,) if capturing(self.device) else (True, False):
                waiting.pop(captured, _nothing)()

    def _pooled(self, rows: torch.Tensor) -> int | None:
        """Return the number of the pooled buffer that rows are in; None: none."""
        return None if self._pool is None else self._pool.number(rows)

    def _barrier(self, operation: int) -> WindowBarrier | None:
        """A barrier for the end of a launch; None where no kernels run."""
        return None if self._signals is None else WindowBarrier(self._signals, self.fingerprint + operation)

    def _signal(self, use: Any, operation: int = 0) -> None:
        self._windows.signal(self._window, use, self.fingerprint + operation)

    def _leave(self, outs: Sequence[torch.Tensor]) -> None:
        """Leave the window; overwrite `outs` if this rank has failed."""
        self._release(outs)
        self._windows.check()

    def _release(self, outs: Sequence[torch.Tensor]) -> None:
        for out in outs[1:]:
            self._windows.signal(self._window, "poison", poison=out)
        self._windows.signal(self._window, "release", poison=outs[0])
