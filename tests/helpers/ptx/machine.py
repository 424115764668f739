"""Executes a kernel of PTX: warps of 32 lanes, whose parts have program counters of their own where lanes diverge.

A scheduler decides whose turn it is, at every access to memory and at every barrier, by a seed. An instruction whose
form is not known is an error, and so is what a GPU would not survive: an access outside of tensors or misaligned, a
race in shared memory, a value that no instruction has set in an address, a branch or a store.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from .forms import FORMS, UNSIGNED, bits_of, immediate, typed
from .memory import GlobalMemory, SharedMemory
from .text import Instruction, parse

LANES = 32
ALL = (1 << LANES) - 1
_LANE = np.arange(LANES)
_MEMORY_FORMS = frozenset(
    [f"{op}.global{vector}.{kind}" for op in ("ld", "st") for vector, kinds in
     (("", ("b8", "b16", "b32", "b64")), (".v2", ("b32", "b64")), (".v4", ("b32",))) for kind in kinds]
    + [f"{op}.shared.{form}" for op in ("ld", "st") for form in
       ("b8", "b16", "b32", "b64", "v2.b8", "v2.b32", "v2.b64", "v4.b16", "v4.b32")]
    + ["ld.shared.s32"]
    + ["st.shared.cta.b32", "st.shared.cta.b64", "ld.acquire.sys.global.b64", "ld.relaxed.sys.global.b64",
       "ld.global.gpu.relaxed.b64", "ld.global.sys.acquire.b64", "ld.global.sys.relaxed.b64",
       "st.relaxed.sys.global.b64", "st.release.sys.global.b64"]
)  # fmt: skip
_ATOMIC_FORMS = {
    "atom.global.gpu.acq_rel.add.u32": "add", "atom.global.gpu.acq_rel.add.u64": "add",
    "atom.global.gpu.relaxed.add.u64": "add", "atom.global.gpu.relaxed.exch.b64": "exch",
    "atom.global.relaxed.gpu.cas.b64": "cas", "atom.shared.add.u32": "add", "atom.relaxed.sys.shared.add.u32": "add",
}  # fmt: skip
_PARAMETER_FORMS = frozenset(f"ld.param.{kind}" for kind in ("b8", "b16", "b32", "b64", "s32"))


class Fault(AssertionError):
    """Something that is not defined, or a kernel that does not end."""


@dataclass(eq=False)
class Part:
    """Lanes of a warp that are at the same instruction.

    Attributes:
        lanes: as the bits of a number.
        waits: why it does not go on: "barrier", "warp" (for the other lanes of its warp), or nothing.
    """

    lanes: int
    at: int = 0
    waits: str = ""


@dataclass(eq=False)
class Warp:
    """`values` and `defined`: of each register a value for each lane, and the lanes in which an instruction set it."""

    block: Block
    number: int
    values: list[np.ndarray]
    defined: list[int]
    parts: list[Part] = field(default_factory=lambda: [Part(ALL)])

    @property
    def threads(self) -> np.ndarray:
        return _LANE + LANES * self.number

    @property
    def live(self) -> int:
        return sum(part.lanes for part in self.parts)


class Block:
    """One program of a launch."""

    def __init__(self, launch: Launch, index: tuple[int, int, int]) -> None:
        self.launch, self.index = launch, index
        self.shared = SharedMemory(launch.shared_bytes, launch.warps)
        widths = launch.code.widths
        self.warps = [
            Warp(self, number, [np.zeros(LANES, bool if w == 1 else UNSIGNED[w]) for w in widths], [0] * len(widths))
            for number in range(launch.warps)
        ]

    def release_barrier(self) -> None:
        """Let the warps go on if all of them are at the barrier."""
        parts = [part for warp in self.warps for part in warp.parts]
        if parts and all(part.waits == "barrier" for part in parts):
            if len({part.at for part in parts}) > 1:
                raise Fault("threads of a block wait at different barriers")
            self.shared.phase += 1
            for part in parts:
                part.waits, part.at = "", part.at + 1
            for warp in self.warps:
                _merge(warp)


class Launch:
    """One launch of a kernel.

    Args:
        text: the PTX.
        arguments: the bytes of each parameter.
        clock: what the global timer shows, in ns.
    """

    def __init__(
        self, text: str, grid: Sequence[int], warps: int, shared_bytes: int, arguments: Sequence[bytes],
        memory: GlobalMemory, clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:  # fmt: skip
        self.code = decode(text)
        self.grid, self.warps, self.shared_bytes, self.memory, self.clock = grid, warps, shared_bytes, memory, clock
        self.parameters = bytearray(self.code.parameter_bytes)
        for (start, nbytes), value in zip(self.code.parameters.values(), arguments, strict=False):
            assert len(value) == nbytes, (self.code.parameters, arguments)
            self.parameters[start : start + nbytes] = value
        x, y, z = grid
        self.blocks = [Block(self, (i, j, k)) for k, j, i in product(range(z), range(y), range(x))]


def run(launches: Sequence[Launch], seed: int = 0, most_turns: int = 1 << 22) -> None:
    """Run launches at the same time, to their ends.

    Raises:
        Fault, MemoryFault: what a GPU would not survive; the text has the instruction.
    """
    chance = random.Random(seed)
    warps = [warp for launch in launches for block in launch.blocks for warp in block.warps]
    for _ in range(most_turns):
        if not warps:
            return
        place = chance.randrange(len(warps))
        warp = warps[place]
        free = [part for part in warp.parts if not part.waits]
        if free:
            # The hindmost, so that lanes meet again; sometimes another, which it may wait for.
            part = min(free, key=lambda p: p.at) if chance.random() < 0.9 else chance.choice(free)
            _turn(warp, part, chance.choice((1, 4, 64)))
        if not warp.parts:
            warps[place] = warps[-1]
            warps.pop()
        if not free or not warp.parts or all(part.waits for part in warp.parts):
            warp.block.release_barrier()
            if warps and all(part.waits for other in warps for part in other.parts):
                raise Fault("all threads wait for one another")
    raise Fault(f"not at its end after {most_turns} turns")


def _merge(warp: Warp) -> None:
    """Join the parts that are at one instruction; let lanes go on that have waited for all lanes of the warp."""
    joined: dict[tuple[int, str], Part] = {}
    for part in warp.parts:
        other = joined.setdefault((part.at, part.waits), part)
        if other is not part:
            other.lanes |= part.lanes
    warp.parts = list(joined.values())


def _turn(warp: Warp, part: Part, accesses: int) -> None:
    """Execute instructions of a part until it waits, ends, meets another part, or has accessed memory or begun a loop
    anew so many times."""
    operations = warp.block.launch.code.operations
    while True:
        at = part.at
        operation = operations[at]
        kind = operation.kind
        if kind == "warp" and part.lanes != warp.live:
            part.waits = "warp"  # as `.sync` has it, for all lanes that have not ended
            waiting = sum(other.lanes for other in warp.parts if other.at == at and other.waits == "warp")
            if waiting != warp.live:
                return
            _merge(warp)
            (part,) = warp.parts
            part.waits = ""
        if kind == "barrier":
            part.waits = "barrier"
            _merge(warp)
            return
        part.at = at + 1
        try:
            operation.run(warp, part)
        except AssertionError as error:
            where = f"{operation.text} (block {warp.block.index}, warp {warp.number}, lanes {part.lanes:#x})"
            raise type(error)(f"{error}: {where}") from error
        if kind == "end":
            return
        if len(warp.parts) > 1 and any(p is not part and p.at == part.at for p in warp.parts):
            _merge(warp)
            return
        if kind == "branch" and part not in warp.parts:
            return
        if kind == "access" or part.at <= at:  # a loop may wait for another warp
            accesses -= 1
            if not accesses:
                return


@dataclass(frozen=True)
class Operation:
    kind: str
    """"compute", "access", "branch", "end", "barrier", or "warp" for what all lanes of a warp do together."""
    run: Callable[[Warp, Part], None]
    text: str


@dataclass(frozen=True)
class Code:
    """A kernel as functions. `widths`: the bits of each register."""

    operations: list[Operation]
    widths: list[int]
    parameters: dict[str, tuple[int, int]]
    parameter_bytes: int


@cache
def decode(text: str) -> Code:
    """
    Raises:
        Fault: an instruction of a form that is not known; the text has its line.
    """
    return _Decoder(text).code()


def _lanes(bits: int) -> np.ndarray:
    return (bits >> _LANE & 1).astype(bool)


def _bits(lanes: np.ndarray) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class _Decoder:
    def __init__(self, text: str) -> None:
        self._kernel = parse(text)
        self._registers: dict[str, int] = {}
        self._widths: list[int] = []
        self._parameters: dict[str, tuple[int, int]] = {}
        at = 0
        for name, nbytes in self._kernel.parameters.items():
            at = -(-at // nbytes) * nbytes
            self._parameters[name] = at, nbytes
            at += nbytes
        self._parameter_bytes = at

    def code(self) -> Code:
        operations = [self._operation(one) for one in self._kernel.instructions]
        return Code(operations, self._widths, self._parameters, self._parameter_bytes)

    # Operands.

    def _register(self, name: str) -> int:
        if name not in self._registers:
            kind = self._kernel.bits.get(name) or self._kernel.bits[re.sub(r"\d+$", "", name)]
            self._registers[name] = len(self._widths)
            self._widths.append(bits_of(kind))
        return self._registers[name]

    def _is_register(self, operand: str) -> bool:
        return operand in self._kernel.bits or re.sub(r"\d+$", "", operand) in self._kernel.bits

    def _source(self, operand: str, kind: str) -> Callable[[Warp], tuple[np.ndarray, int]]:
        """A function that returns the values of an operand, and the lanes in which they are defined."""
        if self._is_register(operand):
            slot = self._register(operand)
            return lambda warp: (warp.values[slot], warp.defined[slot])
        special: dict[str, Callable[[Warp], Any]] = {
            "%tid.x": lambda warp: warp.threads,
            "%globaltimer": lambda warp: warp.block.launch.clock(),
            **{f"%ctaid.{d}": lambda warp, i=i: warp.block.index[i] for i, d in enumerate("xyz")},
            **{f"%nctaid.{d}": lambda warp, i=i: warp.block.launch.grid[i] for i, d in enumerate("xyz")},
        }
        width = UNSIGNED.get(bits_of(kind))
        if operand in special:
            function = special[operand]
            return lambda warp: (np.broadcast_to(np.asarray(function(warp)).astype(width), LANES), ALL)
        if operand.startswith("{"):
            names = operand.strip("{} ").split(",")
            parts = [self._source(name.strip(), f"b{bits_of(kind) // len(names)}") for name in names]
            return lambda warp: _packed([part(warp) for part in parts], width)
        if operand == "global_smem":
            value = 0
        elif operand in self._parameters:
            value = self._parameters[operand][0]
        else:
            value = immediate(operand, kind)
        constant = np.full(LANES, value, bool if width is None else width)
        return lambda warp: (constant, ALL)

    def _write(self, target: str, kind: str) -> Callable[[Warp, int, np.ndarray, int], None]:
        """A function that sets the lanes of a register. Where it is wider than the type, signed numbers are
        extended by their sign."""
        if target == "_":
            return lambda warp, lanes, values, defined: None
        slot = self._register(target)
        width = self._widths[slot]
        wider = width > bits_of(kind)
        signed = {16: np.int16, 32: np.int32, 64: np.int64}

        def write(warp: Warp, lanes: int, values: np.ndarray, defined: int) -> None:
            if wider:
                values = typed(values, kind).astype(signed[width]) if kind[0] == "s" else values
                values = values.astype(UNSIGNED[width]) if kind[0] != "s" else values.view(UNSIGNED[width])
            if lanes == ALL:
                warp.values[slot], warp.defined[slot] = values, defined
            else:
                warp.values[slot] = np.where(_lanes(lanes), values, warp.values[slot])
                warp.defined[slot] = warp.defined[slot] & ~lanes | defined & lanes

        return write

    # Instructions.

    def _operation(self, one: Instruction) -> Operation:
        head = one.name[0]
        if head in ("bra", "ret", "bar"):
            kind, run = self._control(one)
        elif head in ("shfl", "vote", "redux", "ldmatrix", "stmatrix"):
            kind, run = "warp", self._of_warp(one)
        elif one.form in _PARAMETER_FORMS:
            kind, run = "compute", self._parameter(one)
        elif one.form in _MEMORY_FORMS or one.form in _ATOMIC_FORMS:
            kind, run = "access", self._access(one)
        elif head == "mov" and one.operands[0].startswith("{"):
            kind, run = "compute", self._unpack(one)
        elif one.form in FORMS:
            kind, run = "compute", self._compute(one)
        else:
            raise Fault(f"an instruction of a form that is not known: {one.text}")
        return Operation(kind, self._guarded(one, run) if kind != "branch" else run, one.text)

    def _guard(self, one: Instruction) -> Callable[[Warp, int], int]:
        """The lanes of a part for which an instruction is not skipped."""
        if not one.guard:
            return lambda warp, lanes: lanes
        predicate, negated = self._source(one.guard.lstrip("!"), "pred"), one.guard.startswith("!")

        def guarded(warp: Warp, lanes: int) -> int:
            value, defined = predicate(warp)
            if lanes & ~defined:
                raise Fault("its guard is not defined in every lane")
            bits = _bits(value)
            return lanes & (~bits if negated else bits)

        return guarded

    def _guarded(self, one: Instruction, run: Callable[[Warp, int], None]) -> Callable[[Warp, Part], None]:
        guard = self._guard(one)

        def guarded(warp: Warp, part: Part) -> None:
            lanes = guard(warp, part.lanes)
            if lanes:
                run(warp, lanes)

        return guarded if one.guard else lambda warp, part: run(warp, part.lanes)

    def _control(self, one: Instruction) -> tuple[str, Any]:
        if one.form == "ret":

            def end(warp: Warp, lanes: int) -> None:
                for part in warp.parts:
                    part.lanes &= ~lanes
                warp.parts = [part for part in warp.parts if part.lanes]

            return "end", end
        if one.form in ("bar.sync", "bar.warp.sync"):

            def of_warp(warp: Warp, lanes: int) -> None:
                warp.block.shared.warp_phases[warp.number] += 1

            return ("barrier", of_warp) if one.form == "bar.sync" else ("warp", of_warp)
        if one.form not in ("bra", "bra.uni"):
            raise Fault(f"an instruction of a form that is not known: {one.text}")
        guard, target = self._guard(one), self._kernel.labels[one.operands[0]]

        def branch(warp: Warp, part: Part) -> None:
            taken = guard(warp, part.lanes)
            if taken == part.lanes:
                part.at = target
            elif taken:
                part.lanes &= ~taken
                warp.parts.append(Part(taken, target))
                _merge(warp)

        return "branch", branch

    def _compute(self, one: Instruction) -> Callable[[Warp, int], None]:
        form = FORMS[one.form]
        target, *operands = one.operands
        sources = [self._source(operand, kind) for operand, kind in zip(operands, form.types[1:], strict=True)]
        write, compute = self._write(target, form.types[0]), form.compute
        picks = one.name[0] == "selp"
        decides = {"and.pred": False, "or.pred": True}.get(one.form)

        def run(warp: Warp, lanes: int) -> None:
            given = [source(warp) for source in sources]
            defined = ALL
            for _, of_source in given:
                defined &= of_source
            if lanes & ~defined:  # some are not defined: whether the result depends on them
                if picks:
                    taken = _bits(given[2][0])
                    defined = given[2][1] & (taken & given[0][1] | ~taken & given[1][1])
                elif decides is not None:
                    for value, of_source in given:
                        defined |= of_source & _bits(value == decides)
            write(warp, lanes, compute(*(value for value, _ in given)), defined)

        return run

    def _unpack(self, one: Instruction) -> Callable[[Warp, int], None]:
        names = [name.strip() for name in one.operands[0].strip("{} ").split(",")]
        bits = bits_of(one.name[-1])
        each = bits // len(names)
        source, writes = self._source(one.operands[1], one.name[-1]), [self._write(n, f"b{each}") for n in names]

        def run(warp: Warp, lanes: int) -> None:
            values, defined = source(warp)
            for i, write in enumerate(writes):
                write(warp, lanes, (values >> UNSIGNED[bits](i * each)).astype(UNSIGNED[each]), defined)

        return run

    def _address(self, operand: str, kind: str) -> Callable[[Warp, int], np.ndarray]:
        """The addresses of an operand such as "[%rd1 + 8]", defined in these lanes."""
        base, _, offset = operand.strip("[] ").partition("+")
        source, more = self._source(base.strip(), kind), UNSIGNED[bits_of(kind)](int(offset.strip() or 0))

        def addresses(warp: Warp, lanes: int) -> np.ndarray:
            values, defined = source(warp)
            if lanes & ~defined:
                raise Fault("its address is not defined in every lane")
            return values + more

        return addresses

    def _parameter(self, one: Instruction) -> Callable[[Warp, int], None]:
        kind = one.name[-1]
        base = one.operands[1].strip("[] ")
        wide = self._is_register(base) and self._widths[self._register(base)] == 64
        addresses, write = self._address(one.operands[1], "b64" if wide else "b32"), self._write(one.operands[0], kind)
        nbytes = bits_of(kind) // 8

        def run(warp: Warp, lanes: int) -> None:
            data, at = warp.block.launch.parameters, addresses(warp, lanes).astype(np.int64)
            values = np.zeros(LANES, UNSIGNED[8 * nbytes])
            for lane in np.flatnonzero(_lanes(lanes)) if lanes != ALL or (at != at[0]).any() else [slice(None)]:
                start = int(at[0] if isinstance(lane, slice) else at[lane])
                values[lane] = int.from_bytes(data[start : start + nbytes], "little")
            write(warp, lanes, values, ALL)

        return run

    def _access(self, one: Instruction) -> Callable[[Warp, int], None]:
        head, kind, shared = one.name[0], one.name[-1], "shared" in one.name
        nbytes = bits_of(kind) // 8
        count = next((int(word[1]) for word in one.name if re.fullmatch(r"v\d", word)), 1)
        where = one.operands[0 if head == "st" else 1]
        addresses = self._address(where, "b32" if shared and not self._is_wide(where) else "b64")
        listed = [n.strip() for n in one.operands[1 if head == "st" else 0].strip("{} ").split(",")]
        writes = [] if head == "st" else [self._write(name, kind) for name in listed]
        given = [self._source(name, kind) for name in (listed if head == "st" else one.operands[2:])]
        operation = _ATOMIC_FORMS.get(one.form)
        as_bits = UNSIGNED[8 * nbytes]

        def run(warp: Warp, lanes: int) -> None:
            where, active = addresses(warp, lanes), _lanes(lanes)
            at, threads = where[active].astype(np.uint64), warp.threads[active]
            stored = []
            for source in given:
                values, defined = source(warp)
                if lanes & ~defined:
                    raise Fault("what it stores is not defined in every lane")
                stored.append(np.ascontiguousarray(values[active].astype(as_bits, copy=False)))
            memory: Any = warp.block.shared if shared else warp.block.launch.memory
            if not shared:
                memory.check(at, count * nbytes, one.text)
            elif (at % np.uint64(count * nbytes)).any():
                raise Fault(f"an address is no multiple of {count * nbytes}")
            if operation:
                results = [_atomic(memory, operation, at, stored, threads, one.text, shared)]
            elif head == "st":
                for i, values in enumerate(stored):
                    here = at + np.uint64(i * nbytes)
                    memory.store(here, values, threads, one.text) if shared else memory.store(here, values)
                return
            else:
                places = [at + np.uint64(i * nbytes) for i in range(count)]
                results = [
                    memory.load(p, nbytes, threads, one.text) if shared else memory.load(p, nbytes) for p in places
                ]
            for write, values in zip(writes, results, strict=True):
                spread = np.zeros(LANES, as_bits)
                spread[active] = values
                write(warp, lanes, spread, ALL)

        return run

    def _is_wide(self, operand: str) -> bool:
        base = operand.strip("[] ").partition("+")[0].strip()
        return self._is_register(base) and self._widths[self._register(base)] == 64

    def _of_warp(self, one: Instruction) -> Callable[[Warp, int], None]:
        """Instructions in which lanes read one another's values. They order what the warp does with shared memory."""
        form, kind = one.form, one.name[-1]
        if one.name[0] in ("ldmatrix", "stmatrix"):
            return self._matrix(one)
        if form == "vote.sync.ballot.b32":
            source, write = self._source(one.operands[1], "pred"), self._write(one.operands[0], "b32")

            def ballot(warp: Warp, lanes: int) -> None:
                values, defined = source(warp)
                if lanes & ~defined:
                    raise Fault("a vote of lanes in which it is not defined")
                write(warp, lanes, np.full(LANES, _bits(values) & lanes, np.uint32), ALL)

            return ballot
        if form in ("redux.sync.add.s32", "redux.sync.max.s32", "redux.sync.max.u32"):
            source, write = self._source(one.operands[1], kind), self._write(one.operands[0], kind)
            reduce = {"add": np.sum, "max": np.max}[one.name[2]]

            def reduced(warp: Warp, lanes: int) -> None:
                values, defined = source(warp)
                total = reduce(typed(values[_lanes(lanes)], kind)).astype(typed(values, kind).dtype)
                write(warp, lanes, np.full(LANES, total).view(np.uint32), ALL if not lanes & ~defined else 0)

            return reduced
        if form not in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32", "shfl.sync.up.b32"):
            raise Fault(f"an instruction of a form that is not known: {one.text}")
        target, value, lane, clamp, _ = one.operands
        source, write = self._source(value, "b32"), self._write(target, "b32")
        by = self._source(lane, "b32")
        bound, segment = int(clamp, 0) & 0x1F, int(clamp, 0) >> 8 & 0x1F

        def shuffle(warp: Warp, lanes: int) -> None:
            values, defined = source(warp)
            amount = by(warp)[0].astype(np.int64)
            least = _LANE & segment
            if one.name[2] == "up":
                theirs = _LANE - amount
                inside = theirs >= (least | bound & ~segment)
            else:
                theirs = _LANE ^ amount if one.name[2] == "bfly" else least | amount & ~segment & 0x1F
                inside = theirs <= (least | bound & ~segment)
            theirs = np.where(inside, theirs, _LANE)
            read = _lanes(defined & lanes)[theirs]
            write(warp, lanes, values[theirs], _bits(read))

        return shuffle

    def _matrix(self, one: Instruction) -> Callable[[Warp, int], None]:
        """ldmatrix and stmatrix: 8 × 8 elements of 2 bytes. Lane 8 i + r has the address of row r of matrix i; lane t
        has the elements 2 (t mod 4) and the next of row t div 4 of each, or of the column where transposed."""
        words = [w for w in one.name[1:] if w not in ("sync", "aligned", "m8n8", "shared", "b16", "trans")]
        if len(words) != 1 or words[0] not in ("x1", "x2", "x4"):
            raise Fault(f"an instruction of a form that is not known: {one.text}")
        count, transposed, loads = int(words[0][1]), "trans" in one.name, one.name[0] == "ldmatrix"
        listed = [n.strip() for n in one.operands[0 if loads else 1].strip("{} ").split(",")]
        addresses = self._address(one.operands[1 if loads else 0], "b32")
        writes = [self._write(name, "b32") for name in listed] if loads else []
        sources = [] if loads else [self._source(name, "b32") for name in listed]
        row, column = (_LANE // 4)[:, None], (2 * (_LANE % 4))[:, None] + np.arange(2)
        row, column = (
            (column, np.broadcast_to(row, column.shape)) if transposed else (np.broadcast_to(row, column.shape), column)
        )

        def run(warp: Warp, lanes: int) -> None:
            if lanes != ALL:
                raise Fault("not executed by all lanes of its warp")
            shared, used = warp.block.shared, (1 << 8 * count) - 1
            starts = addresses(warp, used)
            if (starts[: 8 * count] % 16).any():
                raise Fault("an address is no multiple of 16")
            for i in range(count):
                at = (starts[8 * i + row] + (2 * column).astype(np.uint32)).astype(np.uint64).ravel()
                threads = np.repeat(warp.threads, 2)
                if loads:
                    halves = shared.load(at, 2, threads, one.text).reshape(LANES, 2).astype(np.uint32)
                    writes[i](warp, ALL, halves[:, 1] << 16 | halves[:, 0], ALL)
                    continue
                values, defined = sources[i](warp)
                if defined != ALL:
                    raise Fault("what it stores is not defined in every lane")
                halves = np.stack([values & 0xFFFF, values >> 16], 1).astype(np.uint16).ravel()
                shared.store(at, halves, threads, one.text)

        return run


def _packed(parts: list[tuple[np.ndarray, int]], width: Any) -> tuple[np.ndarray, int]:
    each = 8 * np.dtype(width).itemsize // len(parts)
    total, defined = np.zeros(LANES, width), ALL
    for i, (values, of_part) in enumerate(parts):
        total = total | values.astype(width) << width(i * each)
        defined &= of_part
    return total, defined


def _atomic(
    memory: Any, operation: str, at: np.ndarray, given: list[np.ndarray], threads: np.ndarray, text: str, shared: bool
) -> np.ndarray:
    """An atomic operation of each lane, one lane after the other; returns what was there before."""
    if shared:
        return memory.add(at, given[0], threads, text)
    before = np.empty_like(given[0])
    for i in range(len(at)):
        here = at[i : i + 1]
        before[i] = memory.load(here, before.itemsize)[0]
        after = {"add": lambda i=i: before[i] + given[0][i], "exch": lambda i=i: given[0][i]}
        if operation != "cas":
            memory.store(here, np.array([after[operation]()], before.dtype))
        elif before[i] == given[0][i]:
            memory.store(here, given[1][i : i + 1])
    return before
