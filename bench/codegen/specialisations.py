"""The kernels that programs launch, each with every set of constants that it is compiled with, found without a GPU.

Programs are bound to a device that has no memory, so their tables say what they would launch and nothing is uploaded.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch

import shardweave.kernels
from shardweave.bench.workloads import load_workloads
from shardweave.kernels import CopyTable, ReduceTable
from shardweave.kernels.channel import Failure
from shardweave.planner import Program, plan
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.transports.in_process import InProcessTransport
from shardweave.runtime.transports.policies import Direction, WindowPolicy
from shardweave.runtime.transports.symmetric_memory.window import Window, pad_bytes, window_size

KERNELS = {
    name.removesuffix("_kernel"): kernel
    for module in pkgutil.iter_modules(shardweave.kernels.__path__)
    for name, kernel in vars(import_module(f"shardweave.kernels.{module.name}")).items()
    if name.endswith("_kernel")
}
"""Every kernel that there is."""
NOWHERE = torch.device("meta")
LAYOUTS = ("R R", "S0 R", "R S1", "S0 S1", "S1 S0", "S0 S0", "S0 S0 @ 0:1,0", "P S0", "P P", "Pavg S1")
PAIRS = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1] and "P" not in pair[1]]
FEW_PAIRS = (("S0 S1", "S1 S0"), ("P S0", "S0 S0"), ("Pmax R", "S1 R"), ("R R", "P S0"))
EVEN, UNEVEN, SMALL, CUBE = (4096, 4096), (8191, 8193), (9, 13), (130, 66, 34)
DTYPES = (torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8,
          torch.int64, torch.bool, torch.complex64)  # fmt: skip


class WindowsNowhere(InProcessTransport):
    """Programs are bound as for symmetric memory: through windows, here without memory. With nodes of `node_size` ranks
    through those of a node, with messages between nodes."""

    def __init__(self, direction: Direction, node_size: int | None = None) -> None:
        super().__init__(node_size is None, "nccl", node_size)
        self.windows = WindowPolicy(direction)  # type: ignore[assignment]

    def window(self, ranks: tuple[int, ...], nbytes: int) -> Window:
        size = pad_bytes(len(ranks)) + window_size(nbytes)
        memory = {rank: torch.empty(size, dtype=torch.uint8, device=NOWHERE) for rank in ranks}
        return _Silent(ranks[0], memory, 0, Failure(NOWHERE))


class _Silent(Window):
    def build(self, dtype: torch.dtype) -> None:
        """Signals are looked at by `token_specialisations`."""


TRANSPORTS = (
    InProcessTransport(),
    InProcessTransport(one_sided=False),
    InProcessTransport(one_sided=False, backend="nccl"),
    WindowsNowhere("push"),
    WindowsNowhere("pull"),
    WindowsNowhere("push", node_size=2),
)


class LaunchRequest(NamedTuple):
    """A program as one rank runs it, on an input with such strides.

    Attributes:
        aligned: bytes that the input's address is a multiple of.
    """

    program: Program
    position: int
    strides: tuple[int, ...]
    aligned: int = 16


@dataclass
class Specialisation:
    """One kernel with one set of constants, `num_warps` among them.

    Attributes:
        example: what launches it.
        signature: the types of all arguments, as Triton spells them; empty: by their names (`aot.compile_kernel`).
        aligned: arguments that are multiples of 16.
        launches: how many launches of what was looked at are this one.
    """

    kernel: str
    constants: dict[str, Any]
    example: str
    signature: dict[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    launches: int = field(default=0, compare=False)

    @property
    def words(self) -> tuple[int, int]:
        """Bytes of a word, of the sources and of the targets."""
        names = ("WORD", "WORD") if self.kernel == "copy_boxes" else ("FROM_WORD", "TO_WORD")
        source, target = (self.constants[name].primitive_bitwidth // 8 for name in names)
        return source, target

    @property
    def vectors(self) -> tuple[int, int]:
        """Bytes that addresses, strides and extents allow an access to have, of the sources and of the targets."""
        source, target = self.words
        return source * self.constants["VS"], target * self.constants["VD"]

    def __str__(self) -> str:
        c, (source, target) = self.constants, self.words
        parts = [f"{c['ROWS']}×{c['COLS']}{' transposed' if c['TRANSPOSED'] else ''}"]
        parts.append(f"{source}×{c['VS']}→{target}×{c['VD']} B")
        if self.kernel == "reduce_boxes":
            parts.append(f"{c['K']} {c['OP']} {c['FROM']}→{c['TO']}{' ÷' if c['DIVIDE'] else ''}")
        aligned = (c["ALIGN_S"], c["ALIGN_D"])
        parts += [f"from {aligned[0]} B, to {aligned[1]} B"] if aligned != (16, 16) else []
        parts += [f"{c['SOURCES']}:{c['TARGETS']} buffers"] + (["fill"] if c["HAS_FILL"] else [])
        return ", ".join(parts)


def specialisations(requested: Iterable[LaunchRequest] | None = None) -> list[Specialisation]:
    """All that some programs use, by default `every_kind()`; the most launched first."""
    found: dict[tuple[Any, ...], Specialisation] = {}
    for request in requested or every_kind():
        program = request.program
        for transport in TRANSPORTS:
            for table, aligned in tables(request, transport):
                kernel = "copy_boxes" if isinstance(table, CopyTable) else "reduce_boxes"
                for _, constants in table.specialisations(aligned, 16):
                    key = kernel, *map(str, constants.values())
                    example = f"{program.source} → {program.target} {program.dtype}{list(program.shape)}"
                    found.setdefault(key, Specialisation(kernel, constants, example)).launches += 1
    return sorted(found.values(), key=lambda s: (s.kernel, -s.launches, str(s)))


def every_kind() -> Iterator[LaunchRequest]:
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
) -> Iterator[LaunchRequest]:
    program = plan(mesh, shape, dtype, *layouts)
    for position in (0, program.mesh.size - 1):
        held = program.source_shape(position)
        strides = contiguous_strides(held[::-1])[::-1] if transposed else contiguous_strides(held)
        yield LaunchRequest(program, position, strides, getattr(torch, dtype).itemsize if odd else 16)


def tables(requested: LaunchRequest, transport: InProcessTransport) -> Iterator[tuple[CopyTable | ReduceTable, int]]:
    """What a rank launches by, and the bytes that all its sources are multiples of."""
    dtype = getattr(torch, requested.program.dtype)
    bound = BoundProgram(requested.program, requested.position, requested.strides, transport, dtype, NOWHERE)
    for number, step in enumerate(bound.steps):
        for kept in step.launches:
            assert kept.table is not None
            yield kept.table, requested.aligned if number == 0 else 16
