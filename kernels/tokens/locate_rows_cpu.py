"""locate_rows on the CPU: a compiled loop over tokens, or numpy where there is none."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from ..cpu_code.compile import Loop, compiled
from ..cpu_code.llvm_ir import Function, Value
from .rows import TokenRows
from .rows_cpu import host_empty, host_tensor


def locate_rows_cpu(
    physical_expert: torch.Tensor,
    place: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    destination: torch.Tensor,
    destinations: int,
) -> TokenRows:
    """locate_rows on the CPU; `start`, `limit`, `destination`: [S]."""
    loop, (tokens, k) = _locations_loop(), physical_expert.shape
    if loop is None:
        return locate_rows_numpy(physical_expert, place, start, limit, destination, destinations)
    given = [x.to(torch.int32).contiguous() for x in (physical_expert, place, start, limit, destination)]
    key, row = host_empty((tokens, k), torch.int32), host_empty((tokens, k), torch.int32)
    loop(tokens, 0, *given, key, row, destinations, k)
    return TokenRows(key, row)


@cache
def _locations_loop() -> Loop | None:
    """The loop over tokens."""
    f = Function("locations", (
        "first", "end", "expert", "place", "start", "limit", "destination", "key", "row", "destinations", "k",
    ))  # fmt: skip
    pointers = "expert", "place", "start", "limit", "destination", "key", "row"
    expert, place, start, limit, destination, key, row = (f.pointer(name) for name in pointers)
    destinations, k = f.number("destinations", "i32"), f.number("k")
    k32, none = k.to("i32"), f.constant("i32", -1)
    keys, rows = f.stack("i32", k), f.stack("i32", k)

    def locate(pair: Value, i: Value) -> None:
        of_pair, of_place, nowhere = f.load("i32", expert, pair), f.load("i32", place, pair), [destinations, none]

        def known() -> list[Value]:
            e = of_pair.to("i64")
            found = [f.load("i32", destination, e), f.load("i32", start, e) + of_place]
            return f.when(of_place < f.load("i32", limit, e), lambda: found, nowhere)

        to, of_row = f.when(of_pair >= 0, known, nowhere)
        f.store(to * k32 + i.to("i32"), keys, i)
        f.store(of_row, rows, i)

    def sort(first: Value, i: Value) -> None:
        of_pair = f.load("i32", keys, i)
        (before,) = f.loop(
            0, k, lambda j, before: [before + (f.load("i32", keys, j) < of_pair).to("i64")], [f.constant("i64", 0)]
        )
        f.store(of_pair, key, first + before)
        f.store(f.load("i32", rows, i), row, first + before)

    def token(t: Value) -> None:
        f.loop(0, k, lambda i: locate(t * k + i, i))
        f.loop(0, k, lambda i: sort(t * k, i))

    f.loop(f.number("first"), f.number("end"), token)
    return compiled(f)


def locate_rows_numpy(
    physical_expert: torch.Tensor,
    place: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    destination: torch.Tensor,
    destinations: int,
) -> TokenRows:
    """`locate_rows_cpu` in numpy."""
    (tokens, k), expert, at = physical_expert.shape, physical_expert.numpy(), place.numpy()
    of_expert = [np.append(x.numpy(), np.int32(0)).take(expert) for x in (limit, start, destination)]  # -1: the last
    kept = (expert >= 0) & (at < of_expert[0])
    row = np.where(kept, of_expert[1] + at, -1).astype(np.int32)
    key = np.where(kept, of_expert[2], destinations).astype(np.int32) * k + np.arange(k, dtype=np.int32)
    order = key.argsort(1)
    return TokenRows(*(host_tensor(np.take_along_axis(x, order, 1).reshape(tokens, k)) for x in (key, row)))
