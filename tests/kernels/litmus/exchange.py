"""The kernels that ranks launch for exchanges through a window, and the memory operations of their compiled PTX."""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product, repeat
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import z3
from lone_rank import Alone
from memory_model import Event, Execution, Node, mentions
from ptx.text import parse
from symbolic_ptx import Block, Data, Pruned, Word
from triton.runtime.jit import JITFunction

from shardweave.bench.codegen import aot
from shardweave.bench.codegen.launches import _NAMES, Specialisation, _as_compiled, _binder
from shardweave.kernels import (
    Failure,
    StridedBoxes,
    WindowBarrier,
    copy_boxes,
    copy_table,
    offer_rows,
    receive_rows,
    window_use,
)
from shardweave.kernels.tokens import offer_rows as offer_module
from shardweave.kernels.tokens import receive_rows as receive_module
from shardweave.planner import plan
from shardweave.runtime.executor import copies
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.executor.run import run_to_end
from shardweave.runtime.transports.backend_limits import Direction, WindowPolicy
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport
from shardweave.runtime.transports.symmetric_memory.window import Window, pad_bytes

_CPU = torch.device("cpu")
_ROW = 2048  # bytes


class Launch(NamedTuple):
    kernel: Any
    compiled: Specialisation
    values: dict[str, Any]
    grid: tuple[int, ...]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """In this block kernels take CPU tensors, and are not launched; launches are appended to the list."""
    launches: list[Launch] = []

    class Prepared:
        def __init__(self, kernel: Any, compiled: Specialisation) -> None:
            self.kernel, self.compiled = kernel, compiled

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            names = self.kernel.arg_names
            return lambda *given: launches.append(
                Launch(self.kernel, self.compiled, dict(zip(names, given, strict=True)), grid)
            )

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Prepared | None:
        if kernel not in _NAMES:
            patch.setitem(_NAMES, kernel, kernel.__name__)
        prepared = Prepared(kernel, _as_compiled(kernel, given, named))
        if not warmup:
            prepared[grid](*_binder(kernel)(*given, **named)[0].values())
        return prepared if warmup else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        for name, module in list(sys.modules.items()):
            if name.startswith("shardweave.kernels.") and hasattr(module, "runs_on"):
                patch.setattr(module, "runs_on", lambda device: True)
        patch.setattr(copies, "is_plain_memory", lambda device: False)
        yield launches


class _Provider:
    """Memory of all ranks, in this process."""

    device = _CPU

    def __init__(self, rank: int, of_all: list[dict[int, torch.Tensor]], size: int) -> None:
        self.rank, self.size, self.of_all, self.made = rank, size, of_all, 0

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        if self.made == len(self.of_all):
            self.of_all.append({r: torch.zeros(nbytes, dtype=torch.uint8) for r in range(self.size)})
        self.made += 1
        return self.of_all[self.made - 1][self.rank], ""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], name: str) -> dict[int, torch.Tensor]:
        return self.of_all[self.made - 1]


