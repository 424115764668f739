"""Token dispatch on one GPU: the work of one of several virtual ranks, whose peers' buffers are in the same memory.

Times are the kernels' alone, since virtual ranks wait for nobody. Rows and weights are small numbers whose sums are
exact in any order, so every contender has to combine them to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardweave.bench.gpu.kernel_cases import Made, checked, poisoned, random_buffer
from shardweave.kernels import (
    QUANTIZATIONS,
    Buffers,
    CountShare,
    Groups,
    QuantizedRows,
    TokenRows,
    combine_rows,
    copy_columns,
    count_pairs,
    push_rows,
    quantize_rows,
    route_rows,
)
from shardweave.kernels.tokens.group_rows import PhysicalExperts
from shardweave.kernels.tokens.quantize_rows import quantize_rows_cpu
from shardweave.kernels.tokens.rows import RowLaunch
from shardweave.runtime.moe.packed_rows import PackedRows, packed_rows

FEW_SETS = 4  # of inputs; a router has just written them, so they may be in the cache


@dataclass(frozen=True)
class Shape:
    """Sizes of a dispatch in which every rank has as many tokens.

    Attributes:
        batched: all experts have as many rows as the fullest one.
    """

    tokens: int
    hidden: int
    top_k: int
    experts: int
    ranks: int
    batched: bool = False

    def __str__(self) -> str:
        sizes = f"T {self.tokens}, H {self.hidden}, K {self.top_k}, E {self.experts}, bf16, {self.ranks} virtual ranks"
        return sizes + ", batched" * self.batched

    @property
    def moved(self) -> int:
        """Bytes of rows that dispatch or combine has to read and write: one row a token, and one for each pair."""
        return (1 + self.top_k) * self.tokens * self.hidden * 2

    @property
    def quantized(self) -> int:
        """Bytes of the tokens, read in bfloat16 and written in float8."""
        return self.tokens * self.hidden * 3

    @property
    def moved_quantized(self) -> int:
        """As `moved`, of rows quantized to `QUANTIZE`."""
        return (1 + self.top_k) * self.tokens * _packed(self).nbytes

    @property
    def returned_quantized(self) -> int:
        """Bytes that a combine reads of rows quantized to `EXACT`, and writes in bfloat16."""
        return self.tokens * (self.top_k * _packed(self, EXACT).nbytes + 2 * self.hidden)


LARGE, FEW = Shape(4096, 7168, 8, 256, 8), Shape(128, 7168, 8, 256, 8)  # training and decoding of DeepSeek-V3
QUANTIZE = "fp8_128"
EXACT = "mxfp8"  # small whole numbers stay what they are, and so do their sums
DRY_LARGE, DRY_FEW = Shape(8, 64, 2, 8, 4), Shape(3, 64, 2, 8, 4)


class VirtualRank:
    """Rank `me` of a dispatch: its ids and weights, and the counts of the other ranks.

    Attributes:
        rows: length of each destination's buffer, that of the fullest.
        at: int64 [T, K]: the row of each (token, k) pair in memory in which the destinations' buffers adjoin.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device, self.me = shape, device, shape.ranks // 2
        generator = torch.Generator().manual_seed(seed)
        ids = [
            torch.rand(shape.tokens, shape.experts, generator=generator).topk(shape.top_k).indices.to(device)
            for _ in range(shape.ranks)
        ]
        self.ids = ids[self.me]
        self.weights = 2.0 ** -torch.randint(0, 3, self.ids.shape, generator=generator).float().to(device)
        each = shape.experts // shape.ranks
        self.physical_experts = PhysicalExperts.divided(tuple(range(0, shape.experts + 1, each)), device)
        counts = [count_pairs(i, shape.experts).counts for i in ids]
        # Rows of peers are there from the beginning; the own one is written by every dispatch.
        self.matrices = Buffers([torch.stack(counts) for _ in ids])
        for matrix in self.matrices.tensors:
            matrix[self.me].fill_(-1)
        of_experts = torch.stack(counts)[:, :-1].sum(0)
        self.expert_rows = int(of_experts.amax()) if shape.batched else None
        self.rows = int(of_experts.view(shape.ranks, each).sum(1).amax())
        if self.expert_rows is not None:
            self.rows = each * self.expert_rows
        self.groups, self.located = self.route()
        destination, k = self.located.key.long() // shape.top_k, self.located.key.long() % shape.top_k
        self.at = torch.empty_like(k).scatter_(1, k, destination * self.rows + self.located.row)

    def route(self) -> tuple[Groups, TokenRows]:
        """All kernels before rows are pushed."""
        counted = count_pairs(self.ids, self.shape.experts, share=CountShare(self.matrices, self.me))
        matrix = self.matrices.tensors[self.me]
        groups, located, _ = route_rows(
            counted, matrix, self.physical_experts, self.me, self.rows,
            expert_capacity=self.expert_rows, batched=self.shape.batched,
        )  # fmt: skip
        return groups, located

    def tokens(self) -> torch.Tensor:
        return random_buffer(self.shape.tokens * self.shape.hidden, torch.bfloat16, self.device).view(
            self.shape.tokens, self.shape.hidden
        )

    def buffers(self, fill: Callable[[int, torch.dtype, torch.device], torch.Tensor]) -> tuple[torch.Tensor, Buffers]:
        """[W * rows, H], and of it the buffer of each destination."""
        size = self.shape.ranks * self.rows * self.shape.hidden
        whole = fill(size, torch.bfloat16, self.device).view(-1, self.shape.hidden)
        return whole, Buffers(whole.split(self.rows))

    def numbers(self) -> tuple[torch.Tensor, Buffers]:
        """Likewise for weights: poisoned float32 [W * rows]."""
        whole = poisoned(self.shape.ranks * self.rows, torch.float32, self.device)
        return whole, Buffers(whole.split(self.rows))

    def pushed(self, whole: torch.Tensor, numbers: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether every pair's row and weight are in their places, and nothing else was written."""
        rows = all(bool(whole[self.at[:, k]].equal(x)) for k in range(self.shape.top_k))
        written = self.ids.numel()
        poison = whole[:, 0].isnan().sum() + written == len(whole) and numbers.isnan().sum() + written == len(numbers)
        return rows and bool(numbers[self.at].equal(self.weights)) and bool(poison)

    def combined(self, whole: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, H], exact."""
        total = torch.zeros(self.shape.tokens, self.shape.hidden, dtype=torch.float64, device=self.device)
        for k in range(self.shape.top_k):
            total.addcmul_(whole[self.at[:, k]].double(), self.weights[:, k, None].double())
        return total.to(torch.bfloat16)

    def push(self, routing: bool, launch: RowLaunch | None = None) -> Made:
        x, (whole, buffers), (numbers, weight_buffers) = self.tokens(), self.buffers(poisoned), self.numbers()

        def call() -> None:
            groups, located = self.route() if routing else (self.groups, self.located)
            push_rows(x, located, buffers, groups, self.me, self.weights, weight_buffers, 0, launch)

        return call, lambda: self.pushed(whole, numbers, x)

    def push_quantized(self) -> Made:
        """push_rows of rows that are quantized already."""
        rows, x = _packed(self.shape), self.tokens()
        packed = self._quantized(x)
        whole = poisoned(self.shape.ranks * self.rows * rows.words, torch.int32, self.device).view(-1, rows.words)
        buffers, at = Buffers(whole.split(self.rows)), self.at
        call = partial(push_rows, packed, self.located, buffers, self.groups, self.me, most_padding=0)
        return call, lambda: all(bool(whole[at[:, k]].equal(packed)) for k in range(self.shape.top_k))

    def beside_matmul(self, side: int, beside: bool) -> Made:
        """A dispatch and the combine of other values, beside a matmul or before it."""
        (push, pushed), (combine, combined) = self.push(True), self.combine()
        a, b = (random_buffer(side * side, torch.bfloat16, self.device).view(side, side) for _ in range(2))
        c, other = torch.empty_like(a), torch.cuda.Stream(self.device) if beside and a.is_cuda else None

        def call() -> None:
            if other is None:
                push()
                combine()
                torch.matmul(a, b, out=c)
                return
            here = torch.cuda.current_stream(self.device)
            other.wait_stream(here)
            with torch.cuda.stream(other):
                push()
                combine()
            torch.matmul(a, b, out=c)
            here.wait_stream(other)

        return call, lambda: pushed() and combined() and torch.allclose(c, a @ b)

    def combine(self, launch: RowLaunch | None = None) -> Made:
        (whole, buffers), out = self.buffers(random_buffer), self.output()
        call = partial(combine_rows, self.located, buffers, out, self.weights, launch=launch)
        return call, lambda: out.equal(self.combined(whole))

    def combine_quantized(self) -> Made:
        """combine_rows of rows that the experts' ranks have quantized."""
        rows, whole = _packed(self.shape, EXACT), self.buffers(random_buffer)[0]
        packed = poisoned(len(whole) * rows.words, torch.int32, self.device).view(len(whole), rows.words)
        quantize_rows(whole, packed, rows.begins[1], QUANTIZATIONS[EXACT])
        buffers, out = Buffers(packed.split(self.rows)), self.output()
        how = QuantizedRows(QUANTIZATIONS[EXACT], rows.begins[1])
        call = partial(combine_rows, self.located, buffers, out, self.weights, quantized=how)
        return call, lambda: out.equal(self.combined(whole))

    def output(self) -> torch.Tensor:
        """Poisoned bfloat16 [T, H]."""
        out = poisoned(self.shape.tokens * self.shape.hidden, torch.bfloat16, self.device)
        return out.view(self.shape.tokens, self.shape.hidden)

    def routed(self) -> Made:
        """count_pairs alone, of ids that are a copy of their own."""
        ids, experts = self.ids.clone(), torch.arange(self.shape.experts, device=self.device)

        def right(routed: Any) -> bool:
            counts = (ids.view(-1, 1) == experts).sum(0)
            # Each pair's place is the number of earlier pairs of its physical expert.
            order = torch.argsort(ids.view(-1), stable=True)
            place = torch.arange(ids.numel(), device=self.device) - (counts.cumsum(0) - counts)[ids.view(-1)[order]]
            return bool(
                routed.physical_expert.equal(ids.int())
                and routed.place.view(-1)[order].equal(place.int())
                and routed.counts[:-1].equal(counts.int())
                and routed.counts[-1] == 0
            )

        return checked(lambda: count_pairs(ids, self.shape.experts), right)

    def quantized(self) -> Made:
        """quantize_rows alone, with a scale for every 128 elements."""
        x, rows = self.tokens(), _packed(self.shape)
        out = poisoned(len(x) * rows.words, torch.int32, self.device).view(len(x), rows.words)
        call = partial(quantize_rows, x, out, rows.begins[1], QUANTIZATIONS[QUANTIZE])
        return call, lambda: out.equal(self._quantized(x))

    def _quantized(self, x: torch.Tensor) -> torch.Tensor:
        """The packed rows of tokens, in torch operations on the CPU; other bytes are poison."""
        rows = _packed(self.shape)
        out = poisoned(len(x) * rows.words, torch.int32, torch.device("cpu")).view(len(x), rows.words)
        quantize_rows_cpu(x.cpu(), out, rows.begins[1], QUANTIZATIONS[QUANTIZE])
        return out.to(self.device)

    def both_quantized(self) -> Made:
        """A whole dispatch of rows, quantized on the way, their scales copied out, and the combine of others."""
        x, rows, (numbers, weight_buffers) = self.tokens(), _packed(self.shape), self.numbers()
        quantized = QuantizedRows(QUANTIZATIONS[QUANTIZE], rows.begins[1])
        whole = poisoned(self.shape.ranks * self.rows * rows.words, torch.int32, self.device).view(-1, rows.words)
        buffers = Buffers(whole.split(self.rows))
        own = buffers.tensors[self.me]
        scales = poisoned(self.rows * rows.sizes[1] // 4, torch.float32, self.device).view(self.rows, -1)
        number = torch.full((1,), self.rows, dtype=torch.int32, device=self.device)
        combine, combined = self.combine()

        def call() -> None:
            groups, located = self.route()
            push_rows(
                x, located, buffers, groups, self.me, self.weights, weight_buffers, most_padding=0, quantized=quantized
            )
            copy_columns(own, rows.begins[1], scales, number)
            combine()

        def right() -> bool:
            first = rows.begins[1] // 4
            copied = own[:, first : first + scales.shape[1]].equal(scales.view(torch.int32))
            used = slice(first + scales.shape[1])  # what follows is undefined
            want = self._quantized(x)[:, used]
            pushed = all(bool(whole[self.at[:, k], used].equal(want)) for k in range(self.shape.top_k))
            return copied and pushed and bool(numbers[self.at].equal(self.weights)) and combined()

        return call, right

    def both(self) -> Made:
        """A whole dispatch, and the combine of other values."""
        push, pushed = self.push(routing=True)
        combine, combined = self.combine()

        def call() -> None:
            push()
            combine()

        return call, lambda: pushed() and combined()


def _packed(shape: Shape, quantize: str = QUANTIZE) -> PackedRows:
    rows = packed_rows("quantize", quantize, shape.hidden)
    assert rows is not None
    return rows


def verified(made: list[Made]) -> list[Callable[[], object]]:
    """
    Raises:
        AssertionError: a call's result is wrong.
    """
    for call, right in made:
        call()
        if not right():
            raise AssertionError("the result is wrong")
    return [call for call, _ in made]
