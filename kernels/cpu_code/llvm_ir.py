"""Writes a function of loops over vectors as LLVM IR, for `compiled`.

A `Function` appends instructions as its methods, and the operators of its values, are called. Loops and conditions take
what they run as Python functions, as those of JAX do; values that change in a loop are passed in and returned:

    f = Function("total", ["x", "n", "out"])
    x, n = f.pointer("x"), f.number("n")
    total, = f.loop(0, n, lambda i, total: [total + f.load("float", x, i)], [f.zero("float")])
    f.store(total, f.pointer("out"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Value:
    """A value of a function, with the operators of its type: i1 to i64, float, or a vector of them, `<n x type>`."""

    def __init__(self, function: Function, kind: str, name: str) -> None:
        self.function, self.kind, self.name = function, kind, name

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def __add__(self, other: Value | int) -> Value:
        return self._operation("fadd" if "float" in self.kind else "add", other)

    def __mul__(self, other: Value | int) -> Value:
        return self._operation("fmul" if "float" in self.kind else "mul", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._operation("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._operation("urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._operation("and", other)

    def __lshift__(self, other: int) -> Value:
        return self._operation("shl", other)

    def __rshift__(self, other: int) -> Value:
        """Zeros come in."""
        return self._operation("lshr", other)

    def __lt__(self, other: Value | int) -> Value:
        return self._compare("slt", other)

    def __ge__(self, other: Value | int) -> Value:
        return self._compare("sge", other)

    def below(self, other: Value | int) -> Value:
        """Of numbers without sign."""
        return self._compare("ult", other)

    def equals(self, other: Value | int) -> Value:
        return self._compare("eq", other)

    def differs(self, other: Value | int) -> Value:
        return self._compare("ne", other)

    def is_nan(self) -> Value:
        return self.function.new(self._like("i1"), f"fcmp uno {self}, {self.name}")

    def where(self, then: Value, otherwise: Value) -> Value:
        """Of i1: `then` where it is true."""
        return self.function.new(then.kind, f"select {self}, {then}, {otherwise}")

    def to(self, kind: str) -> Value:
        """Numbers of another type: integers of more bits, with zeros before them, or of fewer; floats likewise."""
        if kind == self._element:
            return self
        of_floats = kind in ("half", "float")
        grows = _BITS[kind] > _BITS[self._element]
        name = ("fpext" if grows else "fptrunc") if of_floats else ("zext" if grows else "trunc")
        return self.function.new(self._like(kind), f"{name} {self} to {self._like(kind)}")

    def signed_to(self, kind: str) -> Value:
        """An integer of as many bits or more, with its sign."""
        return self if kind == self.kind else self.function.new(kind, f"sext {self} to {kind}")

    def bits(self, kind: str) -> Value:
        """The same bits as another type."""
        return self.function.new(self._like(kind), f"bitcast {self} to {self._like(kind)}")

    def splat(self, n: int) -> Value:
        """A vector of n times this scalar."""
        vector = f"<{n} x {self.kind}>"
        first = self.function.new(vector, f"insertelement {vector} poison, {self}, i64 0")
        return self.function.new(vector, f"shufflevector {first}, {vector} poison, <{n} x i32> zeroinitializer")

    def sum(self) -> Value:
        """The sum of a vector's 2**m elements: the first half plus the second, and so on."""
        value, n = self, self._length
        while n > 1:
            n //= 2
            halves = [", ".join(f"i32 {i}" for i in range(begin, begin + n)) for begin in (0, n)]
            kind = f"<{n} x {self._element}>"
            low, high = (
                self.function.new(kind, f"shufflevector {value}, {value.kind} poison, <{n} x i32> <{half}>")
                for half in halves
            )
            value = low + high
        return self.function.new(self._element, f"extractelement {value}, i64 0")

    @property
    def _element(self) -> str:
        return self.kind.strip("<>").split(" x ")[-1]

    @property
    def _length(self) -> int:
        return int(self.kind.strip("<>").split(" x ")[0])

    def _like(self, element: str) -> str:
        return f"<{self._length} x {element}>" if self.kind[0] == "<" else element

    def _operation(self, name: str, other: Value | int) -> Value:
        return self.function.new(self.kind, f"{name} {self}, {self._operand(other)}")

    def _compare(self, how: str, other: Value | int) -> Value:
        return self.function.new(self._like("i1"), f"icmp {how} {self}, {self._operand(other)}")

    def _operand(self, other: Value | int) -> str:
        if isinstance(other, Value):
            return other.name
        return f"splat ({self._element} {other})" if self.kind[0] == "<" else str(other)


_BITS = {"i1": 1, "i8": 8, "i16": 16, "half": 16, "i32": 32, "float": 32, "i64": 64}

Body = Callable[..., Sequence[Value] | None]
"""Takes and returns values; None: it returns none."""


