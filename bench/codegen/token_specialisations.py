"""The signals and token kernels that transports and dispatchers launch, as Triton would compile them, found without a
GPU.

Windows and dispatchers run on a device that has no memory, as their callers run them, and what they launch is written
down instead. So a constant is here because a launcher gives it, and a kernel because something launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from shardweave.bench.codegen.specialisations import DTYPES, KERNELS, NOWHERE, Specialisation
from shardweave.kernels.channel import Failure
from shardweave.kernels.compare_words import WordComparison
from shardweave.runtime import VirtualTokenDispatcher
from shardweave.runtime.moe.activation import silu_and_mul
from shardweave.runtime.transports.symmetric_memory.window import Window, pad_bytes

_SPELLED = GPUTarget("cuda", 90, 32)  # whose rules say what of an argument a kernel is compiled for: alike on all
_ADDRESS = 1 << 40  # as large as a device's, and as aligned
_OPTIONS = ("num_warps", "enable_fp_fusion")
_NAMES = {kernel: name for name, kernel in KERNELS.items()}
Launch = tuple[str, dict[str, Any], dict[str, str], tuple[str, ...]]
"""A kernel's name; its constants, `num_warps` among them; the types of its arguments; which of these are multiples of
16."""


@dataclass(frozen=True)
class Layer:
    """One layer's dispatches and combines, all that autograd does included.

    Attributes:
        odd: tokens lie in rows that are one element longer, and begin with the second.
        experts_twice: every rank but the last also has the last expert.
    """

    name: str
    hidden: int
    top_k: int
    experts: int
    ranks: int = 8
    tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16
    align: int = 1
    expert_capacity: int | None = None
    layout: str = "grouped"
    ids: torch.dtype = torch.int64
    odd: bool = False
    experts_twice: bool = False
    chunk_capacity: float | None = None  # of ranks that send and receive
    save: str = "buffer"
    zero_rows: bool = False

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.ranks} ranks, {self.tokens} tokens, {str(self.dtype)[6:]}, align {self.align}"]
        parts += ["batched"] * (self.layout == "batched") + ["odd addresses"] * self.odd
        parts += ["chunks of fixed size"] * (self.chunk_capacity is not None)
        parts += [f"save {self.save}"] * (self.save != "buffer") + ["zero rows"] * self.zero_rows
        return ", ".join(parts + ["replicated experts"] * self.experts_twice)


def layers() -> Iterator[Layer]:
    """Training and decoding of known shapes, in all dtypes, alignments and layouts; rows of no good length. Ranks that
    send and receive chunks of exact size launch what ranks that reach each other do where groups are not aligned."""
    deepseek = Layer("DeepSeek-V3", 7168, 8, 256)
    mixtral = Layer("Mixtral", 4096, 2, 8)
    yield replace(deepseek, ranks=64)
    for layer in (deepseek, mixtral):
        for tokens, ids in product((4096, 128, 1), (torch.int64, torch.int32)):
            yield replace(layer, tokens=tokens, ids=ids)
        for align, dtype in product((1, 8, 128), (torch.bfloat16, torch.float16, torch.float32)):
            yield replace(layer, align=align, dtype=dtype)
        yield replace(layer, layout="batched", expert_capacity=512)
        yield replace(layer, experts_twice=True)
        yield replace(layer, experts_twice=True, tokens=128)
        yield replace(layer, odd=True)
        yield replace(layer, save="copy")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield replace(layer, dtype=dtype, zero_rows=True)
        for align, dtype in product((1, 8, 128), (torch.bfloat16, torch.float32)):
            yield replace(layer, align=align, dtype=dtype, chunk_capacity=1.25)
        yield replace(layer, layout="batched", expert_capacity=512, chunk_capacity=1.25)
    for hidden, top_k, experts in ((4097, 3, 60), (2500, 1, 3), (20, 6, 300)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield Layer("odd", hidden, top_k, experts, 4, 1000, dtype, save="copy", zero_rows=True)


class TokenSpecialisation(Specialisation):
    """A signal or a token kernel with one set of constants, types and alignments."""

    @property
    def row_accesses(self) -> tuple[int, int]:
        """How often its text loads, and stores, a piece of a row; (0, 0) for kernels that move no rows.

        Raises:
            KeyError: a kernel moves rows and is not known here.
        """
        c = self.constants
        if "COLS" not in c:
            return 0, 0
        k = c.get("K", 0)
        both = {
            "push_rows": (1, k + 1),
            "combine_rows": (k + c.get("HAS_ADD", 0), 1),
            "weigh_rows": (2, 1),
            "copy_rows": (1, 1),
            "fill_rows": (0, 1),
            "silu_and_mul": (2, 1),
            "silu_and_mul_backward": (3, 4),
        }
        return both[self.kernel]

    @property
    def words(self) -> tuple[int, int]:
        """Bytes of an element of a row, read and written."""
        size = self.constants["WORD"].primitive_bitwidth // 8
        return size, size

    @property
    def vectors(self) -> tuple[int, int]:
        """Bytes that addresses, strides and the length of a row allow an access to have."""
        return self.constants["ALIGN"], self.constants["ALIGN"]

    def __str__(self) -> str:
        omitted = (*_OPTIONS, "SLOT_WORDS", "SOFT", "VEC")
        parts = []
        for name, value in self.constants.items():
            if isinstance(value, bool):
                parts += [name.removeprefix("HAS_").lower()] * (value and name not in omitted)
            elif name not in omitted:
                parts.append(f"{name} {value}")
        parts += [f"{name} {kind}" for name, kind in self.signature.items() if name == "ids"]
        return ", ".join([*parts, f"warps {self.constants['num_warps']}"])


def token_specialisations(requested: Iterable[Layer] | None = None) -> list[TokenSpecialisation]:
    """All that windows and some layers use, by default `layers()`; the most launched of a kernel first.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if not all(isinstance(kernel, JITFunction) for kernel in KERNELS.values()):
        raise RuntimeError("TRITON_INTERPRET=1: kernels are not compiled in this process")
    runs: list[tuple[str, Callable[[], None]]] = [
        (str(layer), partial(_train, layer)) for layer in requested or layers()
    ]
    runs.append(("a window of 8 ranks", _signals))
    found: dict[tuple[Any, ...], TokenSpecialisation] = {}
    for example, run in runs:
        with written_down() as launches:
            run()
        for kernel, constants, signature, aligned in launches:
            key = kernel, *(tuple(map(str, (*part, *part.values()))) for part in (constants, signature)), aligned
            one = TokenSpecialisation(kernel, constants, example, signature, aligned)
            found.setdefault(key, one).launches += 1
    return sorted(found.values(), key=lambda s: (list(KERNELS).index(s.kernel), -s.launches, str(s)))


