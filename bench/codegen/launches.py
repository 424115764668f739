"""Every launch of programs, windows and token dispatchers, as Triton would compile it, recorded without a GPU.

They run on a device that has no memory, as their callers run them, and their launches are recorded instead of made: so
every constant here is one that a launcher passes, and every kernel one that is launched.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import shardweave.kernels
from shardweave.bench.workloads import load_workloads
from shardweave.kernels import (
    QUANTIZATIONS,
    Buffers,
    ChosenBuffers,
    Columns,
    CountShare,
    OwnRows,
    PhysicalExperts,
    QuantizedRows,
    RowTables,
    TokenRows,
    WindowBarrier,
    block_rows,
    column_words,
    combine_rows,
    count_pairs,
    gather_values,
    group_rows,
    offer_rows,
    offer_tokens,
    push_rows,
    push_sums,
    receive_rows,
    spread_rows,
)
from shardweave.kernels.channel import Failure
from shardweave.kernels.compare_words import WordComparison
from shardweave.kernels.launch import Launches
from shardweave.moe import DispatchOptions, VirtualTokenDispatcher
from shardweave.planner import Program, plan
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.moe.activation import silu_and_mul
from shardweave.runtime.moe.packed_rows import packed_rows
from shardweave.runtime.transports.backend_limits import Direction, PooledOutputs, WindowPolicy
from shardweave.runtime.transports.in_process import InProcessTransport
from shardweave.runtime.transports.symmetric_memory.outputs import OutputPool
from shardweave.runtime.transports.symmetric_memory.window import Window, pad_bytes, window_size

KERNELS = {
    name.removesuffix("_kernel"): kernel
    for module in pkgutil.walk_packages(shardweave.kernels.__path__, "shardweave.kernels.")
    for name, kernel in vars(import_module(module.name)).items()
    if name.endswith("_kernel")
}
"""Every kernel that there is."""
_NAMES = {kernel: name for name, kernel in KERNELS.items()}
_ON_BOXES = ("copy_boxes", "reduce_boxes", "copy_window", "reduce_window", "copy_direct")
_NOWHERE = torch.device("meta")
_SPELLED = GPUTarget("cuda", 90, 32)  # the rules for what of an argument a kernel is compiled for are alike on all
_ADDRESS = 1 << 40  # as large as a device's, and as aligned
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
LAYOUTS = ("R R", "S0 R", "R S1", "S0 S1", "S1 S0", "S0 S0", "S0 S0 @ 0:1,0", "P S0", "P P", "Pavg S1")
PAIRS = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1] and "P" not in pair[1]]
FEW_PAIRS = (("S0 S1", "S1 S0"), ("P S0", "S0 S0"), ("Pmax R", "S1 R"), ("R R", "P S0"))
EVEN, UNEVEN, SMALL, CUBE = (4096, 4096), (8191, 8193), (9, 13), (130, 66, 34)
DTYPES = (torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8,
          torch.int64, torch.bool, torch.complex64)  # fmt: skip
Run = tuple[str, Callable[[], object]]
"""What launches kernels: its name, and a call."""


@dataclass
class Specialisation:
    """One kernel, as it is compiled for some launches.

    Attributes:
        constants: `num_warps` and other options among them.
        signature: the types of all arguments, as Triton spells them.
        aligned: arguments that are multiples of 16.
        example: what launches it.
        launches: how many of the recorded launches are this one.
    """

    kernel: str
    constants: dict[str, Any]
    signature: dict[str, str]
    aligned: tuple[str, ...]
    example: str = ""
    launches: int = field(default=0, compare=False)

    @property
    def on_boxes(self) -> bool:
        return self.kernel in _ON_BOXES

    @property
    def key(self) -> tuple[Any, ...]:
        constants = tuple((name, str(value)) for name, value in self.constants.items())
        return self.kernel, constants, tuple(self.signature.items()), self.aligned

    @property
    def row_accesses(self) -> tuple[int, int]:
        """How often its text loads, and stores, a piece of a row; (0, 0) for kernels that move no rows.

        Raises:
            KeyError: a kernel moves rows and is not listed here.
        """
        c = self.constants
        if self.on_boxes or "COLS" not in c:
            return 0, 0
        k = c.get("K", 0)
        if self.quantizes:  # where a row with one scale is one range of columns, both reads of it become one
            return 1 + (self.kernel == "push_rows" and c["GROUP"] >= c["H"]), k or 1
        both = {
            "push_rows": (1, k + 1),
            "offer_tokens": (1, 1),
            "spread_rows": (1, k + 1),
            "push_sums": (k * (not c.get("GROUP")), 1),
            # Elements of quantized rows have bytes of their own.
            "combine_rows": (k * (not c.get("GROUP")) + c.get("HAS_ADD", 0), 1),
            "weigh_rows": (2, 1),
            "copy_rows": (1, 1),
            "receive_rows": (c.get("COPY", 0), c.get("COPY", 0) + c.get("FILL", 0)),
            "offer_rows": (1, 1) if c.get("COPY") else (0, 0),
            "fill_rows": (0, 1),
            "silu_and_mul": (2, 1),
            "silu_and_mul_backward": (3, 4),
        }
        return both[self.kernel]

    @property
    def quantizes(self) -> bool:
        """Whether it casts rows to float8."""
        return self.kernel in ("quantize_rows", "push_rows", "offer_rows") and bool(self.constants.get("GROUP"))

    @property
    def words(self) -> tuple[int, int]:
        """Bytes of a word, read and written: of boxes, or an element of a row."""
        names = ("FROM_WORD", "TO_WORD") if self.kernel.startswith("reduce_") else ("WORD", "WORD")
        source, target = (self.constants[name].primitive_bitwidth // 8 for name in names)
        return source, 1 if self.quantizes else target

    @property
    def vectors(self) -> tuple[int, int]:
        """Bytes that addresses, strides and lengths allow an access to have, read and written."""
        if not self.on_boxes:
            align = self.constants["ALIGN"]
            # Rows of float8 are aligned, and as long as H bytes.
            return align, math.gcd(self.constants["H"], 16) if self.quantizes else align
        source, target = self.words
        return source * self.constants["VS"], target * self.constants["VD"]

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in self.constants.items()]
        return ", ".join([*parts, *(f"{name} {kind}" for name, kind in self.signature.items() if name == "ids")])


def specialisations(runs: Iterable[Run] | None = None) -> list[Specialisation]:
    """All that some runs launch, by default programs, layers and windows of every kind; the most launched of a kernel
    first.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if not all(isinstance(kernel, JITFunction) for kernel in KERNELS.values()):
        raise RuntimeError("TRITON_INTERPRET=1: kernels are not compiled in this process")
    distinct: dict[tuple[Any, ...], Specialisation] = {}
    for example, run in runs or (*programs(), *dispatches(layers())):
        with recorded() as launches:
            run()
        for launch in launches:
            distinct.setdefault(launch.key, replace(launch, example=example)).launches += 1
    return sorted(distinct.values(), key=lambda s: (list(KERNELS).index(s.kernel), -s.launches, str(s)))


