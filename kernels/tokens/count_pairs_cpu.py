"""count_pairs on the CPU: a compiled loop over pairs, or numpy where there is none."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from ..cpu_code.compile import Loop, compiled
from ..cpu_code.llvm_ir import Function, Value
from .rows_cpu import host_empty, host_tensor


def count_pairs_cpu(
    ids: torch.Tensor, num_experts: int, physical_expert_of: torch.Tensor | None, num_physical_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of count_pairs' result on the CPU."""
    loop = _counts_loop(ids.dtype)
    if loop is None:
        return count_pairs_numpy(ids, num_experts, physical_expert_of, num_physical_experts)
    ids = ids.contiguous()
    expert, place = host_empty(ids.shape, torch.int32), host_empty(ids.shape, torch.int32)
    counts = host_tensor(np.zeros(num_physical_experts + 1, np.int32))
    table = None if physical_expert_of is None else physical_expert_of.contiguous()
    loop(ids.numel(), 0, ids, num_experts, table, num_physical_experts, expert, place, counts)
    return expert, place, counts


@cache
def _counts_loop(ids_dtype: torch.dtype) -> Loop | None:
    """The loop over pairs, in their order."""
    f = Function("counts", ("first", "end", "ids", "experts", "table", "physical_experts", "expert", "place", "counts"))
    ids, table, expert, place, counts = (f.pointer(name) for name in ("ids", "table", "expert", "place", "counts"))
    experts, physical_experts = f.number("experts"), f.number("physical_experts")
    bad = f.at(counts, physical_experts * 4)
    has_table, none = f.is_given(table), f.constant("i32", -1)

    def pair(p: Value) -> None:
        index = f.load("i32" if ids_dtype is torch.int32 else "i64", ids, p).signed_to("i64")
        valid = index.below(experts)

        def looked_up() -> list[Value]:
            return f.when(has_table, lambda: [f.load("i32", table, index)], [index.to("i32")])

        def counted() -> list[Value]:
            number = f.load("i32", counts, of_pair.to("i64"))
            f.store(number + 1, counts, of_pair.to("i64"))
            return [number]

        (of_pair,) = f.when(valid, looked_up, [none])
        (number,) = f.when(of_pair.below(physical_experts.to("i32")), counted, [none])
        is_bad = valid.where(f.constant("i1", 0), index.differs(-1))
        f.store(f.load("i32", bad) + is_bad.to("i32"), bad)
        f.store(of_pair, expert, p)
        f.store(number, place, p)

    f.loop(f.number("first"), f.number("end"), pair)
    return compiled(f)


def count_pairs_numpy(
    ids: torch.Tensor, num_experts: int, physical_expert_of: torch.Tensor | None, num_physical_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`count_pairs_cpu` by sorting."""
    flat = ids.numpy().reshape(-1)
    invalid = (flat < 0) | (flat >= num_experts)
    expert = np.where(invalid, -1, flat).astype(np.int32)
    if physical_expert_of is not None:
        expert = np.where(invalid, expert, physical_expert_of.numpy().take(expert, mode="clip"))
    order = expert.argsort(kind="stable")  # -1 is before all others
    number = np.bincount(expert + 1, minlength=num_physical_experts + 1)
    place = np.empty_like(expert)
    place[order] = np.arange(len(flat)) - np.repeat(number.cumsum() - number, number)
    place[expert < 0] = -1
    counts = np.append(number[1:], np.count_nonzero(invalid & (flat != -1))).astype(np.int32)
    return host_tensor(expert.reshape(ids.shape)), host_tensor(place.reshape(ids.shape)), host_tensor(counts)