@contextmanager
def written_down() -> Iterator[list[Launch]]:
    """In this block kernels are not launched; what they would be compiled for is appended to the list. Tensors on the
    device without memory have addresses."""
    launches: list[Launch] = []
    of_memory = torch.Tensor.data_ptr

    def launch(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> _Kept | None:
        kept = _Kept(launches, _as_compiled(kernel, given, named))
        if warmup:
            return kept
        kept[grid]()
        return None

    def address(x: torch.Tensor) -> int:
        return of_memory(x) if x.device != NOWHERE else _ADDRESS + int(x.storage_offset()) * x.element_size()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", address))
        for name in {kernel.fn.__module__ for kernel in KERNELS.values()}:
            module = import_module(name)
            if hasattr(module, "runs_on"):
                stack.enter_context(mock.patch.object(module, "runs_on", lambda device: True))
        yield launches


class _Kept:
    """In place of a kernel that was compiled ahead: written down when it is launched."""

    def __init__(self, launches: list[Launch], compiled: Launch) -> None:
        self._launches, self._compiled = launches, compiled

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_: self._launches.append(self._compiled)


def _as_compiled(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    values, kinds, options = _binder(kernel)(*given, **named)
    of = dict(zip(values, kinds, strict=True))
    constants = {name: values[name] for name, (kind, *_) in of.items() if kind == "constexpr"}
    constants |= {name: options[name] for name in _OPTIONS if name in options}
    aligned = tuple(name for name, (kind, how) in of.items() if kind != "constexpr" and "D" in (how or ""))
    return _NAMES[kernel], constants, {name: kind for name, (kind, _) in of.items()}, aligned


@cache
def _binder(kernel: Any) -> Any:
    """What Triton's own launches take arguments apart with."""
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(_SPELLED))


def _train(layer: Layer) -> None:
    """Dispatch, the activation of experts, combine in every way, and the backward of all, of all ranks."""
    held = [list(range(r * layer.experts // layer.ranks, (r + 1) * layer.experts // layer.ranks))
            for r in range(layer.ranks)]  # fmt: skip
    last = layer.experts - 1
    dispatcher = VirtualTokenDispatcher(
        layer.ranks, num_experts=layer.experts, top_k=layer.top_k, hidden=layer.hidden, max_tokens=layer.tokens,
        dtype=layer.dtype, align=layer.align, expert_capacity=layer.expert_capacity, layout=layer.layout,
        expert_map=[[*h, *[last] * (last not in h)] for h in held] if layer.experts_twice else None, device=NOWHERE,
        chunk_capacity=layer.chunk_capacity, one_sided=layer.chunk_capacity is None, save=layer.save,
        zero_rows=layer.zero_rows,
    )  # fmt: skip

    def of_all(*shape: int, dtype: torch.dtype, wanted: bool = False) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=NOWHERE, requires_grad=wanted) for _ in range(layer.ranks)]

    wide = of_all(layer.tokens, layer.hidden + layer.odd, dtype=layer.dtype, wanted=True)
    xs = [x[:, int(layer.odd) :] for x in wide]
    ids = of_all(layer.tokens, layer.top_k, dtype=layer.ids)
    routed = dispatcher.dispatch(xs, ids, of_all(layer.tokens, layer.top_k, dtype=torch.float32, wanted=True))
    values, every = [r.x * 1 for r in routed], torch.autograd.grad
    for r in routed:
        shape = *r.x.shape[:-1], 2 * layer.hidden + layer.odd
        both = torch.empty(shape, dtype=layer.dtype, device=NOWHERE, requires_grad=True)
        gate, up = both[..., int(layer.odd) :].chunk(2, -1)
        y = silu_and_mul(gate, up, r)
        every(y, both, torch.empty_like(y))
    for add, weighted in product((None, xs), (True, False)):
        ys = dispatcher.combine(values, routed, add=add, weighted=weighted)
        every(ys, wide, [torch.empty_like(y) for y in ys], retain_graph=True)


def _signals() -> None:
    """What a window launches for outputs of all dtypes, and ranks that send for words beside messages."""
    size = 8
    memory = {r: torch.empty(pad_bytes(size) + 4096, dtype=torch.uint8, device=NOWHERE) for r in range(size)}
    window = Window(3, memory, 0, Failure(NOWHERE))
    for dtype in (*DTYPES, torch.bfloat16):
        window.signal("acquire", 0, 1)
        window.signal("barrier", 5, 1)
        for use in ("release", "poison"):
            window.signal(use, 0, 1, torch.empty(5, dtype=dtype, device=NOWHERE))
    window.refuse()
    window.signal_failure()
    words = torch.empty(size, dtype=torch.int64, device=NOWHERE)
    WordComparison(words, Failure(NOWHERE))(words, 5, words)
