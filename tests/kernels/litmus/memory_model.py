"""The PTX memory model as formulas: which executions of some threads' memory operations are allowed.

After the chapter "Memory Consistency Model" of the PTX ISA, for accesses that overlap completely, through the generic
proxy. All relations occur in the axioms such that more of them allow less, so causality is a formula of the choices
that an execution has: which write each read reads from, the coherence order, and the order of fence.sc.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any, NamedTuple

import z3

SCOPES = ("cta", "gpu", "sys")
_RELEASES, _ACQUIRES = ("release", "acq_rel", "sc"), ("acquire", "acq_rel", "sc")


class Thread(NamedTuple):
    gpu: int
    block: Hashable
    number: int

    def __str__(self) -> str:
        return f"GPU {self.gpu}, block {self.block}, thread {self.number}"


@dataclass(eq=False)
class Node:
    """A point in program order; one that several threads pass orders what is before it against what is after it, as
    barriers of a block and ends of kernels do."""


@dataclass(eq=False)
class Event(Node):
    """A memory operation or a fence. One that both reads and writes is atomic.

    Attributes:
        order: "weak", "relaxed", "acquire", "release", "acq_rel" or "sc".
        at: the location; None of a fence.
        read, written: the values, numbers or terms; None: it does not read, or write.
        reduces: whether this is a reduction, whose read forms no acquire pattern.
    """

    thread: Thread
    order: str
    scope: str
    at: Hashable = None
    read: Any = None
    written: Any = None
    text: str = ""
    reduces: bool = False

    @property
    def fence(self) -> bool:
        return self.at is None


@dataclass(eq=False)
class Execution:
    """All executions of these threads in which `where` holds, given the nodes of each thread in program order.

    Attributes:
        after: further pairs of nodes, of which the first precedes the second.
    """

    threads: Sequence[Sequence[Node]]
    initial: Callable[[Hashable], Any] = lambda at: 0
    after: Sequence[tuple[Node, Node]] = ()
    solver: z3.Solver = field(default_factory=z3.Solver)

    def __post_init__(self) -> None:
        self._order_statically()
        self.events = [node for node in self._place if isinstance(node, Event)]
        self.locations = list(dict.fromkeys(e.at for e in self.events if not e.fence))
        self._initial = {at: Event(Thread(-1, "", 0), "weak", "sys", at, None, self.initial(at), "initial value")
                         for at in self.locations}  # fmt: skip
        self.writes = {at: [e for e in self.events if e.at == at and e.written is not None] for at in self.locations}
        self.reads = [e for e in self.events if e.read is not None]
        self._choose()
        self._synchronize()
        self._axioms()

    # Program order, barriers and ends of kernels, as sets of bits.

    def _order_statically(self) -> None:
        following: dict[Node, list[Node]] = {}
        for nodes in self.threads:
            for i, node in enumerate(nodes):
                following.setdefault(node, []).extend(nodes[i + 1 : i + 2])
        for first, second in self.after:
            following.setdefault(first, []).append(second)
            following.setdefault(second, [])
        self._place = {node: i for i, node in enumerate(following)}
        self._later: dict[Node, int] = {}

        def later(node: Node) -> int:
            if node not in self._later:
                bits = 0
                for other in following[node]:
                    bits |= 1 << self._place[other] | later(other)
                self._later[node] = bits
            return self._later[node]

        for node in following:
            later(node)

    def precedes(self, x: Node, y: Node) -> bool:
        """In program order, or by barriers and ends of kernels: in every execution."""
        return bool(self._later[x] >> self._place[y] & 1)

    def _not_after(self, x: Node, y: Node) -> bool:
        return x is y or self.precedes(x, y)

    @staticmethod
    def morally_strong(x: Event, y: Event) -> bool:
        if x.thread == y.thread:
            return True
        if "weak" in (x.order, y.order):
            return False

        def includes(scope: str) -> bool:
            return {"cta": x.thread[:2] == y.thread[:2], "gpu": x.thread.gpu == y.thread.gpu, "sys": True}[scope]

        return includes(x.scope) and includes(y.scope)

    def _add(self, formulas: Iterable[Any]) -> None:
        self.solver.add(*formulas)

    # What an execution chooses.

    def _choose(self) -> None:
        add, name = self._add, {e: f"{i}" for i, e in enumerate(self.events)}
        self.sources: dict[Event, dict[Event, Any]] = {}
        for r in self.reads:
            candidates = [self._initial[r.at], *(w for w in self.writes[r.at] if w is not r)]
            self.sources[r] = {w: z3.Bool(f"rf {name.get(w, 'i')} {name[r]}") for w in candidates}
            add([z3.PbEq([(chosen, 1) for chosen in self.sources[r].values()], 1)])
            add(z3.Implies(chosen, r.read == w.written) for w, chosen in self.sources[r].items())
        self._co: dict[tuple[Event, Event], Any] = {}
        for at, writes in self.writes.items():
            for a, b in permutations(writes, 2):
                self._co[a, b] = z3.Bool(f"co {name[a]} {name[b]}")
            self._co |= {(self._initial[at], w): True for w in writes}
            add(z3.Not(z3.And(self._co[a, b], self._co[b, a])) for a, b in combinations(writes, 2))
            add(
                z3.Implies(z3.And(self._co[a, b], self._co[b, c]), self._co[a, c])
                for a, b, c in permutations(writes, 3)
            )
            for a, b in combinations(writes, 2):
                if self.morally_strong(a, b):
                    add([z3.Or(self._co[a, b], self._co[b, a])])
        fences = [e for e in self.events if e.fence and e.order == "sc"]
        when = {f: z3.Int(f"fence {name[f]}") for f in fences}
        if fences:
            add([z3.Distinct(*when.values())])
        self._fence_order = {(a, b): when[a] < when[b] for a, b in permutations(fences, 2) if self.morally_strong(a, b)}

    def reads_from(self, r: Event, w: Event | None) -> Any:
        """Whether a read reads from a write; None: from the initial value."""
        return self.sources[r][self._initial[r.at] if w is None else w]

    def last_is(self, at: Hashable, value: int) -> Any:
        """Whether a location ends with this value: some write of it precedes no other in coherence order."""
        last = ((w, [self._co[w, other] for other in self.writes[at] if other is not w]) for w in self.writes[at])
        return _any(z3.And(w.written == value, z3.Not(z3.Or(after))) for w, after in last)

    def _from_read(self, r: Event, w: Event) -> Any:
        """Whether `r` reads what precedes `w` in coherence order."""
        return _any(_both(chosen, self._co[source, w]) for source, chosen in self.sources[r].items()
                    if (source, w) in self._co)  # fmt: skip

    # What follows from it.

    def _synchronize(self) -> None:
        observed: dict[tuple[Event, Event], Any] = {
            (w, r): chosen for r in self.reads for w, chosen in self.sources[r].items() if self.morally_strong(w, r)
        }
        for z in (e for e in self.events if e.read is not None and e.written is not None):
            for w, r in [(w, r) for w, other in observed if other is z for other, r in observed if other is z]:
                chain = _both(observed[w, z], observed[z, r])
                observed[w, r] = _any([observed.get((w, r), False), chain])
        self._observed = observed
        releases, acquires = list(self._patterns("written", _RELEASES)), list(self._patterns("read", _ACQUIRES))
        synchronizes: dict[tuple[Event, Event], Any] = {}
        for first, w in releases:
            for last, r in acquires:
                if (w, r) in observed and self.morally_strong(first, last):
                    synchronizes[first, last] = _any([synchronizes.get((first, last), False), observed[w, r]])
        for pair, chosen in self._fence_order.items():
            synchronizes[pair] = _any([synchronizes.get(pair, False), chosen])
        # From the begin of each synchronization to the end of each, over any number of them.
        heads, tails = (list(dict.fromkeys(pair[i] for pair in synchronizes)) for i in range(2))
        into = {(head, tail): synchronizes.get((head, tail), False) for head in heads for tail in tails}
        onward = {(k, tail): _any(into[head, tail] for head in heads if self._not_after(k, head))
                  for k in tails for tail in tails}  # fmt: skip
        for k in tails:
            for source, table in [*((head, into) for head in heads), *((tail, onward) for tail in tails if tail != k)]:
                for tail in tails if table[source, k] is not False else ():
                    if onward[k, tail] is not False and tail is not k:
                        chain = _both(table[source, k], onward[k, tail])
                        table[source, tail] = self._named(_any([table[source, tail], chain]))
        self._reached = into

    def _named(self, formula: Any) -> Any:
        if formula is True or formula is False or z3.is_const(formula):
            return formula
        name = z3.FreshBool("reached")
        self.solver.add(name == formula)
        return name

    def _patterns(self, kind: str, orders: Sequence[str]) -> Iterator[tuple[Event, Event]]:
        """Release patterns, as (first operation, write), or acquire patterns, as (last operation, read)."""
        for e in self.events:
            if e.order == "weak" or getattr(e, kind) is None or (kind == "read" and e.reduces):
                continue
            if e.order in orders:
                yield e, e
            for other in self.events:
                first, second = (other, e) if kind == "written" else (e, other)
                if other.thread == e.thread and other.order in orders and self.precedes(first, second):
                    if other.fence or (other.at == e.at and getattr(other, kind) is not None):
                        yield other, e

    def base_causality(self, x: Event, y: Event) -> Any:
        if self.precedes(x, y):
            return True
        return _any(reached for (head, tail), reached in self._reached.items()
                    if self._not_after(x, head) and self._not_after(tail, y))  # fmt: skip

    def causality(self, x: Event, y: Event) -> Any:
        onward = (_both(seen, self.base_causality(z, y)) for (w, z), seen in self._observed.items() if w is x)
        return _any([self.base_causality(x, y), *onward])

    # What is forbidden.

    def _axioms(self) -> None:
        add, implies, no = self._add, z3.Implies, z3.Not
        for (a, b), chosen in self._fence_order.items():
            add([implies(self.base_causality(a, b), chosen)])
        for at, writes in self.writes.items():
            add(implies(self.causality(a, b), self._co[a, b]) for a, b in permutations(writes, 2))  # coherence
            here = [e for e in self.events if e.at == at]
            place = {e: z3.FreshInt("at") for e in here}
            for a, b in permutations(here, 2):
                if not self.morally_strong(a, b):
                    continue
                if a.thread == b.thread and self.precedes(a, b):
                    add([place[a] < place[b]])
                if a in self.sources.get(b, {}):
                    add([implies(self.sources[b][a], place[a] < place[b])])
                if (a, b) in self._co:
                    add([implies(self._co[a, b], place[a] < place[b])])
                if a.read is not None and b.written is not None:
                    add([implies(self._from_read(a, b), place[a] < place[b])])
            for r in here:
                if r.read is None:
                    continue
                for w in writes:
                    if w is r:
                        continue
                    before = self._from_read(r, w)
                    add([implies(self.sources[r][w], no(self.causality(r, w)))])
                    add([implies(before, no(self.causality(w, r)))])
                    if r.written is not None and self.morally_strong(r, w):  # atomicity
                        add([no(z3.And(before, self._co[w, r]))])
        # No thin air: a value that depends on what was read is not what that read depends on.
        made = {e: z3.FreshInt("made") for e in self.events if not e.fence}
        for r in self.reads:
            add(implies(chosen, made[w] < made[r]) for w, chosen in self.sources[r].items() if w in made)
            if z3.is_expr(r.read):
                for w in self.events:
                    if w is not r and z3.is_expr(w.written) and w.thread == r.thread and mentions(w.written, r.read):
                        add([made[r] < made[w]])

    def find(self, *where: Any) -> str | None:
        """An execution in which all of this holds, as text; None: there is none."""
        self.solver.push()
        self.solver.add(*where)
        result = self.solver.check()
        assert result != z3.unknown, self.solver.reason_unknown()
        text = self._text(self.solver.model()) if result == z3.sat else None
        self.solver.pop()
        return text

    def _text(self, model: z3.ModelRef) -> str:
        lines, names = [], {e: f"#{i}" for i, e in enumerate(self.events)}
        for thread in dict.fromkeys(e.thread for e in self.events):
            lines.append(f"{thread}:")
            for e in (e for e in self.events if e.thread == thread):
                line = f"  {names[e]:>4}  {e.text}" + (f"  ({e.at})" if e.at is not None else "")
                if e.read is not None:
                    (source,) = (w for w, chosen in self.sources[e].items() if model.eval(chosen, True))
                    value = model.eval(e.read, True) if z3.is_expr(e.read) else e.read
                    if z3.is_bv(value):
                        value = value.as_signed_long()
                    line += f"  reads {value} from {names.get(source, 'the initial value')}"
                lines.append(line)
        return "\n".join(lines)


def _both(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    return b if a is True else a if b is True else z3.And(a, b)


def _any(formulas: Any) -> Any:
    kept = [f for f in formulas if f is not False]
    if any(f is True for f in kept):
        return True
    return z3.Or(kept) if len(kept) > 1 else kept[0] if kept else False


def constants_of(term: Any) -> Iterator[Any]:
    """The constants in a term that are no numbers."""
    if not term.children():
        yield from [] if z3.is_bv_value(term) or z3.is_true(term) or z3.is_false(term) else [term]
    for child in term.children():
        yield from constants_of(child)


def mentions(term: Any, constant: Any) -> bool:
    """Whether a term has a constant in it."""
    return term.eq(constant) or any(mentions(child, constant) for child in term.children())