@contextmanager
def recorded() -> Iterator[list[Specialisation]]:
    """In this block kernels are not launched; what they would be compiled for is appended to the list. Launches on
    boxes count when they are prepared, as programs are bound. Tensors on the device without memory have addresses."""
    launches: list[Specialisation] = []
    of_memory = torch.Tensor.data_ptr

    def launch(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> _Prepared | None:
        prepared = _Prepared(launches, _as_compiled(kernel, given, named))
        if not warmup or _NAMES[kernel] in _ON_BOXES:
            prepared[grid]()
        return prepared if warmup else None

    def address(x: torch.Tensor) -> int:
        return of_memory(x) if x.device != _NOWHERE else _ADDRESS + int(x.storage_offset()) * x.element_size()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", address))
        for name in {kernel.fn.__module__ for kernel in KERNELS.values()}:
            module = import_module(name)
            if hasattr(module, "runs_on"):
                stack.enter_context(mock.patch.object(module, "runs_on", lambda device: True))
            for launches_of in vars(module).values():
                if isinstance(launches_of, Launches):  # what was loaded before is not loaded here, and the reverse
                    stack.enter_context(mock.patch.object(launches_of, "_loaded", {}))
        yield launches


class _Prepared:
    """In place of a kernel that was compiled ahead: recorded when it is launched."""

    def __init__(self, launches: list[Specialisation], compiled: Specialisation) -> None:
        self._launches, self._compiled = launches, compiled

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_: self._launches.append(self._compiled)


def _as_compiled(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Specialisation:
    values, kinds, options = _binder(kernel)(*given, **named)
    of = dict(zip(values, kinds, strict=True))
    constants = {name: values[name] for name, (kind, *_) in of.items() if kind == "constexpr"}
    constants |= {name: options[name] for name in OPTIONS if name in options}
    aligned = tuple(name for name, (kind, how) in of.items() if kind != "constexpr" and "D" in (how or ""))
    return Specialisation(_NAMES[kernel], constants, {name: kind for name, (kind, _) in of.items()}, aligned)


@cache
def _binder(kernel: Any) -> Any:
    """What Triton's own launches take arguments apart with."""
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(_SPELLED))


class WindowsNowhere(InProcessTransport):
    """Programs are bound as for symmetric memory: through windows, here without memory. With nodes of `node_size` ranks
    through those of a node, with messages between nodes. `pooled`: directly into outputs, where that is possible."""

    def __init__(self, direction: Direction, node_size: int | None = None, pooled: bool = False) -> None:
        super().__init__(node_size is None, "nccl", node_size)
        self.windows = WindowPolicy(direction, outputs=_OfAll() if pooled else {})  # type: ignore[assignment]

    def window(self, ranks: tuple[int, ...], nbytes: int, halves: int = 1) -> Window:
        size = pad_bytes(len(ranks)) + halves * window_size(nbytes)
        memory = {rank: torch.empty(size, dtype=torch.uint8, device=_NOWHERE) for rank in ranks}
        return Window(ranks[0], memory, 0, Failure(_NOWHERE), halves)

    def outputs(self, ranks: tuple[int, ...]) -> OutputPool:
        return OutputPool(self.window(ranks, _POOLED.nbytes, _POOLED.number + 1), _POOLED.number)


_POOLED = PooledOutputs(1 << 34, 1)


class _OfAll(dict[tuple[int, ...], PooledOutputs]):
    """Every group has pooled outputs."""

    def get(self, *_: Any) -> Any:
        return _POOLED


TRANSPORTS = (
    InProcessTransport(),
    InProcessTransport(one_sided=False),
    InProcessTransport(one_sided=False, backend="nccl"),
    WindowsNowhere("push"),
    WindowsNowhere("pull"),
    WindowsNowhere("auto", pooled=True),
    WindowsNowhere("push", node_size=2),
)


def programs() -> Iterator[Run]:
    """Real models at their full size; pairs of layouts, even and uneven, in all dtypes; inputs that are transposed, and
    that begin at an odd element. Of the first rank and of the last, which has what is left over."""
    for w in load_workloads():
        yield from of_ranks(w.mesh, w.full_shape, w.dtype, w.source, w.target)
    for shape, pairs in ((EVEN, PAIRS), (UNEVEN, PAIRS), (CUBE, PAIRS[::5]), (SMALL, FEW_PAIRS)):
        for pair in pairs:
            yield from of_ranks((2, 2), shape, "bfloat16", *pair)
    for shape, pair in product((EVEN, UNEVEN), FEW_PAIRS):
        yield from of_ranks((4, 2), shape, "bfloat16", *pair, odd=True)
        yield from of_ranks((4, 2), shape, "bfloat16", *pair, transposed=True)
        for dtype in DTYPES:
            if not (dtype.is_complex and "max" in pair[0]):
                yield from of_ranks((4, 2), shape, str(dtype)[6:], *pair)
    for ranks in (8, 64):
        yield from of_ranks((ranks,), EVEN, "bfloat16", "P", "S0")


def of_ranks(
    mesh: Sequence[int], shape: Sequence[int], dtype: str, *layouts: str, odd: bool = False, transposed: bool = False
) -> Iterator[Run]:
    """A program on the first and on the last rank, on each transport."""
    program = plan(mesh, shape, dtype, *layouts)
    example = f"{program.source} → {program.target} {program.dtype}{list(program.shape)}"
    for position in (0, program.mesh.size - 1):
        held = program.source_shape(position)
        strides = contiguous_strides(held[::-1])[::-1] if transposed else contiguous_strides(held)
        aligned = getattr(torch, dtype).itemsize if odd else 16
        for transport in TRANSPORTS:
            yield example, partial(_bind, program, position, strides, aligned, transport)


def _bind(
    program: Program, position: int, strides: tuple[int, ...], aligned: int, transport: InProcessTransport
) -> None:
    """`aligned`: bytes that the address of the input is a multiple of."""
    bound = BoundProgram(program, position, strides, transport, getattr(torch, program.dtype), _NOWHERE)
    bound.build(aligned)


@dataclass(frozen=True)
class Layer:
    """One layer's dispatches and combines, with all that autograd does.

    Attributes:
        odd: tokens lie in rows that are one element longer, and begin with the second.
        experts_twice: every rank but the last also has the last expert.
        options: of DispatchOptions. With a `chunk_capacity` ranks send and receive.
    """

    name: str
    hidden: int
    top_k: int
    experts: int
    ranks: int = 8
    tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16
    ids: torch.dtype = torch.int64
    odd: bool = False
    experts_twice: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.ranks} ranks, {self.tokens} tokens, {str(self.dtype)[6:]}"]
        parts += [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join(parts + ["odd addresses"] * self.odd + ["replicated experts"] * self.experts_twice)


def layers() -> Iterator[Layer]:
    """Training and decoding of known shapes, in all dtypes, alignments and layouts; rows of odd lengths.

    Ranks that send and receive chunks of exact size launch what one-sided ranks launch where groups are not aligned,
    and what ranks launch that send and receive chunks of fixed size.
    """
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    batched = {"layout": "batched", "expert_capacity": 512}
    deepseek, mixtral = Layer("DeepSeek-V3", 7168, 8, 256), Layer("Mixtral", 4096, 2, 8)
    yield replace(deepseek, ranks=64)
    for layer in (deepseek, mixtral):
        for tokens, ids in product((4096, 128, 1), (torch.int64, torch.int32)):
            yield replace(layer, tokens=tokens, ids=ids)
        for align, dtype in product((1, 8, 128), dtypes):
            yield replace(layer, dtype=dtype, options={"align": align})
            if dtype != torch.float16:
                yield replace(layer, dtype=dtype, options={"align": align, "chunk_capacity": 1.25})
        for tokens in (4096, 128):
            yield replace(layer, experts_twice=True, tokens=tokens)
        yield replace(layer, odd=True)
        for dtype in dtypes:
            yield replace(layer, dtype=dtype, options={"zero_rows": True})
        for options in (batched, batched | {"chunk_capacity": 1.25}, {"save": "copy"}):
            yield replace(layer, options=options)
        for quantize, dtype in product(QUANTIZATIONS, dtypes):
            yield replace(layer, dtype=dtype, options={"quantize": quantize, "quantize_output": quantize})
        yield replace(layer, options={"quantize": "mxfp8", "scale_layout": "blocked", "align": 32})
        yield replace(layer, odd=True, options={"quantize": "fp8_128", "save": "copy", "zero_rows": True})
    for (hidden, top_k, experts), dtype in product(((4097, 3, 60), (2500, 1, 3), (20, 6, 300)), dtypes):
        yield Layer("odd", hidden, top_k, experts, 4, 1000, dtype, options={"save": "copy", "zero_rows": True})
        for quantize in QUANTIZATIONS if dtype is torch.bfloat16 else ():
            yield Layer("odd", hidden, top_k, experts, 4, 1000, dtype, options={"quantize": quantize})


def dispatches(layers: Iterable[Layer]) -> Iterator[Run]:
    """Layers, and the signals of a window."""
    for layer in layers:
        yield str(layer), partial(_train, layer)
    yield "a window of 8 ranks", _signals
    for dtype in (torch.bfloat16, torch.float32):
        yield "a layer of 8 ranks with pooled buffers", partial(_pooled, dtype)
        yield "a layer of 8 ranks to which tokens cross once", partial(_once_per_rank, dtype)
        yield "a layer of nodes of 8 ranks", partial(_two_levels, dtype)


def _train(layer: Layer) -> None:
    """Dispatch, the activation of experts, combine in every way, and the backward of all, of all ranks."""
    held = [list(range(r * layer.experts // layer.ranks, (r + 1) * layer.experts // layer.ranks))
            for r in range(layer.ranks)]  # fmt: skip
    last = layer.experts - 1
    dispatcher = VirtualTokenDispatcher(
        layer.ranks,
        num_experts=layer.experts,
        top_k=layer.top_k,
        hidden=layer.hidden,
        max_tokens=layer.tokens,
        dtype=layer.dtype,
        options=DispatchOptions(
            **layer.options,
            expert_map=[[*h, *[last] * (last not in h)] for h in held] if layer.experts_twice else None,
        ),
        device=_NOWHERE,
        one_sided="chunk_capacity" not in layer.options,
    )

    def of_all(*shape: int, dtype: torch.dtype, wanted: bool = False) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=_NOWHERE, requires_grad=wanted) for _ in range(layer.ranks)]

    wide = of_all(layer.tokens, layer.hidden + layer.odd, dtype=layer.dtype, wanted=True)
    xs = [x[:, int(layer.odd) :] for x in wide]
    ids = of_all(layer.tokens, layer.top_k, dtype=layer.ids)
    routed = dispatcher.dispatch(xs, ids, of_all(layer.tokens, layer.top_k, dtype=torch.float32, wanted=True))
    every = torch.autograd.grad
    values = [(r.x if r.scale is None else r.dequantized()) * 1 for r in routed]
    for r in routed:
        shape = *r.x.shape[:-1], 2 * layer.hidden + layer.odd
        both = torch.empty(shape, dtype=layer.dtype, device=_NOWHERE, requires_grad=True)
        gate, up = both[..., int(layer.odd) :].chunk(2, -1)
        y = silu_and_mul(gate, up, r)
        every(y, both, torch.empty_like(y))
    for add, weighted in product((None, xs), (True, False)):
        ys = dispatcher.combine(values, routed, add=add, weighted=weighted)
        every(ys, wide, [torch.empty_like(y) for y in ys], retain_graph=True)


def _pooled(dtype: torch.dtype) -> None:
    """Rows that go to pooled buffers, and experts' outputs that lie in them, or are copied to a window, with signals in
    the same launches and without."""
    size, tokens, k, hidden = 8, 128, 8, 7168

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_NOWHERE)

    of_all, matrices = ([empty(*shape, dtype=kind) for _ in range(size)] for shape, kind in (
        ((1024, hidden), dtype), ((size, 258), torch.int32),
    ))  # fmt: skip
    chosen = ChosenBuffers(Buffers(of_all), matrices[0][:, -1], empty(1, dtype=torch.int64))
    physical_experts = PhysicalExperts.divided(tuple(range(0, 257, 32)), _NOWHERE)
    groups = group_rows(empty(size, 257), physical_experts, 0, 1024)
    rows, x = TokenRows(empty(tokens, k), empty(tokens, k)), empty(tokens, hidden, dtype=dtype)
    weights = empty(tokens, k, dtype=torch.float32)
    numbers = Buffers([empty(1024, dtype=torch.float32)] * size)
    combine_rows(rows, Buffers(of_all), empty(tokens, hidden, dtype=dtype), weights, nodes=empty(size))
    signals = _window(size).signals(1)
    assert signals is not None
    for quantize, barrier in product(QUANTIZATIONS, (None, WindowBarrier(signals, 1))):
        packed = packed_rows("quantize", quantize, hidden)
        assert packed is not None
        how, begin, size_of = (
            QuantizedRows(QUANTIZATIONS[quantize], packed.begins[1]),
            packed.begins[1],
            packed.sizes[1],
        )
        received = Buffers([empty(1024, packed.words)] * size)
        push_rows(x, rows, received, groups, 0, weights, numbers, most_padding=0, barrier=barrier, quantized=how)
        offer_rows(of_all[0], received.tensors[0], groups.num_rows, Buffers(matrices), 257, 1, barrier, how)
        number, kind = column_words(size_of)
        parts = [Columns(begin, size_of, empty(1024, number, dtype=kind), None)]
        if quantize == "mxfp8":
            parts.append(Columns(begin, size_of, empty(block_rows(1024, 32, 1), size_of // 4), groups.offsets))
        for source, columns, fill in product((received.tensors[0], None), parts, (0.0, None)):
            receive_rows(
                source, empty(1024, packed.words), groups.num_rows, fill, (numbers.tensors[0],) * 2,
                barrier and barrier.signals, columns,
            )  # fmt: skip
    for barrier in (None, WindowBarrier(signals, 1)):
        push_rows(x, rows, chosen, groups, 0, weights, numbers, most_padding=0, barrier=barrier)
        for target in (of_all[1], None):
            offer_rows(of_all[0], target, groups.num_rows, Buffers(matrices), 257, 1, barrier)
        release = barrier and barrier.signals
        for source, fill, given in product((x, None), (0.0, None), ((numbers.tensors[0][:tokens],) * 2, None)):
            receive_rows(source, empty(tokens, hidden, dtype=dtype), groups.num_rows, fill, given, release)
        for ids in (empty(tokens, k), empty(4096, k)):
            count_pairs(ids, 256, share=CountShare(Buffers(matrices), 0, 1, barrier))
        gather_values(rows, numbers, release)
        for of_pairs, add in product((weights, None), (x, None)):
            combine_rows(rows, chosen, empty(tokens, hidden, dtype=dtype), of_pairs, add, release=release)


def _once_per_rank(dtype: torch.dtype) -> None:
    """Tokens that are fetched once, and sums that return, with signals in the same launches and without."""
    size, tokens, k, hidden = 8, 128, 8, 7168

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_NOWHERE)

    groups = group_rows(empty(size, 257), PhysicalExperts.divided(tuple(range(0, 257, 32)), _NOWHERE), 0, 1024)
    rows, x, out = TokenRows(empty(tokens, k), empty(tokens, k)), *(empty(n, hidden, dtype=dtype) for n in (128, 1024))
    table, numbers = OwnRows(empty(1024, k), empty(1024, k, dtype=torch.float32)), empty(1024, dtype=torch.float32)
    tables, of_all = RowTables(*(Buffers([part] * size) for part in table)), Buffers([x] * size)
    signals, error = _window(size).signals(1), empty(1, dtype=torch.int64)
    assert signals is not None
    for barrier in (None, WindowBarrier(signals, 1)):
        offer_tokens(x, x, barrier=barrier)
        offer_tokens(x, x, rows, empty(tokens, k, dtype=torch.float32), tables, rows.row, 0, barrier=barrier)
        for weights in (table.weight, None):
            push_sums(out, table.row, weights, of_all, barrier=barrier)
    for padding in (0, 7):
        spread_rows(of_all, table, out, groups, padding)
        spread_rows(of_all, table, out, groups, padding, table, numbers, error)
    quantized = packed_rows("quantize_output", "fp8_128", hidden)
    assert quantized is not None
    how = QuantizedRows(QUANTIZATIONS["fp8_128"], quantized.begins[1])
    push_sums(empty(1024, quantized.words), table.row, table.weight, of_all, how)


def _two_levels(dtype: torch.dtype) -> None:
    """Rows of a rank's own tokens and of those that it forwards, which are pushed and summed inside its node one after
    the other; only the last launch signals."""
    size, tokens, k, hidden = 8, 128, 8, 7168

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_NOWHERE)

    groups = group_rows(empty(size, 257), PhysicalExperts.divided(tuple(range(0, 257, 32)), _NOWHERE), 0, 1024)
    rows, index, error = TokenRows(empty(tokens, k), empty(tokens, k)), empty(size), empty(1, dtype=torch.int64)
    weights, numbers = empty(tokens, k, dtype=torch.float32), Buffers([empty(1024, dtype=torch.float32)] * size)
    signals = _window(size).signals(1)
    packed = packed_rows("quantize_output", "fp8_128", hidden)
    assert signals is not None and packed is not None
    how = QuantizedRows(QUANTIZATIONS["fp8_128"], packed.begins[1])
    for width, kind in ((hidden, dtype), (packed.words, torch.int32)):
        x, of_all = empty(tokens, width, dtype=kind), Buffers([empty(1024, width, dtype=kind)] * size)
        for padding, barrier in ((127, None), (0, WindowBarrier(signals, 1))):
            chosen = ChosenBuffers(of_all, index, error)
            push_rows(x, rows, chosen, groups, 0, weights, numbers, padding, barrier=barrier)
            push_rows(x, rows, of_all, groups, 0, most_padding=padding, barrier=barrier)
    for buffers, quantized in ((of_all, how), (Buffers([empty(1024, hidden, dtype=dtype)] * size), None)):
        for of_pairs, release in product((weights, None), (None, signals)):
            chosen, out = ChosenBuffers(buffers, index, error), empty(tokens, hidden, dtype=dtype)
            combine_rows(rows, chosen, out, of_pairs, release=release, quantized=quantized)


def _window(size: int) -> Window:
    memory = {r: torch.empty(pad_bytes(size) + 4096, dtype=torch.uint8, device=_NOWHERE) for r in range(size)}
    return Window(3, memory, 0, Failure(_NOWHERE))


def _signals() -> None:
    """What a window launches for outputs of all dtypes, and ranks that send for words beside messages."""
    size = 8
    window = _window(size)
    for dtype in (*DTYPES, torch.bfloat16):
        window.signal("acquire", 0, 1)
        window.signal("barrier", 5, 1)
        for use in ("release", "poison"):
            window.signal(use, 0, 1, torch.empty(5, dtype=dtype, device=_NOWHERE))
    window.refuse()
    window.signal_failure()
    words = torch.empty(size, dtype=torch.int64, device=_NOWHERE)
    WordComparison(words, Failure(_NOWHERE))(words, 5, words)