class Function:
    """void name(const int64_t *parameters)

    Args:
        parameters: the names of the parameters, in order. A pointer is a number, too.
    """

    def __init__(self, name: str, parameters: Sequence[str]) -> None:
        self.name, self.parameters = name, tuple(parameters)
        self._lines = [f"define void @{name}(ptr %parameters) nounwind {{", "entry:"]
        self._count, self._block = 0, "entry"

    def ir(self) -> str:
        return "\n".join([*self._lines, "  ret void", "}"])

    def new(self, kind: str, code: str) -> Value:
        """The result of an instruction."""
        name = f"%v{self._next()}"
        self._lines.append(f"  {name} = {code}")
        return Value(self, kind, name)

    def number(self, parameter: str, kind: str = "i64") -> Value:
        return self.load(kind, self.at(Value(self, "ptr", "%parameters"), 8 * self.parameters.index(parameter)))

    def pointer(self, parameter: str) -> Value:
        return self.number(parameter, "ptr")

    def constant(self, kind: str, value: int | float) -> Value:
        """A number; for a vector, of all of its elements."""
        element = kind.strip("<>").split(" x ")[-1]
        return Value(self, kind, f"splat ({element} {value})" if kind[0] == "<" else str(value))

    def zero(self, kind: str) -> Value:
        return Value(self, kind, "zeroinitializer")

    def vector(self, values: Sequence[Value]) -> Value:
        """Scalars of one type as a vector."""
        kind = f"<{len(values)} x {values[0].kind}>"
        vector = Value(self, kind, "poison")
        for i, value in enumerate(values):
            vector = self.new(kind, f"insertelement {vector}, {value}, i64 {i}")
        return vector

    def is_given(self, pointer: Value) -> Value:
        """Whether a pointer is not 0."""
        return self.new("i1", f"icmp ne {pointer}, null")

    def stack(self, kind: str, number: Value) -> Value:
        """Memory for so many values, until the function returns; not in a loop."""
        return self.new("ptr", f"alloca {kind}, {number}")

    def at(self, pointer: Value, nbytes: Value | int) -> Value:
        """The address so many bytes on."""
        offset = nbytes if isinstance(nbytes, Value) else f"i64 {nbytes}"
        return self.new("ptr", f"getelementptr i8, {pointer}, {offset}")

    def load(self, kind: str, pointer: Value, index: Value | None = None) -> Value:
        """The value at an address; with `index`, of an array there. It need not be aligned."""
        return self.new(kind, f"load {kind}, {self._element(kind, pointer, index)}, align 1")

    def store(self, value: Value, pointer: Value, index: Value | None = None) -> None:
        self._lines.append(f"  store {value}, {self._element(value.kind, pointer, index)}, align 1")

    def loop(
        self, begin: Value | int, end: Value, body: Body, values: Sequence[Value] = (), step: int = 1
    ) -> tuple[Value, ...]:
        """For i from `begin` in steps up to `end` (exclusive): values = body(i, *values). Return the last values."""
        number, before = self._next(), self._block
        head, inside, done = f"loop{number}", f"body{number}", f"done{number}"
        self._branch(head)
        self._begin(head)
        place = len(self._lines)
        i, *carried = (Value(self, kind, f"%v{self._next()}") for kind in ("i64", *(value.kind for value in values)))
        more = i < end
        self._lines.append(f"  br {more}, label %{inside}, label %{done}")
        self._begin(inside)
        results = body(i, *carried) or ()
        following = i + step
        first = begin if isinstance(begin, Value) else self.constant("i64", begin)
        entries = [(i, first, following), *zip(carried, values, results, strict=True)]
        phis = [f"  {x.name} = phi {x.kind} [{a.name}, %{before}], [{b.name}, %{self._block}]" for x, a, b in entries]
        self._branch(head)
        self._lines[place:place] = phis
        self._begin(done)
        return tuple(carried)

    def when(self, condition: Value, body: Body, otherwise: Sequence[Value] = ()) -> list[Value]:
        """If an i1 is true: body(); else `otherwise`. Return the values."""
        number, before = self._next(), self._block
        inside, done = f"then{number}", f"end{number}"
        self._lines.append(f"  br {condition}, label %{inside}, label %{done}")
        self._begin(inside)
        results, after = body() or (), self._block
        self._branch(done)
        self._begin(done)
        pairs = zip(results, otherwise, strict=True)
        return [self.new(b.kind, f"phi {b.kind} [{a.name}, %{after}], [{b.name}, %{before}]") for a, b in pairs]

    def _element(self, kind: str, pointer: Value, index: Value | None) -> Value:
        return pointer if index is None else self.new("ptr", f"getelementptr {kind}, {pointer}, {index}")

    def _branch(self, label: str) -> None:
        self._lines.append(f"  br label %{label}")

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label

    def _next(self) -> int:
        self._count += 1
        return self._count
