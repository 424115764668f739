"""Loops over rows in memory of the CPU, for numba. `compiled_loops` imports this file when one is first needed. What a
loop does is said by the function that calls it, beside the torch operations that do the same.

A loop does iterations `first` to `end` (exclusive). Parameters are numbers, and pointers, which are indexed as arrays
are; strides are in elements. bfloat16 and float16, which numba lacks, are their bits, uint16; float8 is looked up.

All loops are in one file: numba compiles one again when its file changes, not when another does that it calls into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import float32, int32, int64, njit, types, uint8, uint16, void

P = types.CPointer
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
CODES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_LANES = 32  # columns this far apart are summed first in a dot product
_BLOCK = 512  # columns that are kept in float32 at a time
_FLOAT8 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().numpy()


@njit(forceinline=True)
def float_of(bits: Any) -> Any:
    """float32 of its bits."""
    return np.uint32(bits).view(np.float32)


@njit(forceinline=True)
def bits_of(value: Any) -> Any:
    """The bits of float32, uint32."""
    return np.float32(value).view(np.uint32)


@njit(forceinline=True)
def value_of(x: Any, dtype: int) -> Any:
    """An element as float32."""
    if dtype == BFLOAT16:
        return float_of(np.uint32(x) << 16)
    if dtype == FLOAT16:
        sign, magnitude = (np.uint32(x) & 0x8000) << 16, np.uint32(x) & 0x7FFF
        # From 0.5 on float32 has the steps that float16 has from 0 on.
        small = bits_of(float_of(magnitude + 0x3F000000) - np.float32(0.5))
        large = np.uint32((magnitude << 13) + (0x70000000 if magnitude >= 0x7C00 else 0x38000000))
        return float_of(sign | (small if magnitude < 0x400 else large))
    return np.float32(x)


@njit(forceinline=True)
def rounded_bits(value: Any, dtype: int) -> Any:
    """float32 as the bits of bfloat16 or float16, rounded to nearest even."""
    bits = bits_of(value)
    if dtype == BFLOAT16:
        return np.uint16(0x7FC0 if value != value else np.uint32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    magnitude = np.uint32(bits & 0x7FFFFFFF)
    small = np.uint32(bits_of(float_of(magnitude) + np.float32(0.5)) - 0x3F000000)
    large = np.uint32(np.uint32(magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13)
    finite = small if magnitude < 0x38800000 else large if magnitude < 0x47800000 else np.uint32(0x7C00)
    nan = np.uint32(0x7E00 | magnitude >> 13 & 0x1FF)
    return np.uint16(bits >> 16 & 0x8000 | (finite if value == value else nan))


@njit(forceinline=True)
def store(target: Any, i: int, value: Any, dtype: int) -> None:
    """Store float32 as an element, rounded to nearest even."""
    target[i] = value if dtype == FLOAT32 else rounded_bits(value, dtype)


@njit(forceinline=True)
def rounded(value: Any, dtype: int) -> Any:
    """float32, rounded to a dtype."""
    return value if dtype == FLOAT32 else value_of(rounded_bits(value, dtype), dtype)


def sums(dtype: torch.dtype) -> tuple[Callable[..., None], Any]:
    """combine_rows, over tokens."""
    of, element = CODES[dtype], _numbers(dtype)

    def loop(
        first, end, key, row, buffers, packed, nodes, nested, weights, weight_stride, weighted, out, out_stride, add,
        add_stride, adds, k, hidden, row_bytes, scales_at, group, powers,
    ):  # fmt: skip
        scratch = np.zeros((7, _BLOCK), np.float32)
        of_nodes, total, partial = scratch[0], scratch[1], scratch[2]
        wide1, wide2, wide3, wide4 = scratch[3], scratch[4], scratch[5], scratch[6]
        here = np.empty(k, np.int64)  # the pairs of a token that have a row
        for t in range(first, end):
            number = 0
            for i in range(t * k, t * k + k):
                if row[i] >= 0:
                    here[number] = i
                    number += 1
            for begin in range(0, hidden, _BLOCK):
                n, i = min(_BLOCK, hidden - begin), 0
                while i < number:
                    end_of_node = number
                    if nested:
                        node, end_of_node = nodes[key[here[i]] // k], i + 1
                        while end_of_node < number and nodes[key[here[end_of_node]] // k] == node:
                            end_of_node += 1
                    pairs = here, end_of_node, key, row, weights, t * weight_stride, weighted, k
                    last = np.int64(-1), np.int64(-1)
                    while i < end_of_node:
                        # Four rows at a time: it waits for their memory at once.
                        at1, by1 = pair(i, last, *pairs)
                        at2, by2 = pair(i + 1, at1, *pairs)
                        at3, by3 = pair(i + 2, at2, *pairs)
                        at4, by4 = pair(i + 3, at3, *pairs)
                        if group:
                            quantized = begin, n, row_bytes, scales_at, group, powers
                            widen(wide1, packed, at1, *quantized)
                            widen(wide2, packed, at2, *quantized)
                            widen(wide3, packed, at3, *quantized)
                            widen(wide4, packed, at4, *quantized)
                            add_four(
                                total, partial, n, of, FLOAT32,
                                (wide1, 0, by1), (wide2, 0, by2), (wide3, 0, by3), (wide4, 0, by4),
                            )  # fmt: skip
                        else:
                            add_four(
                                total, partial, n, of, of,
                                (buffers[at1[0]], at1[1] * hidden + begin, by1),
                                (buffers[at2[0]], at2[1] * hidden + begin, by2),
                                (buffers[at3[0]], at3[1] * hidden + begin, by3),
                                (buffers[at4[0]], at4[1] * hidden + begin, by4),
                            )  # fmt: skip
                        i, last = i + 4, at4
                    i = end_of_node
                    if nested:
                        for c in range(n):
                            of_nodes[c] += rounded(total[c] + rounded(partial[c], of), of)
                            total[c] = partial[c] = 0
                to, other = t * out_stride + begin, t * add_stride + begin
                for c in range(n):
                    total[c] += rounded(partial[c], of)
                if nested:
                    for c in range(n):
                        total[c], of_nodes[c] = of_nodes[c], 0
                if adds:
                    for c in range(n):
                        total[c] += value_of(add[other + c], of)
                for c in range(n):
                    store(out, to + c, total[c], of)
                for c in range(n):
                    total[c] = partial[c] = 0

    rows, numbers = P(element), P(int32)
    return loop, void(
        int64, int64, numbers, numbers, P(rows), P(P(uint8)), numbers, int64, P(float32), int64, int64, rows, int64,
        rows, int64, int64, int64, int64, int64, int64, int64, int64,
    )  # fmt: skip


@njit
def pair(i, last, here, end, key, row, weights, weights_at, weighted, k):
    """Where the row of the i-th pair is: its destination and its number there. And how it is added: its weight, and
    with all bits set or none, whether it is the first of its destination, and whether it is there. From `end` on there
    are no pairs; they have the row of the last one."""
    if i >= end:
        return last, (np.float32(0), np.uint32(0), np.uint32(0))
    p = here[i]
    destination = np.int64(key[p] // k)
    weight = weights[weights_at + key[p] % k] if weighted else np.float32(1)
    begins = np.uint32(0 if destination == last[0] else 0xFFFFFFFF)
    return (destination, np.int64(row[p])), (weight, begins, np.uint32(0xFFFFFFFF))


@njit(forceinline=True)
def add_four(total: Any, partial: Any, n: int, dtype: int, dtype_of_rows: int, a: Any, b: Any, c: Any, d: Any) -> None:
    """Add n columns of four rows; of each: memory, the first element, and what `pair` says of it."""
    for i in range(n):
        sums = add_row((total[i], partial[i]), a, i, dtype, dtype_of_rows)
        sums = add_row(add_row(sums, b, i, dtype, dtype_of_rows), c, i, dtype, dtype_of_rows)
        total[i], partial[i] = add_row(sums, d, i, dtype, dtype_of_rows)


@njit(forceinline=True)
def add_row(sums: Any, source: Any, i: int, dtype: int, dtype_of_rows: int) -> Any:
    """Add an element to the sum of its destination; the sum of the one before is rounded and added to the total.
    Conditions are masks of bits, for which the loop needs no branches and becomes one over vectors."""
    (total, partial), (rows, at, (weight, begins, there)) = sums, source
    value = float_of(bits_of(value_of(rows[at + i], dtype_of_rows) * weight) & there)
    total += float_of(bits_of(rounded(partial, dtype)) & begins)
    return total, float_of(bits_of(partial) & ~begins) + value


@njit
def widen(
    wide: Any, buffers: Any, at: Any, begin: int, n: int, row_bytes: int, scales_at: int, group: int, powers: int
) -> None:
    """The columns from `begin` on of a row of float8 with scales."""
    rows, first = buffers[at[0]], at[1] * row_bytes
    for g in range(begin // group, (begin + n - 1) // group + 1):
        if powers:
            scale = float_of(np.uint32(rows[first + scales_at + g]) << 23)
        else:
            place, bits = first + scales_at + 4 * g, np.uint32(0)
            for i in range(4):
                bits |= np.uint32(np.uint32(rows[place + i]) << (8 * i))
            scale = float_of(bits)
        for c in range(max(g * group, begin), min(g * group + group, begin + n)):
            wide[c - begin] = _FLOAT8[rows[first + c]] * scale


def values() -> tuple[Callable[..., None], Any]:
    """gather_values, over tokens."""

    def loop(first, end, key, row, buffers, out, k):
        for t in range(first, end):
            for i in range(t * k, t * k + k):
                if row[i] >= 0:
                    out[t * k + key[i] % k] = buffers[key[i] // k][row[i]]

    return loop, void(int64, int64, P(int32), P(int32), P(P(float32)), P(float32), int64)


def pushes() -> tuple[Callable[..., None], Any]:
    """push_rows, over tokens; rows are bytes."""

    def loop(
        first, end, key, row, buffers, x, x_stride, row_bytes, weights, weight_stride, weight_buffers, weighted, k
    ):
        for t in range(first, end):
            for i in range(t * k, t * k + k):
                if row[i] >= 0:
                    destination, at = key[i] // k, np.int64(row[i])
                    target, to, source = buffers[destination], at * row_bytes, t * x_stride
                    for c in range(row_bytes):
                        target[to + c] = x[source + c]
                    if weighted:
                        weight_buffers[destination][at] = weights[t * weight_stride + key[i] % k]

    return loop, void(
        int64, int64, P(int32), P(int32), P(P(uint8)), P(uint8), int64, int64, P(float32), int64, P(P(float32)), int64,
        int64,
    )  # fmt: skip


def weighs(dtype: torch.dtype) -> tuple[Callable[..., None], Any]:
    """weigh_rows, over rows."""
    of, rows = CODES[dtype], P(_numbers(dtype))

    def loop(first, end, gradient, values, out, weights, weight_gradient, hidden):
        # `out` may be `gradient`. The sums of 32 columns are followed by those with the next 32, and so on.
        wide, sums = np.empty(_BLOCK, np.float32), np.empty(_BLOCK + _LANES, np.float32)
        for r in range(first, end):
            sums[:_LANES] = 0
            rest = np.float32(0)
            for begin in range(0, hidden, _BLOCK):
                n, at = min(_BLOCK, hidden - begin), r * hidden + begin
                whole = n - n % _LANES
                for c in range(whole):
                    wide[c] = value_of(gradient[at + c], of)
                    sums[_LANES + c] = sums[c] + wide[c] * value_of(values[at + c], of)
                for c in range(_LANES):
                    sums[c] = sums[whole + c]
                for c in range(whole, n):
                    wide[c] = value_of(gradient[at + c], of)
                    rest += wide[c] * value_of(values[at + c], of)
                for c in range(n):
                    store(out, at + c, wide[c] * weights[r], of)
            apart = _LANES // 2
            while apart:
                for c in range(apart):
                    sums[c] += sums[c + apart]
                apart //= 2
            weight_gradient[r] = sums[0] + rest

    return loop, void(int64, int64, rows, rows, rows, P(float32), P(float32), int64)


def counts(ids_dtype: torch.dtype) -> tuple[Callable[..., None], Any]:
    """count_pairs, over pairs; in order."""

    def loop(first, end, ids, experts, table, has_table, physical_experts, expert, place, counts):
        for p in range(first, end):
            of_pair, number = np.int64(-1), np.int32(-1)
            if 0 <= ids[p] < experts:
                of_pair = np.int64(table[ids[p]] if has_table else ids[p])
            elif ids[p] != -1:
                counts[physical_experts] += 1
            if 0 <= of_pair < physical_experts:
                number = counts[of_pair]
                counts[of_pair] += 1
            expert[p], place[p] = of_pair, number

    ids_type, numbers = int32 if ids_dtype is torch.int32 else int64, P(int32)
    return loop, void(
        int64, int64, P(ids_type), int64, numbers, int64, int64, numbers, numbers, numbers
    )  # fmt: skip


def locations() -> tuple[Callable[..., None], Any]:
    """locate_rows, over tokens."""

    def loop(first, end, expert, place, start, limit, destination, key, row, destinations, k):
        keys, rows = np.empty(k, np.int32), np.empty(k, np.int32)
        for t in range(first, end):
            for i in range(k):
                e, at = np.int64(expert[t * k + i]), place[t * k + i]
                kept = e >= 0 and at < limit[e]
                keys[i] = (destination[e] if kept else destinations) * k + i
                rows[i] = start[e] + at if kept else -1
            for i in range(k):
                before = t * k
                for j in range(k):
                    before += keys[j] < keys[i]
                key[before], row[before] = keys[i], rows[i]

    numbers = P(int32)
    return loop, void(int64, int64, *[numbers] * 7, int64, int64)


def _numbers(dtype: torch.dtype) -> Any:
    return float32 if dtype is torch.float32 else uint16
