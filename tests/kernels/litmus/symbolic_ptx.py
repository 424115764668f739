"""The memory operations of compiled PTX: a kernel is run thread by thread; what it reads of shared memory stays open.

Registers hold numbers, or terms where they depend on values that other ranks write, or nothing where an instruction
is not known; neither addresses nor branches may depend on the latter.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import z3
from memory_model import SCOPES, Event, Node, Thread, constants_of
from ptx.text import Instruction, Kernel

_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "sc", "volatile")
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "mad": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b, "not": lambda a: ~a, "neg": lambda a: -a, "mov": lambda a: a, "cvt": lambda a: a,
    "cvta": lambda a: a, "selp": lambda a, b, c: a if c else b, "bfe": lambda a, b, c: a >> b & (1 << c) - 1,
    "max": max, "min": min,
    "div": lambda a, b: int(a / b) if abs(a) < 1 << 52 else a // b, "rem": lambda a, b: a - b * int(a / b),
}  # fmt: skip


class Pruned(Exception):
    """A path that is not followed: a thread polls a second time. The earlier polls of a wait only add order."""


def _number(value: int, kind: str) -> int:
    """The number that the low bits are, as a type has them."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


class Word(NamedTuple):
    """A location that several threads share, by its name."""

    name: str
    address: int
    nbytes: int = 8

    def __str__(self) -> str:
        return self.name


class Data(NamedTuple):
    """A location of data: what is stored there is not followed."""

    address: int

    def __str__(self) -> str:
        return "data"


