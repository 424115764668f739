"""combine_rows and gather_values on the CPU: compiled loops over tokens, or torch operations where there are none."""

from __future__ import annotations

from functools import cache

import torch

from ..cpu_code.compile import Loop, NotCompiledError, compiled
from ..cpu_code.elements import Elements
from ..cpu_code.llvm_ir import Function, Value
from .quantize_rows import QuantizedRows
from .rows import CHUNK, Buffers, TokenRows

_COLUMNS = 32  # elements of a vector; those of a scale are a multiple


def combine_rows_cpu(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    add: torch.Tensor | None,
    nodes: torch.Tensor | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """combine_rows on the CPU."""
    (tokens, k), (_, hidden) = rows.key.shape, out.shape
    loop = _sums_loop(out.dtype, None if quantized is None else quantized.how.scale_dtype, nodes is not None)
    if loop is None:
        combine_rows_torch(rows, buffers, out, weights, add, nodes, quantized)
        return
    key, row = rows.key.contiguous(), rows.row.contiguous()
    if weights is not None and weights.stride(1) != 1:
        weights = weights.contiguous()
    given = [(None, 0) if x is None else (x, x.stride(0) * x.itemsize) for x in (weights, out, add)]
    addresses, row_bytes = buffers.host_addresses(), buffers.shape[1] * buffers.dtype.itemsize
    scales_at, group = (0, 1) if quantized is None else (quantized.scales_at, max(quantized.how.group or hidden, 1))
    loop(
        tokens, tokens * k * row_bytes, key, row, addresses,
        *(x for pair in given for x in pair), None if nodes is None else nodes.contiguous(),
        k, hidden, row_bytes, scales_at, group, None if quantized is None else _float8_values(),
    )  # fmt: skip


@cache
def _float8_values() -> torch.Tensor:
    """float32 [256]: the value of each float8_e4m3fn."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def why_not_compiled(dtype: torch.dtype) -> str:
    """Why rows of a dtype are summed by torch operations in this process; empty: they are not."""
    try:
        Loop(_Sums(dtype, None, False).function())
    except NotCompiledError as error:
        return str(error)
    return ""


@cache
def _sums_loop(dtype: torch.dtype, scale_dtype: torch.dtype | None, nested: bool) -> Loop | None:
    return compiled(_Sums(dtype, scale_dtype, nested).function())


class _Sums:
    """Builds the loop over tokens of combine_rows.

    Args:
        dtype: of the sums, and of rows if they are not quantized.
        scale_dtype: of quantized rows.
        nested: whether destinations are on several nodes.
    """

    def __init__(self, dtype: torch.dtype, scale_dtype: torch.dtype | None, nested: bool) -> None:
        self.itemsize, self.scale_dtype, self.nested = dtype.itemsize, scale_dtype, nested
        self.f = f = Function("sums", (
            "first", "end", "key", "row", "buffers", "weights", "weight_stride", "out", "out_stride", "add",
            "add_stride", "nodes", "k", "hidden", "row_bytes", "scales_at", "group", "float8_values",
        ))  # fmt: skip
        self.key, self.row, self.buffers, self.nodes = (f.pointer(x) for x in ("key", "row", "buffers", "nodes"))
        self.weights, self.out, self.add = (f.pointer(name) for name in ("weights", "out", "add"))
        self.strides = [f.number(name) for name in ("weight_stride", "out_stride", "add_stride")]
        self.k, self.hidden, self.row_bytes = (f.number(name) for name in ("k", "hidden", "row_bytes"))
        self.scales_at, self.group, self.float8_values = (
            f.number("scales_at"),
            f.number("group"),
            f.pointer("float8_values"),
        )
        self.weighted, self.adds, self.one = f.is_given(self.weights), f.is_given(self.add), f.constant("float", 1.0)
        # Of each pair of a token that has a row: where that is, its weight, and whether it is the first of its
        # destination (1), and of its node (2).
        self.address, self.weight, self.starts = (f.stack(kind, self.k) for kind in ("ptr", "float", "i32"))
        self.wide, self.narrow = Elements(f, dtype, _COLUMNS), Elements(f, dtype, 1)

    def function(self) -> Function:
        self.f.loop(self.f.number("first"), self.f.number("end"), self.token)
        return self.f

    def token(self, t: Value) -> None:
        f, number, whole = self.f, self.pairs(t), self.hidden & -_COLUMNS
        out, add = f.at(self.out, t * self.strides[1]), f.at(self.add, t * self.strides[2])

        def columns(c: Value, elements: Elements) -> None:
            offset, total = c * self.itemsize, self.sum(elements, c, number)
            (sums,) = f.when(self.adds, lambda: [total + elements.load(f.at(add, offset))], [total])
            elements.store(sums, f.at(out, offset))

        f.loop(0, whole, lambda c: columns(c, self.wide), step=_COLUMNS)
        f.loop(whole, self.hidden, lambda c: columns(c, self.narrow))

    def pairs(self, t: Value) -> Value:
        """Store what is known of the pairs that have a row; return their number."""
        f, k, first, weights = self.f, self.k.to("i32"), t * self.k, self.f.at(self.weights, t * self.strides[0])

        def pair(i: Value, number: Value, last: Value, last_node: Value) -> list[Value]:
            row = f.load("i32", self.row, first + i)

            def kept() -> list[Value]:
                key = f.load("i32", self.key, first + i)
                destination, index = key // k, (key % k).to("i64")
                to = destination.to("i64")
                f.store(f.at(f.load("ptr", self.buffers, to), row.to("i64") * self.row_bytes), self.address, number)
                (weight,) = f.when(self.weighted, lambda: [f.load("float", weights, index)], [self.one])
                f.store(weight, self.weight, number)
                node, starts = last_node, destination.differs(last).to("i32")
                if self.nested:
                    node = f.load("i32", self.nodes, to)
                    starts += node.differs(last_node).to("i32")
                f.store(starts, self.starts, number)
                return [number + 1, destination, node]

            return f.when(row >= 0, kept, [number, last, last_node])

        none = f.constant("i32", -1)
        number, _, _ = f.loop(0, self.k, pair, [f.constant("i64", 0), none, none])
        return number

    def sum(self, elements: Elements, c: Value, number: Value) -> Value:
        """The sum of the columns from c on of the token's rows."""
        f, zero = self.f, self.f.zero(elements.float)

        def pair(i: Value, total: Value, partial: Value, of_nodes: Value) -> list[Value]:
            starts = f.load("i32", self.starts, i)

            def started() -> list[Value]:
                added = total + elements.rounded(partial)
                if not self.nested:
                    return [added, zero, of_nodes]
                left = starts.equals(2)
                return [left.where(zero, added), zero, left.where(of_nodes + elements.rounded(added), of_nodes)]

            total, partial, of_nodes = f.when(starts.differs(0), started, [total, partial, of_nodes])
            product = self.values(elements, f.load("ptr", self.address, i), c)
            product *= f.load("float", self.weight, i).splat(elements.n)
            return [total, partial + product, of_nodes]

        total, partial, of_nodes = f.loop(0, number, pair, [zero, zero, zero])
        total += elements.rounded(partial)
        return of_nodes + elements.rounded(total) if self.nested else total

    def values(self, elements: Elements, row: Value, c: Value) -> Value:
        """The columns from c on of a row, float32."""
        f = self.f
        if self.scale_dtype is None:
            return elements.load(f.at(row, c * self.itemsize))
        scales, group = f.at(row, self.scales_at), c // self.group
        if self.scale_dtype is torch.float32:
            scale = f.load("float", scales, group)
        else:  # an exponent
            scale = (f.load("i8", scales, group).to("i32") << 23).bits("float")
        given = [f.load("i8", f.at(row, c + i)).to("i64") for i in range(elements.n)]
        return f.vector([f.load("float", self.float8_values, x) for x in given]) * scale.splat(elements.n)


def combine_rows_torch(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    add: torch.Tensor | None,
    nodes: torch.Tensor | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """combine_rows in torch operations, by its definition: a pair of each token at a time."""
    (tokens, k), (_, hidden), dtype = rows.key.shape, out.shape, out.dtype
    parts, most = buffers.parts(), max(1, CHUNK // max(hidden, 1))
    for first in range(0, tokens, most):
        these = slice(first, first + most)
        key, row, result = rows.key[these].long(), rows.row[these].long(), out[these]
        total, partial, of_nodes = (torch.zeros(result.shape, device=out.device) for _ in range(3))
        last, last_node = (torch.full((len(key),), -1, device=out.device) for _ in range(2))

        def move(chosen: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
            at = chosen.nonzero()[:, 0]
            target.index_add_(0, at, source.index_select(0, at).to(dtype).float())
            source.index_fill_(0, at, 0)

        for of_key, of_row in zip(key.T, row.T, strict=True):
            destination, kept = of_key // k, of_row >= 0
            move(kept & (destination != last), partial, total)
            if nodes is not None:
                node = torch.where(kept, nodes[destination.where(kept, 0)].long(), last_node)
                move(node != last_node, total, of_nodes)
                last_node = node
            for i, (tensor, before) in enumerate(parts):
                at = (kept & (destination == i)).nonzero()[:, 0]
                value = tensor.index_select(0, of_row[at] - before)
                value = value.float() if quantized is None else quantized.values(value, hidden)
                if weights is not None:
                    value *= weights[first + at, of_key[at] % k][:, None]
                partial.index_add_(0, at, value)
            last = torch.where(kept, destination, last)
        total += partial.to(dtype).float()
        if nodes is not None:
            total = of_nodes + total.to(dtype).float()
        result.copy_(total if add is None else total + add[these])


def gather_values_cpu(rows: TokenRows, buffers: Buffers, out: torch.Tensor) -> None:
    """gather_values on the CPU; `out` holds zeros."""
    key, row = rows.key.contiguous(), rows.row.contiguous()
    (tokens, k), loop = key.shape, _values_loop()
    if loop is None:
        destination = key // max(k, 1)
        for i, (values, first) in enumerate(buffers.parts()):
            token, at = ((row >= 0) & (destination == i)).nonzero(as_tuple=True)
            out[token, (key[token, at] % k).long()] = values[row[token, at].long() - first]
        return
    addresses = buffers.host_addresses()
    loop(tokens, 0, key, row, addresses, out, k)


@cache
def _values_loop() -> Loop | None:
    """The loop over tokens of gather_values."""
    f = Function("values", ("first", "end", "key", "row", "buffers", "out", "k"))
    key, row, buffers, out = (f.pointer(name) for name in ("key", "row", "buffers", "out"))
    k, k32 = f.number("k"), f.number("k").to("i32")

    def pair(first: Value, i: Value) -> None:
        of_row, of_key = f.load("i32", row, first + i), f.load("i32", key, first + i)

        def kept() -> None:
            buffer = f.load("ptr", buffers, (of_key // k32).to("i64"))
            f.store(f.load("float", buffer, of_row.to("i64")), out, first + (of_key % k32).to("i64"))

        f.when(of_row >= 0, kept)

    def token(t: Value) -> None:
        f.loop(0, k, lambda i: pair(t * k, i))

    f.loop(f.number("first"), f.number("end"), token)
    return compiled(f)