class _Transport(SymmetricMemoryTransport):
    def exchange_text(self, key: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        return dict.fromkeys(ranks, text)


_compiled: dict[tuple[Any, ...], str] = {}


def ptx_of(launch: Launch) -> str:
    """The PTX of the kernel of a launch."""
    c = launch.compiled
    if c.key not in _compiled:
        compiled = aot.compile_kernel(launch.kernel, "sm_90", c.constants, c.signature, c.aligned)
        _compiled[c.key] = compiled.asm["ptx"]
    return _compiled[c.key]


class Path(NamedTuple):
    """One way through a block: what holds if it is taken, and the nodes of its threads."""

    conditions: list[Any]
    threads: list[list[Node]]


@dataclass
class Ranks:
    """Launches of all ranks.

    Attributes:
        launches: of each rank, with the number of the call.
        memory: of each rank; it begins with `pads` bytes of words that ranks exchange.
        errors: addresses of the words in which ranks note that they have failed.
        shared: addresses of other words that several blocks use, and their bytes.
        counters: of these, the ones in which a rank counts its blocks.
        buffers: of each rank, the numbers of buffers that its peer may announce.
    """

    launches: list[list[tuple[int, Launch]]] = field(default_factory=list)
    memory: list[dict[int, torch.Tensor]] = field(default_factory=list)
    pads: int = 0
    errors: list[int] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)
    counters: set[int] = field(default_factory=set)
    buffers: Sequence[Sequence[int]] = ((), (), ())
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def exchanging(cls, size: int, calls: int, direction: Direction, writing: int = 1, reading: int = 1) -> Ranks:
        """Ranks that gather a tensor `calls` times. Each writes a window in `writing` tiles; launches of rank 0 have
        at most `writing` programs, those of others `reading`."""
        program = plan((size,), (256 * size * writing, 4), "float32", "S0", "R")
        ranks = cls(pads=pad_bytes(size))
        for rank in range(size):
            transport = _Transport(rank, size, 10.0, _Provider(rank, ranks.memory, size), Alone())
            transport._watchdog, transport.windows = None, WindowPolicy(direction)
            x, of_rank = torch.zeros(program.source_shape(rank)), list[tuple[int, Launch]]()
            with recorded() as launches, pytest.MonkeyPatch.context() as patch:
                patch.setattr(window_use, "waiting_programs", lambda _, n=reading if rank else writing: n)
                bound = BoundProgram(program, rank, contiguous_strides(x.shape), transport, x.dtype, _CPU)
                for call in range(1, calls + 1):
                    for _request in bound.run(x, bound.fingerprint):
                        raise AssertionError("a request to the host")
                    of_rank += [(call, launch) for launch in launches]
                    launches.clear()
            ranks.launches.append(of_rank)
            ranks.errors.append(transport.failure.error.data_ptr())
            ranks.kept += [transport, bound, x]
        return ranks

    @classmethod
    def writing_directly(cls, calls: int, programs: int = 1, keep: bool = False) -> Ranks:
        """Two ranks that gather a tensor `calls` times, in launches of `programs` programs that write into each other's
        outputs. Each output is read in another launch, and is free when that is enqueued. With `keep` rank 1 keeps its
        outputs: each is in another buffer."""
        elements, ranks = 2048 * programs, cls(pads=pad_bytes(2), buffers=((0, 1)[: 1 + keep], (0,)))
        program, flat = plan((2,), (elements // 4, 4), "float32", "S0", "R"), _flat_box(elements)
        for rank in range(2):
            transport = _Transport(rank, 2, 10.0, _Provider(rank, ranks.memory, 2), Alone())
            transport._watchdog, transport.windows = None, WindowPolicy("push")
            x, result = torch.zeros(program.source_shape(rank)), torch.zeros(elements)
            of_rank, outputs = list[tuple[int, Launch]](), list[torch.Tensor]()
            with recorded() as launches, pytest.MonkeyPatch.context() as patch:
                patch.setattr(window_use, "waiting_programs", lambda _: programs)
                transport.pool_outputs((0, 1), 4 * elements, 2)
                bound = BoundProgram(program, rank, contiguous_strides(x.shape), transport, x.dtype, _CPU)
                for call in range(1, calls + 1):
                    out = run_to_end(bound.run(x, bound.fingerprint), None)
                    copy_boxes(copy_table(flat, torch.float32, _CPU), [out.view(-1)], [result])
                    outputs += [out] * (keep and rank == 1)
                    del out
                    of_rank += [(call, launch) for launch in launches]
                    launches.clear()
            ranks.launches.append(of_rank)
            ranks.errors.append(transport.failure.error.data_ptr())
            ranks.kept += [transport, bound, x, result, outputs]
        return ranks

    @classmethod
    def reading_before_a_barrier(cls, programs: int = 1) -> Ranks:
        """Two ranks: each reads its own memory in one launch, has a barrier at the end of the next, and writes the
        other's memory in the one after."""
        part, ranks = 4096, cls(pads=pad_bytes(2))
        ranks.memory = [{rank: torch.zeros(ranks.pads + part, dtype=torch.uint8) for rank in range(2)}]
        number = torch.tensor([1], dtype=torch.int32)
        for rank in range(2):
            failure, (values, out) = Failure(_CPU), torch.zeros(2, part, dtype=torch.uint8)
            rows = torch.zeros(2, programs, _ROW // 2, dtype=torch.bfloat16)
            with recorded() as launches, pytest.MonkeyPatch.context() as patch:
                patch.setattr(offer_module._launches, "_loaded", {})
                window = Window(rank, ranks.memory[0], 0, failure, programs=programs)
                signals, box = window.signals(1), _flat_box(part)
                copy_boxes(copy_table(box, torch.uint8, _CPU), [window.data[rank]], [out])
                offer_rows(*rows, number, None, 0, 0, WindowBarrier(signals, 5))
                copy_boxes(copy_table(box, torch.uint8, _CPU), [values], [window.data[1 - rank]])
            ranks.launches.append([(1, launch) for launch in launches])
            ranks.errors.append(failure.error.data_ptr())
            ranks.kept += [window, signals, values, out, rows, number]
        return ranks

    @classmethod
    def moving_rows(cls, calls: int, programs: int = 1) -> Ranks:
        """Two ranks whose kernels signal as those of token dispatches: each copies rows to the other's window in
        `programs` programs, with a barrier at the end, and reads and releases its own window in another launch."""
        rows, ranks = 8 * programs, cls(pads=pad_bytes(2))
        size = ranks.pads + rows * _ROW
        ranks.memory = [{rank: torch.zeros(size, dtype=torch.uint8) for rank in range(2)}]
        number = torch.tensor([rows], dtype=torch.int32)
        for rank in range(2):
            failure, of_rank = Failure(_CPU), list[tuple[int, Launch]]()
            values, out = torch.zeros(2, rows, _ROW // 2, dtype=torch.bfloat16)
            with recorded() as launches, pytest.MonkeyPatch.context() as patch:
                for module in (offer_module, receive_module):  # what is recorded here is not loaded for others
                    patch.setattr(module._launches, "_loaded", {})
                window = Window(rank, ranks.memory[0], 0, failure, programs=programs)
                signals = window.signals(1)
                theirs, ours = (window.data[r].view(torch.bfloat16).view(rows, -1) for r in (1 - rank, rank))
                for call in range(1, calls + 1):
                    offer_rows(values, theirs, number, None, 0, 0, WindowBarrier(signals, 5))
                    receive_rows(ours, out, number, None, None, signals)
                    of_rank += [(call, launch) for launch in launches]
                    launches.clear()
            ranks.launches.append(of_rank)
            ranks.errors.append(failure.error.data_ptr())
            ranks.kept += [window, signals, values, out, number]
        return ranks

    @classmethod
    def taking_turns(cls, calls: int) -> Ranks:
        """Two ranks that signal in launches of their own: each writes the other's window, and reads its own one after a
        barrier."""
        part, ranks = 4096, cls(pads=pad_bytes(2))
        ranks.memory = [{rank: torch.zeros(ranks.pads + part, dtype=torch.uint8) for rank in range(2)}]
        for rank in range(2):
            failure, of_rank = Failure(_CPU), list[tuple[int, Launch]]()
            values, out = torch.zeros(2, part, dtype=torch.uint8)
            with recorded() as launches:
                window = Window(rank, ranks.memory[0], 0, failure)
                box = _flat_box(part)
                for call in range(1, calls + 1):
                    window.signal("acquire", 0, 1)
                    copy_boxes(copy_table(box, torch.uint8, _CPU), [values], [window.data[1 - rank]])
                    window.signal("barrier", 0, 1)
                    copy_boxes(copy_table(box, torch.uint8, _CPU), [window.data[rank]], [out])
                    window.signal("release", 0, 1)
                    of_rank += [(call, launch) for launch in launches]
                    launches.clear()
            ranks.launches.append(of_rank)
            ranks.errors.append(failure.error.data_ptr())
            ranks.kept += [window, values, out]
        return ranks

    def calls(self, rank: int, calls: int) -> int:
        """The number of launches of a rank's first calls."""
        return sum(call <= calls for call, _ in self.launches[rank])

    def location(self, address: int, nbytes: int, data: int | None) -> Word | Data | None:
        if address in self.errors:
            return Word(f"error of rank {self.errors.index(address)}", address)
        for of_all in self.memory:
            for rank, memory in of_all.items():
                offset = address - memory.data_ptr()
                if 0 <= offset < self.pads:
                    return Word(f"pad of rank {rank}, word {offset // 8}", address)
                if 0 <= offset < memory.numel():
                    return Data(data) if data is not None and address <= data < address + nbytes else Data(0)
        return Word(f"word {address:#x}", address, nbytes) if address in self.shared else None


def _flat_box(length: int) -> StridedBoxes:
    zeros = (np.zeros(shape, np.int64) for shape in ((1, 1), 1, (1, 1), 1))
    strides = (np.ones(shape, np.int64) for shape in ((1, 1, 1), (1, 1)))
    return StridedBoxes(*zeros, np.full((1, 1), length), *strides)


@dataclass
class Behaviour:
    """How a rank runs its launches.

    Attributes:
        launches: how many of them; None: all.
        failing: the numbers of the launches in which it may fail, from 1 on.
        failed: whether it has failed before and tells its peers.
        expired: whether its waits time out at once.
    """

    launches: int | None = None
    failing: Container[int] = ()
    failed: bool = False
    expired: bool = False


@dataclass
class Extraction:
    """The memory operations of a rank's launches.

    Attributes:
        data: the byte of data that is followed; others are not.
        change: makes a variant of the PTX.
        touched: addresses of data, by number of the launch.
    """

    ranks: Ranks
    rank: int
    behaviour: Behaviour = field(default_factory=Behaviour)
    data: int | None = None
    change: Callable[[str], str] = str
    touched: dict[int, list[int]] = field(default_factory=dict)
    private: dict[int, int] = field(default_factory=dict)

    def launches(self) -> Iterator[tuple[int, list[list[Path]]]]:
        """The ways through each block of each launch, with the number of the launch."""
        for number, (call, launch) in enumerate(self.ranks.launches[self.rank][: self.behaviour.launches], 1):
            yield number, list(self._blocks(number, f"{launch.compiled.kernel} (launch {number}, call {call})", launch))

    def _blocks(self, number: int, name: str, launch: Launch) -> Iterator[list[Path]]:
        kernel, kinds = parse(self.change(ptx_of(launch))), launch.compiled.signature
        values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for n, v in launch.values.items()
                  if kinds[n] != "constexpr"]  # fmt: skip
        arguments = dict(zip(kernel.parameters, [*values, 0, 0], strict=True))
        failing = self.behaviour.failed or number in self.behaviour.failing
        before, used, changed = dict(self.private), Counter[int](), dict[int, Any]()
        constants = launch.compiled.constants
        warps = range(0, 32 * constants["num_warps"], 32)
        # The first thread stands for its warp, whose lanes poll the peers in turn; other warps only copy.
        threads = list(dict.fromkeys([*range(constants.get("PEERS", 1)), warps[-1]]))
        settled = [] if self.behaviour.failing else self.ranks.errors[self.rank : self.rank + 1]

        def location(address: int, nbytes: int) -> Word | Data | None:
            at = self.ranks.location(address, nbytes, self.data)
            if isinstance(at, Data):
                self.touched.setdefault(number, []).append(address)
            return at if at != Data(0) else None

        for program in range(math.prod(launch.grid)):
            found: list[tuple[Path, Block]] = []
            pending: list[list[bool]] = [[]]
            at = program % launch.grid[0], program // launch.grid[0] % launch.grid[1], 0
            special = {f"%{kind}.{axis}": n for kind, of_axes in (("ctaid", at), ("nctaid", launch.grid))
                       for axis, n in zip("xyz", of_axes, strict=True)} | {"global_smem": 0}  # fmt: skip
            while pending:
                conditions: list[Any] = []
                times = iter(range(0, 1 << 62, 1 << 50)) if self.behaviour.expired else repeat(0)
                block = Block(
                    kernel, self.rank, f"{name}, program {program}", arguments, location, special, threads,
                    dict(before), _decision(conditions, pending.pop(), pending), partial(next, times), settled,
                    self.ranks.buffers[self.rank],
                )  # fmt: skip
                with suppress(Pruned):
                    block.run()
                    if failing or not any(map(fails, events_of(block.threads))):
                        of_path = [t for t in block.threads if any(isinstance(n, Event) for n in t)]
                        found.append((Path(conditions, of_path), block))
            assert found, f"no way through {name}"
            fine = [b for p, b in found if not any(map(fails, events_of(p.threads)))] or [found[0][1]]
            for address, value in ((a, v) for b in fine for a, v in b.private.items() if before.get(a) != v):
                assert changed.setdefault(address, value) == value, "private memory depends on what others write"
            used.update(set[int]().union(*(b.counted for _, b in found)))
            yield _joined([path for path, _ in found])
        if shared := {address for address in changed if used[address] > 1}:
            self.ranks.shared |= dict.fromkeys(shared, 8)
            self.ranks.counters |= shared
            raise SharedWords
        self.private |= changed


class SharedWords(Exception):
    """Blocks of a launch share words that were taken to be private; now they are not."""


def _decision(conditions: list[Any], choices: list[bool], pending: list[list[bool]]) -> Callable[[Any], bool]:
    """Takes branches as `choices` says where both ways are possible, then the first one; the other is left for later,
    in `pending`. What holds then is appended to the conditions."""
    solver, taken, known = z3.Solver(), list[bool](), dict[int, bool]()
    kept: list[Any] = []  # a term has its number as long as it exists

    def decide(term: Any) -> bool:
        if z3.is_true(term) or z3.is_false(term):
            return z3.is_true(term)
        if term.get_id() not in known:
            possible = [c for c in (True, False) if solver.check(term if c else z3.Not(term)) == z3.sat]
            if len(possible) == 2:
                if len(taken) == len(choices):
                    pending.append([*taken, False])
                    choices.append(True)
                possible = [choices[len(taken)]]
                taken.append(possible[0])
            known[term.get_id()] = possible[0]
            conditions.append(term if possible[0] else z3.Not(term))
            kept.append(term)
            solver.add(conditions[-1])
        return known[term.get_id()]

    return decide


def events_of(threads: Iterable[Sequence[Node]]) -> list[Event]:
    return [node for nodes in threads for node in nodes if isinstance(node, Event)]


def words_of(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if isinstance(e.at, Word)]


def fails(event: Event) -> bool:
    """A rank that fails notes it, or tells a peer."""
    if "error" in str(event.at):
        return event.written is not None
    return isinstance(event.written, int) and event.written in (-1, (1 << 64) - 1) and "pad" in str(event.at)


def _joined(found: list[Path]) -> list[Path]:
    """The ways without those that are others with fewer polls. What earlier polls read does not matter then: who sees a
    signal at the first look would see it at the next as well, which orders less."""
    kept: dict[Hashable, Path] = {}
    for path in found:
        events = events_of(path.threads)
        polls = [e for e in words_of(events) if e.read is not None and e.written is None and "pad" in str(e.at)]
        last = {(e.thread, e.at): e for e in polls}
        earlier = [e for e in polls if last[e.thread, e.at] is not e]
        conditions = [c for c in path.conditions if not any(mentions(c, e.read) for e in earlier)]
        names = [(e.read, z3.BitVec(f"{e.thread} {e.at}", e.read.size())) for e in last.values()]
        kinds = sorted(f"{e.thread} {e.order} {e.scope} {e.at} {e.written}" for e in events if e not in earlier)
        key = *kinds, *sorted({str(z3.simplify(z3.substitute(c, *names))) for c in conditions})
        if key not in kept or len(events_of(kept[key].threads)) < len(events):
            kept[key] = Path(conditions, path.threads)
    return list(kept.values())


def executions(
    ranks: Ranks, behaviours: Mapping[int, Behaviour], data: int | None = None, change: Callable[[str], str] = str,
    streams: bool = True,
) -> Iterator[Execution]:  # fmt: skip
    """All that these ranks do together, for each combination of ways through their blocks.

    Args:
        streams: whether a kernel begins when the one before it has ended.
    """
    while True:
        after: list[tuple[Node, Node]] = []
        of_ranks: list[list[Sequence[Path]]] = []
        try:
            for rank, behaviour in behaviours.items():
                blocks: list[list[Path]] = []
                end = Node()
                for _, ways in Extraction(ranks, rank, behaviour, data, change).launches():
                    begin, end, before = Node(), Node(), end
                    after += [(before, begin), (begin, end)] if streams else []
                    blocks += [[Path(c, [[begin, *t, end] for t in threads]) for c, threads in of_block]
                               for of_block in ways]  # fmt: skip
                of_ranks.append([paths for paths in product(*blocks) if _may_count(ranks, paths, after)])
            break
        except SharedWords:
            continue
    for combined in product(*of_ranks):
        yield _execution([path for paths in combined for path in paths], after)


def _execution(paths: Sequence[Path], after: Sequence[tuple[Node, Node]]) -> Execution:
    found = Execution([t for path in paths for t in path.threads], _initial, after)
    found.solver.add(*(c for path in paths for c in path.conditions))
    return found


def _may_count(ranks: Ranks, paths: Sequence[Path], after: Sequence[tuple[Node, Node]]) -> bool:
    """Whether the words in which a rank counts its blocks allow these paths, as far as only they are looked at: other
    operations can only forbid more."""
    counting = [Path(path.conditions, [
        [n for n in nodes if not isinstance(n, Event) or getattr(n.at, "address", None) in ranks.counters]
        for nodes in path.threads
    ]) for path in paths]  # fmt: skip
    if not any(events_of(path.threads) for path in counting):
        return True
    return _execution(counting, after).find() is not None


def _initial(at: Any) -> int:
    return int.from_bytes(ctypes.string_at(at.address, at.nbytes), "little") if isinstance(at, Word) else 0


def last_write(ranks: Ranks, rank: int, data: int) -> int:
    """The number of the last launch in which a rank stores a byte of data."""
    return max(number for number, ways in Extraction(ranks, rank, data=data).launches() for path in sum(ways, [])
               for e in events_of(path.threads) if isinstance(e.at, Data) and e.written is not None)  # fmt: skip


def followed(ranks: Ranks, writer: int, reader: int, direction: Direction) -> int:
    """The address of data that one rank writes for another in the first call, not by the first thread of a block."""
    extractions = [Extraction(ranks, rank, Behaviour(ranks.calls(rank, 1))) for rank in (writer, reader)]
    for extraction in extractions:
        while True:
            with suppress(SharedWords):
                list(extraction.launches())
                break
    writes, reads = ({a for some in e.touched.values() for a in some} for e in extractions)
    memory = ranks.memory[0][reader if direction == "push" else writer]
    return max(a for a in writes & reads if 0 <= a - memory.data_ptr() < memory.numel())