@dataclass
class Block:
    """A block of threads of a kernel.

    Attributes:
        arguments: by name of the parameter.
        location: what an access of (address, bytes) is to: a location that several threads share, or None.
        private: other memory, by address; what is not there is read from the process's memory.
        touched: addresses of `private` that it has accessed.
        decide: which way a branch on a term goes.
        clock: the global timer's next value.
        numbers: the threads that are run. In an exchange of a warp's values the others have their partner's.
        settled: addresses of words that nobody changes: loads of them are no events.
        choices: the values of words that addresses depend on. Where others write these words, a path has one of them.
    """

    kernel: Kernel
    gpu: int
    name: str
    arguments: Mapping[str, Any]
    location: Callable[[int, int], Any]
    special: Mapping[str, int] = field(default_factory=dict)
    numbers: Sequence[int] = (0,)
    private: dict[int, int] = field(default_factory=dict)
    decide: Callable[[Any], bool] = bool
    clock: Callable[[], int] = lambda: 0
    settled: Container[int] = ()
    choices: Sequence[int] = ()
    threads: list[list[Node]] = field(default_factory=list)

    def run(self) -> None:
        """Run the threads from barrier to barrier."""
        self.threads = [[] for _ in self.numbers]
        self.shared: dict[int, Any] = {}
        self.accessed: set[tuple[int, int, Any]] = set()
        self.touched: set[int] = set()
        self.counted: set[int] = set()  # of them, those of atomic operations
        self.exchanged: dict[int, Any] = {}  # in shuffles, by thread
        self.registers: list[dict[str, Any]] = [{} for _ in self.numbers]
        running = [self._thread(i) for i in range(len(self.numbers))]
        while running:
            reached = [(thread, head) for thread in running if (head := next(thread, None))]
            heads = {head for _, head in reached}
            assert len(heads) <= 1, f"threads wait at different instructions: {heads}"
            barrier = Node()
            for nodes in self.threads if "bar" in heads else ():
                nodes.append(barrier)
            running = [thread for thread, _ in reached]

    def _value(self, registers: dict[str, Any], operand: str, number: int) -> Any:
        if operand in registers:
            return registers[operand]
        if operand == "%tid.x":
            return self.numbers[number]
        if operand in self.special:
            return self.special[operand]
        if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+", operand):
            return int(operand, 0)
        if operand == "%globaltimer":
            return self.clock()
        if operand.startswith("%"):
            return 0 if operand[1:5] in ("tid.", "ntid", "ctai") else None
        return self.arguments[operand] if operand in self.arguments and "[" not in operand else operand

    def _address(self, registers: dict[str, Any], operand: str, number: int) -> Any:
        base, _, offset = operand.strip("[] ").partition("+")
        value = self._value(registers, base.strip(), number)
        return value + int(offset) if isinstance(value, int) and offset.strip() not in ("", "0") else value

    def _thread(self, number: int) -> Iterator[str]:
        registers, at = self.registers[number], 0
        while at < len(self.kernel.instructions):
            one = self.kernel.instructions[at]
            at += 1
            guard = one.guard.lstrip("!")
            if guard and self._is(registers[guard]) == one.guard.startswith("!"):
                continue
            head = one.name[0]
            if head == "bra":
                at = self.kernel.labels[one.operands[0]]
            elif head in ("ret", "exit"):
                return
            elif head in ("bar", "barrier"):
                yield "warp" if "warp" in one.name else "bar"
            elif head == "shfl":
                assert one.name[2] == "bfly", one.text
                target, source, lanes, *_ = one.operands
                own = self.exchanged[self.numbers[number]] = self._value(registers, source, number)
                yield head
                theirs = self.exchanged.get(self.numbers[number] ^ int(lanes))
                registers[target] = own if theirs is None else theirs
                yield head
            elif head in ("fence", "membar"):
                self._fence(number, one)
            elif head in ("ld", "st", "atom", "red"):
                self._access(registers, number, one)
            else:
                self._compute(registers, number, one)

    def _is(self, condition: Any) -> bool:
        return self.decide(condition) if z3.is_expr(condition) else bool(condition)

    def _compute(self, registers: dict[str, Any], number: int, one: Instruction) -> None:
        head, kind = one.name[0], one.name[-1]
        target, *operands = one.operands
        values = [self._value(registers, o, number) for o in operands]
        if head == "mov" and isinstance(values[0], str) and operands[0] in self.arguments:
            values = [operands[0]]  # the address of a parameter
        if target.startswith("{"):  # the parts of a value, from the low bits on
            parts = target.strip("{} ").split(",")
            bits = int(kind[1:]) // len(parts)
            for i, part in enumerate(parts):
                registers[part.strip()] = _bits_of(values[0], i * bits, bits)
            return
        registers[target] = self._result(head, one.name, kind, values)

    def _result(self, head: str, name: tuple[str, ...], kind: str, values: list[Any]) -> Any:
        if head == "selp":
            if values[2] is None or None in values[:2] or not z3.is_expr(values[2]):
                return None if values[2] is None else values[0 if self._is(values[2]) else 1]
            first, second = (_term(v, int(kind[1:])) for v in values[:2])
            return z3.simplify(z3.If(values[2], first, second))
        if None in values or (head not in _COMPUTED and head != "setp"):
            return None
        terms = any(z3.is_expr(v) for v in values)
        if head == "mov" or kind == "pred":
            if terms and head != "mov":
                return z3.simplify({"and": z3.And, "or": z3.Or, "not": z3.Not, "xor": z3.Xor}[head](*values))
            return values[0] if head == "mov" else (not values[0]) if head == "not" else _COMPUTED[head](*values)
        if kind[0] == "f":
            return None
        if head == "cvt" and terms:
            return _converted(values[0], name[-2], kind)
        if terms:
            return z3.simplify(_of_terms(head, name[1], kind, [_term(v, int(kind[1:])) for v in values]))
        if head == "cvt":
            kind = name[-2] if len(name) > 2 and name[-2][0] in "usb" else kind
        wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in name else kind
        values = [v if isinstance(v, bool) else _number(v, wide if i == 2 else name[-1]) for i, v in enumerate(values)]
        if head == "setp":
            return _COMPARED[name[1]](*values)
        result = _COMPUTED[head](*values)
        if "hi" in name:
            return result >> int(kind[1:])
        return _number(result, wide)

    # Memory.

    def _fence(self, number: int, one: Instruction) -> None:
        words = set(one.name)
        scope = next(s for s in (*SCOPES, "gl") if s in words)
        order = next((o for o in _ORDERS if o in words), "acq_rel" if one.name[0] == "fence" else "sc")
        self._add(number, one, order, {"gl": "gpu"}.get(scope, scope), None, None, None)

    def _access(self, registers: dict[str, Any], number: int, one: Instruction) -> None:
        head, words = one.name[0], set(one.name)
        stores, atomic = head == "st", head in ("atom", "red")
        position = 0 if stores or head == "red" else 1
        address = self._address(registers, one.operands[position], number)
        targets = one.operands[0].strip("{} ").split(",") if position else []
        targets = [t.strip() for t in targets]
        if "param" in words:
            name = address if isinstance(address, str) else one.operands[1].strip("[] ")
            registers[targets[0]] = self.arguments.get(name, address)
            return
        rest = [self._value(registers, o.strip(), number) for part in one.operands[position + 1 :]
                for o in part.strip("{} ").split(",")]  # fmt: skip
        width = int(one.name[-1][1:]) // 8
        count = next((int(word[1]) for word in one.name if re.fullmatch(r"v\d", word)), 1)
        if "shared" in words:
            for i in range(count):
                if stores:
                    self.shared[address if i == 0 else address + i * width] = rest[i]
                else:
                    registers[targets[i]] = self.shared.get(address if i == 0 else address + i * width)
            return
        if z3.is_expr(address):
            address = self._chosen(address)
        assert address is not None, f"an address is not known: {one.text}"
        if address in self.settled and head == "ld":
            registers[targets[0]] = int.from_bytes(ctypes.string_at(address, width), "little", signed=True)
            return
        at = self.location(address, width * count)
        if at is None:
            self._private(registers, targets, head, one, address, width, count, rest)
            return
        order = next((o for o in _ORDERS if o in words), "relaxed" if atomic else "weak")
        scope = next((s for s in SCOPES if s in words), "gpu" if atomic else "sys")
        data = isinstance(at, Data)
        read = (
            None
            if stores
            else z3.BitVec(
                f"{self.gpu}.{self.name}.{self.numbers[number]}.{len(self.threads[number])}", 64 if data else 8 * width
            )
        )
        written = self._modified(one, read, rest) if atomic else self._stored(rest[0]) if stores else None
        if data:
            registers |= dict.fromkeys(targets)
            written = z3.FreshConst(z3.BitVecSort(64), "data") if stores else None
        elif targets:
            registers[targets[0]] = read
        self._add(number, one, {"volatile": "relaxed"}.get(order, order), scope, at, read, written)

    def _chosen(self, address: Any) -> int:
        """An address for one of the values of the only word that it depends on."""
        (word,) = {part.get_id(): part for part in constants_of(address)}.values()
        for value in self.choices:
            if self.decide(word == value):
                return z3.simplify(z3.substitute(address, (word, z3.BitVecVal(value, word.size())))).as_long()
        raise Pruned

    def _stored(self, value: Any) -> Any:
        """What is stored if this is a choice: a path has one of the two."""
        while z3.is_expr(value) and z3.is_app_of(value, z3.Z3_OP_ITE):
            value = value.arg(1 if self.decide(value.arg(0)) else 2)
        return value.as_signed_long() if z3.is_bv_value(value) else value

    @staticmethod
    def _modified(one: Instruction, old: Any, rest: Sequence[Any]) -> Any:
        """What an atomic operation writes."""
        operation = next(w for w in one.name if w in ("add", "inc", "exch", "cas", "or", "and", "xor"))
        if operation == "cas":
            if isinstance(old, int):
                return rest[1] if old == rest[0] else old
            return z3.If(old == rest[0], rest[1] if z3.is_expr(rest[1]) else z3.BitVecVal(rest[1], old.size()), old)
        if operation in ("add", "inc"):
            return old + (rest[0] if operation == "add" else 1)
        return rest[0] if operation == "exch" else _COMPUTED[operation](old, rest[0])

    def _private(self, registers: dict[str, Any], targets: list[str], head: str, one: Instruction, address: int,
                 width: int, count: int, rest: Sequence[Any]) -> None:  # fmt: skip
        for i in range(count):
            here, signed = address + i * width, "s" if width == 8 else "u"
            self.touched.add(here)
            if head != "st":
                self.counted |= {here} if head != "ld" else set()
                old = self.private.get(here)
                if old is None and here not in self.private:
                    old = _number(int.from_bytes(ctypes.string_at(here, width), "little"), f"{signed}{8 * width}")
                registers[targets[i] if targets else "_"] = old
            if head != "ld":
                self.private[here] = rest[i] if head == "st" else self._modified(one, old, rest)

    def _add(self, number: int, one: Instruction, order: str, scope: str, at: Any, read: Any, written: Any) -> None:
        thread = Thread(self.gpu, self.name, self.numbers[number])
        if at is not None and (number, id(one), at) in self.accessed:
            raise Pruned
        self.accessed.add((number, id(one), at))
        event = Event(thread, order, scope, at, read, written, one.text, reduces=one.name[0] == "red")
        self.threads[number].append(event)


def _term(value: Any, bits: int) -> Any:
    return value if z3.is_expr(value) else z3.BitVecVal(value, bits)


def _bits_of(value: Any, start: int, bits: int) -> Any:
    if z3.is_expr(value):
        return z3.simplify(z3.Extract(start + bits - 1, start, value))
    return None if value is None else value >> start & (1 << bits) - 1


def _converted(value: Any, to: str, kind: str) -> Any:
    more = int(to[1:]) - value.size()
    if more <= 0:
        return _bits_of(value, 0, int(to[1:]))
    return z3.simplify(z3.SignExt(more, value) if kind[0] == "s" else z3.ZeroExt(more, value))


def _of_terms(head: str, comparison: str, kind: str, values: Sequence[Any]) -> Any:
    signed = kind[0] == "s"
    if head == "setp":
        unsigned = {"lt": z3.ULT, "le": z3.ULE, "gt": z3.UGT, "ge": z3.UGE}
        return _COMPARED[comparison](*values) if signed else unsigned.get(comparison, _COMPARED[comparison])(*values)
    if head in ("max", "min"):
        a, b = values
        if _equal(a, b):  # as values are that warps have exchanged
            return a
        return z3.If((a > b if signed else z3.UGT(a, b)) == (head == "max"), a, b)
    return z3.LShR(*values) if head == "shr" and not signed else _COMPUTED[head](*values)


def _equal(a: Any, b: Any) -> bool:
    solver = z3.Solver()
    solver.add(a != b)
    return solver.check() == z3.unsat
