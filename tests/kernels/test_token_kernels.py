"""The token kernels and their CPU paths, against loops over tokens."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from token_cases import POISON, Case, even_bounds, routing
from token_loops import without_loops

from shardweave.errors import ArgumentError
from shardweave.kernels.tokens.combine_rows import combine_rows, combine_rows_reference, gather_values
from shardweave.kernels.tokens.copy_rows import copy_rows, fill_rows
from shardweave.kernels.tokens.count_pairs import CountedPairs, CountShare, count_pairs
from shardweave.kernels.tokens.group_rows import Groups, PhysicalExperts, group_rows
from shardweave.kernels.tokens.locate_rows import locate_rows
from shardweave.kernels.tokens.push_rows import push_rows, push_rows_reference
from shardweave.kernels.tokens.receive_rows import receive_rows
from shardweave.kernels.tokens.route_rows import route_rows
from shardweave.kernels.tokens.rows import (
    Buffers,
    RowLaunch,
    TokenRows,
)
from shardweave.kernels.tokens.weigh_rows import weigh_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = ("uniform", "zipf", "hot", "none", "odd")
plan = pytest.mark.plan


@pytest.fixture(params=["loops", "torch operations", pytest.param("interpreter", marks=pytest.mark.interp),
                        pytest.param("cuda", marks=pytest.mark.gpu)])  # fmt: skip
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device: the CPU with compiled loops in three threads, with torch operations or with the interpreter, or a
    GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    threads = torch.get_num_threads()
    if request.param == "torch operations":
        without_loops(monkeypatch)
    elif request.param == "loops":
        if importlib.util.find_spec("numba") is None:
            pytest.skip("numba is not installed; it comes with shardweave[cpu]")
        torch.set_num_threads(3)
        monkeypatch.setattr("shardweave.kernels.tokens.compiled_loops._PARALLEL", 64)
    yield "cuda" if request.param == "cuda" else "cpu"
    torch.set_num_threads(threads)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert bitwise equality."""
    assert got.shape == want.shape and got.dtype == want.dtype
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    got, want = got.cpu().contiguous().view(size), want.cpu().contiguous().view(size)
    wrong = (got != want).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} of {got.numel()} differ, first at {wrong[0].tolist()}"


def i32(array, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(torch.int32).to(device)


def table(case: Case, rank: int, device: str) -> torch.Tensor | None:
    return i32(case.physical_expert_of[rank], device) if case.physical_expert_of else None


def random_case(rng: np.random.Generator, kind: str, ranks: int = 3, **given) -> Case:
    k, experts = given.pop("k", int(rng.integers(1, 9))), given.pop("experts", int(rng.choice([3, 8, 13])))
    tokens = given.pop("tokens", None) or [int(rng.choice([0, 1, 3, 6])) for _ in range(ranks)]
    ids = [routing(rng, kind, t, k, experts) for t in tokens]
    align = given.pop("align", int(rng.choice([1, 4, 8])))
    physical_experts, physical_expert_of = experts, None
    if given.pop("replicated", False):
        physical_experts = experts + 5
        physical_expert_of = [rng.permutation(physical_experts)[:experts] for _ in range(ranks)]
    capacity = given.pop("capacity", None)
    if capacity is None:
        capacity = -(-(sum(i.size for i in ids) + physical_experts * align) // align) * align
    return Case(
        ids,
        experts,
        even_bounds(physical_experts, ranks),
        align,
        capacity,
        physical_expert_of=physical_expert_of,
        **given,
    ).solve()


CASES = [
    *[(kind, {}) for kind in KINDS],
    ("uniform", {"k": 3, "align": 8, "capacity": 16}),
    ("hot", {"k": 5, "expert_capacity": 9}),
    ("odd", {"k": 2, "align": 4, "expert_capacity": 6, "capacity": 20, "experts": 8}),
    ("uniform", {"k": 8, "experts": 3, "align": 1, "expert_capacity": 5, "capacity": 5, "batched": True}),
    ("zipf", {"k": 4, "experts": 8, "align": 4, "expert_capacity": 8, "capacity": 24, "batched": True}),
    ("odd", {"k": 6, "replicated": True}),
    ("uniform", {"k": 1, "experts": 40, "ranks": 2}),
    ("uniform", {"k": 2, "ranks": 5, "experts": 3}),
    ("zipf", {"k": 7, "ranks": 1, "tokens": [9]}),
    ("uniform", {"k": 4, "ranks": 2, "tokens": [0, 0]}),
    ("uniform", {"k": 2, "capacity": 0, "align": 1}),
]


def each_case(test):
    return pytest.mark.parametrize("kind, given", CASES, ids=lambda v: v if isinstance(v, str) else str(v)[:60])(test)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "tokens, k, experts", [(1, 1, 1), (0, 4, 8), (5, 3, 3), (40, 8, 60), (128, 8, 256), (300, 5, 300)]
)
def test_count_pairs(device, tokens, k, experts, dtype):
    """Up to 1,024 pairs in one launch; (300, 5) in two."""
    for kind in KINDS:
        rng = np.random.default_rng(hash((tokens, k)) % 1000)
        case = Case([routing(rng, kind, tokens, k, experts)], experts, (0, experts)).solve()
        got = count_pairs(torch.from_numpy(case.ids[0]).to(dtype).to(device), experts)
        same(got.physical_expert, i32(case.physical_expert[0]))
        same(got.place, i32(case.place[0]))
        same(got.counts, i32(case.matrix[0]))


def test_count_pairs_of_many_blocks(device, monkeypatch):
    """More ids than blocks, so that each ranks several times; replicated experts and strided ids."""
    monkeypatch.setattr(sys.modules["shardweave.kernels.tokens.count_pairs"], "MOST_BLOCKS", 3)
    rng = np.random.default_rng(5)
    physical_expert_of = [rng.permutation(17)[:11]]
    case = Case([routing(rng, "odd", 371, 5, 11)], 11, (0, 17), physical_expert_of=physical_expert_of).solve()
    ids = torch.from_numpy(case.ids[0]).to(device).t().contiguous().t()
    got = count_pairs(ids, 11, i32(physical_expert_of[0], device), 17)
    same(got.physical_expert, i32(case.physical_expert[0]))
    same(got.place, i32(case.place[0]))
    same(got.counts, i32(case.matrix[0]))


@each_case
def test_group_and_locate_rows(device, kind, given):
    case = random_case(np.random.default_rng(3), kind, **given)
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(device))
    for rank in range(case.ranks):
        groups = groups_of(case, rank, device, physical_experts)
        low, high = case.bounds[rank : rank + 2]
        same(groups.offsets, i32(case.ends[low:high]))
        same(groups.counts, torch.tensor(case.kept[low:high], dtype=torch.int64))
        lengths = [e - b for b, e in zip(case.begins[low:high], case.ends[low:high], strict=True)]
        same(groups.padded_counts, torch.tensor(lengths, dtype=torch.int64))
        same(groups.num_rows, i32([case.ends[high - 1] if high > low else 0]))
        overflow = int(case.matrix[:, :-1].sum()) - sum(case.kept), int(case.matrix[:, -1].sum())
        same(groups.overflow, torch.tensor(overflow))
        rows = locate_rows(
            i32(case.physical_expert[rank], device), i32(case.place[rank], device), groups, physical_experts
        )
        k = case.ids[rank].shape[1]
        want_key, want_row = [], []
        for pairs in case.rows[rank]:
            keys = sorted((case.ranks if e is None else e[0], i) for i, e in enumerate(pairs))
            want_key += [destination * k + i for destination, i in keys]
            want_row += [-1 if pairs[i] is None else pairs[i][1] for _, i in keys]
        same(rows.key, i32(np.array(want_key, np.int32).reshape(-1, k)))
        same(rows.row, i32(np.array(want_row, np.int32).reshape(-1, k)))
        routed_in_one_launch(case, rank, device, groups, rows, physical_experts)


def routed_in_one_launch(
    case: Case, rank: int, device: str, groups: Groups, rows: TokenRows, physical_experts: PhysicalExperts
) -> None:
    """route_rows gives the same, from a matrix with more columns; and nothing after an error."""
    wide = torch.nn.functional.pad(i32(case.matrix, device), (0, rank), value=-9)
    counted = count_pairs(torch.from_numpy(case.ids[rank]).to(device), case.bounds[-1])
    settings = physical_experts, rank, case.capacity, case.align, case.expert_capacity, case.batched
    for error in (None, 0, 5):
        words = None if error is None else torch.tensor([error], device=device)
        got_groups, got_rows, matrix = route_rows(counted, wide, *settings, words)
        if not error:
            for got, want in zip((*got_groups, *got_rows[:2], matrix), (*groups, *rows[:2], wide[:, : matrix.shape[1]]),
                                 strict=True):  # fmt: skip
                same(got, want)
        else:
            assert (got_rows.row == -1).all() and not matrix.any() and not got_groups.counts.any()
            assert not got_groups.overflow.any()


@pytest.mark.parametrize("programs", [1, 2])
def test_route_rows_with_few_programs(device, monkeypatch, programs):
    """Each locates several blocks of tokens."""
    monkeypatch.setattr(sys.modules["shardweave.kernels.tokens.route_rows"], "MOST_PROGRAMS", programs)
    case = random_case(np.random.default_rng(7), "odd", k=6, tokens=[37, 0, 65], experts=8)
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(device))
    for rank in range(case.ranks):
        rows, groups = rows_of(case, rank, device, physical_experts)
        routed_in_one_launch(case, rank, device, groups, rows, physical_experts)


def groups_of(case: Case, rank: int, device: str, physical_experts: PhysicalExperts) -> Groups:
    matrix = i32(case.matrix, device)
    return group_rows(matrix, physical_experts, rank, case.capacity, case.align, case.expert_capacity, case.batched)


def rows_of(case: Case, rank: int, device: str, physical_experts: PhysicalExperts) -> tuple[TokenRows, Groups]:
    groups = groups_of(case, rank, device, physical_experts)
    return locate_rows(
        i32(case.physical_expert[rank], device), i32(case.place[rank], device), groups, physical_experts
    ), groups


@pytest.mark.parametrize("words", [None, (5, 0, 2**31 - 1)], ids=str)
@pytest.mark.parametrize("tokens", [3, 600])
def test_count_pairs_shares_counts(device, words, tokens):
    """Of few pairs and of many: in the row of each rank of all matrices, and nowhere else."""
    rng, k, experts = np.random.default_rng(0), 2, 7
    case = Case([routing(rng, "odd", tokens, k, experts) for _ in range(3)], experts, (0, 2, 4, experts)).solve()
    width = experts + 1 + (words is not None)
    matrices = [torch.full((4, width), -9, dtype=torch.int32, device=device) for _ in range(3)]
    for me, ids in enumerate(case.ids):
        share = CountShare(Buffers(matrices), me, None if words is None else words[me])
        got = count_pairs(torch.from_numpy(ids).to(device), experts, share=share)
        same(got.counts, i32(case.matrix[me]))
        same(got.place, i32(case.place[me]))
    want = i32(case.matrix) if words is None else torch.cat((i32(case.matrix), i32([[w] for w in words])), 1)
    for matrix in matrices:
        same(matrix, torch.cat((want, torch.full((1, width), -9, dtype=torch.int32))))
    with pytest.raises(ArgumentError, match=r"share.matrices: .*allowed: int32 of shape \[W, 8\]"):
        narrow = Buffers([matrix[:, :3].contiguous() for matrix in matrices])
        count_pairs(torch.from_numpy(ids).to(device), experts, share=CountShare(narrow, 0))


@pytest.mark.parametrize("hidden, dtype", [(6, torch.bfloat16), (1100, torch.float32)], ids=str)
def test_receive_rows(device, hidden, dtype):
    """Copied or not, filled or not, with numbers or without."""
    rng = np.random.default_rng(0)
    for n, copied, fill, has_numbers in product((0, 3, 9), (False, True), (None, 0.0, math.nan), (False, True)):
        source, target = tokens_like(rng, (9, hidden), dtype, device), torch.full((9, hidden), POISON, dtype=dtype)
        numbers = torch.rand(9, device=device), torch.full((9,), POISON, device=device)
        target = target.to(device)
        receive_rows(source if copied else None, target, i32([n], device), fill, numbers if has_numbers else None)
        for x, out, was in ((source, target, copied), (*numbers, has_numbers)):
            assert torch.equal(out[:n], x[:n] if was else torch.full_like(out[:n], POISON))
            left = out is numbers[1] and not has_numbers
            want = torch.full_like(out[n:], POISON if fill is None or left else fill)
            assert torch.equal(out[n:], want) or want.isnan().all() and out[n:].isnan().all()


def tokens_like(rng: np.random.Generator, shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype).to(device)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = list(zip([*DTYPES, torch.bfloat16, torch.float16], (16, 64, 3, 1, 40), strict=True))


def forms(kind: str, given: dict) -> list[tuple[torch.dtype, int]]:
    """Dtypes and lengths of rows; one in the interpreter, which is slow, rotating from case to case."""
    if not INTERPRETED:
        return FORMS
    return [FORMS[CASES.index((kind, given)) % len(FORMS)]]


@each_case
def test_push_rows(device, kind, given):
    rng = np.random.default_rng(7)
    case = random_case(rng, kind, **given)
    for dtype, hidden in forms(kind, given):
        check_push(rng, case, dtype, hidden, device)


def check_push(
    rng: np.random.Generator, case: Case, dtype: torch.dtype, hidden: int, device: str, launch: RowLaunch | None = None
) -> None:
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(device))
    buffers = [torch.full((case.capacity, hidden), POISON, dtype=dtype, device=device) for _ in range(case.ranks)]
    numbers = [torch.full((case.capacity,), POISON, device=device) for _ in range(case.ranks)]
    want, want_numbers = [b.cpu().clone() for b in buffers], [n.cpu().clone() for n in numbers]
    for rank in range(case.ranks):
        rows, groups = rows_of(case, rank, device, physical_experts)
        tokens, k = case.ids[rank].shape
        # Any stride between rows: a slice of something wider, at an odd place.
        x = tokens_like(rng, (tokens, hidden + 3), dtype, device)[:, 1 : hidden + 1]
        weights = torch.rand(tokens, k + 1, device=device)[:, :k]
        padding = int(rng.choice([1, 3, 12]))  # however many programs share it
        push_rows(x, rows, Buffers(buffers), groups, rank, weights, Buffers(numbers), padding, launch)
        given = TokenRows(rows.key.cpu(), rows.row.cpu()), want, Groups(*[g.cpu() for g in groups])
        push_rows_reference(x.cpu(), *given, rank, weights.cpu(), want_numbers)
    for got, expected in zip(buffers + numbers, want + want_numbers, strict=True):
        same(got, expected)


@pytest.mark.parametrize("hidden", [8, 1024, 2500], ids=str)
def test_push_rows_of_several_blocks(device, hidden):
    rng = np.random.default_rng(1)
    check_push(rng, random_case(rng, "odd", k=4, tokens=[3, 2, 0], align=4), torch.bfloat16, hidden, device)


@each_case
def test_combine_rows(device, kind, given):
    rng = np.random.default_rng(11)
    case = random_case(rng, kind, **given)
    for dtype, hidden in forms(kind, given):
        check_combine(rng, case, dtype, hidden, device)


def check_combine(rng: np.random.Generator, case: Case, dtype: torch.dtype, hidden: int, device: str) -> None:
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(device))
    buffers = []
    for destination in range(case.ranks):
        buffer = tokens_like(rng, (case.capacity, hidden), dtype, device)
        # Only rows that were pushed may be read.
        read = {e[1] for rows in case.rows for es in rows for e in es if e is not None and e[0] == destination}
        buffer[[row for row in range(case.capacity) if row not in read]] = float("nan")
        buffers.append(buffer)
    for rank in range(case.ranks):
        rows, _ = rows_of(case, rank, device, physical_experts)
        tokens, k = case.ids[rank].shape
        weights = torch.rand(tokens, k + 2, device=device)[:, :k]
        unkept = torch.tensor([[e is None for e in es] for es in case.rows[rank]], dtype=torch.bool).view(tokens, k)
        weights[unkept.to(device)] = float("nan")
        add = tokens_like(rng, (tokens, hidden + 5), dtype, device)[:, 2 : hidden + 2]
        arguments = ((weights, add), (None, None), (weights, None))
        for w, a in arguments[: 1 if INTERPRETED and hidden < 1024 else 3]:
            out = torch.full((tokens, hidden + 1), POISON, dtype=dtype, device=device)[:, :hidden]
            combine_rows(rows, Buffers(buffers), out, w, a)
            given = TokenRows(rows.key.cpu(), rows.row.cpu()), [b.cpu() for b in buffers]
            of_pairs, added = (None if v is None else v.cpu() for v in (w, a))
            same(out, combine_rows_reference(*given, of_pairs, added))
            if case.ranks > 1:  # the first rank is a node, the others are two by two
                nodes = [(i + 1) // 2 for i in range(case.ranks)]
                out.fill_(POISON)
                combine_rows(rows, Buffers(buffers), out, w, a, nodes=i32(nodes, device))
                same(out, combine_rows_reference(*given, of_pairs, added, nodes))


@pytest.mark.parametrize("hidden", [1024, 2500], ids=str)
def test_combine_rows_of_several_blocks(device, hidden):
    rng = np.random.default_rng(1)
    check_combine(rng, random_case(rng, "odd", k=5, tokens=[2, 1, 0]), torch.bfloat16, hidden, device)


def test_combine_rows_rounds_sum_of_each_destination(device):
    """256 + 1 + 1 in bfloat16 is 258 at one destination, and 256 if each 1 is at its own; two 1s at one are 2."""
    rows = TokenRows(i32([[0, 1, 2]], device), i32([[0, 1, 2]], device))  # all at destination 0
    apart = TokenRows(i32([[0, 4, 5]], device), i32([[0, 0, 1]], device))  # 1 at destination 0, 2 at destination 1
    a = torch.tensor([[257.0], [1.0], [1.0]]).bfloat16().to(device)
    b = torch.tensor([[1.0], [1.0], [1.0]]).bfloat16().to(device)
    weights = torch.tensor([[1.00390625, 1.0, 1.0]], device=device)
    out = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
    combine_rows(rows, Buffers([a, b]), out, weights)
    together = torch.tensor(256 * 1.00390625 + 2).bfloat16().item()
    assert out.item() == together
    combine_rows(apart, Buffers([a, b]), out, weights)
    assert out.item() == (torch.tensor(257.0).bfloat16().float() + 2).bfloat16().item()


def test_combine_rows_rounds_sum_of_each_node(device):
    """256 + 1 in bfloat16 is 256, and a bit more than that is 258."""
    rows = TokenRows(i32([[0, 4, 8]], device), i32([[0, 0, 0]], device))
    buffers = Buffers([torch.tensor([[x]]).bfloat16().to(device) for x in (256.0, 1.0, 0.0078125)])
    out = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
    for nodes, want in ((None, 258.0), ([0, 0, 1], 256.0), ([0, 1, 1], 258.0), ([0, 1, 2], 258.0)):
        combine_rows(rows, buffers, out, nodes=None if nodes is None else i32(nodes, device))
        assert out.item() == want
    with pytest.raises(ArgumentError, match=r"nodes: torch.int32 of shape \(2,\); allowed: int32 of shape \(3,\)"):
        combine_rows(rows, buffers, out, nodes=i32([0, 1], device))


@pytest.mark.parametrize("dtype, hidden", list(zip([*DTYPES, torch.bfloat16], (64, 48, 3, 2500), strict=True)), ids=str)
def test_weigh_rows(device, dtype, hidden):
    rng = np.random.default_rng(4)
    for n in (0, 1, 13):
        gradient, values = (tokens_like(rng, (20, hidden), dtype, device) for _ in range(2))
        weights = torch.rand(20, device=device)
        for x in (gradient, values, weights):
            x[n:] = float("nan")
        out = torch.full((20, hidden), POISON, dtype=dtype, device=device)
        dot = torch.full((20,), POISON, device=device)
        weigh_rows(gradient, values, weights, i32([n], device), out, dot)
        want = (gradient[:n].float() * weights[:n, None]).to(dtype)
        same(out[:n], want)
        exact = (gradient[:n].double() * values[:n].double()).sum(1)
        size = (gradient[:n].double() * values[:n].double()).abs().sum(1)
        assert ((dot[:n].double() - exact).abs() <= 1e-6 * size).all()
        assert (out[n:] == POISON).all() and (dot[n:] == POISON).all()


ROWS_TO_COPY = [
    (torch.bfloat16, (20, 64)),
    (torch.float32, (20, 3)),
    (torch.float16, (900, 7)),
    (torch.float32, (2100,)),
    (torch.bfloat16, (20, 0)),
]


@pytest.mark.parametrize("dtype, shape", ROWS_TO_COPY, ids=str)
def test_copy_rows(device, dtype, shape):
    for n in (0, 1, 13, shape[0]):
        source = torch.arange(math.prod(shape), device=device).remainder(251).view(shape).to(dtype)
        target = torch.full(shape, POISON, dtype=dtype, device=device)
        copy_rows(source, target, i32([n], device))
        same(target[:n], source[:n])
        assert (target[n:] == POISON).all()


@pytest.mark.parametrize("dtype, shape", ROWS_TO_COPY, ids=str)
@pytest.mark.parametrize("value", [0.0, float("nan"), 1.5])
def test_fill_rows(device, dtype, shape, value):
    for n in (0, 1, 13, shape[0]):
        target = torch.full((shape[0] + 1, *shape[1:]), POISON, dtype=dtype, device=device)
        fill_rows(target[:-1], i32([n], device), value)
        same(target[n:-1], torch.full_like(target[n:-1], value))
        assert (target[:n] == POISON).all() and (target[-1] == POISON).all()


@each_case
def test_gather_values(device, kind, given):
    case = random_case(np.random.default_rng(13), kind, **given)
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(device))
    buffers = [torch.rand(case.capacity, device=device) for _ in range(case.ranks)]
    for rank in range(case.ranks):
        rows, _ = rows_of(case, rank, device, physical_experts)
        want = [[0.0 if e is None else buffers[e[0]][e[1]].item() for e in es] for es in case.rows[rank]]
        same(gather_values(rows, Buffers(buffers)), torch.tensor(want).view(case.ids[rank].shape).float())


@plan
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: count_pairs(torch.zeros(3, dtype=torch.int64), 4), "ids: torch.int64 of shape"),
        (lambda: count_pairs(torch.zeros(3, 2), 4), "ids: torch.float32"),
        (lambda: count_pairs(torch.zeros(3, 2, dtype=torch.int64), 0), "num_physical_experts: 0"),
        (lambda: count_pairs(torch.zeros(3, 2, dtype=torch.int64), 4, None, 5), "num_physical_experts: 5"),
        (
            lambda: count_pairs(torch.zeros(3, 2, dtype=torch.int64), 4, torch.zeros(3)),
            "physical_expert_of: torch.float32",
        ),
        (lambda: group_rows(torch.zeros(2, 3).int(), two_experts(), 0, 8), "matrix: torch.int32"),
        (lambda: group_rows(torch.zeros(1, 3).int(), two_experts(), 0, 9, 4), "capacity: 9; allowed: a multiple"),
        (lambda: group_rows(torch.zeros(1, 3).int(), two_experts(), 0, 8, batched=True), "expert_capacity: None"),
        (lambda: PhysicalExperts.divided((0, 3, 2), torch.device("cpu")), "bounds"),
        (lambda: Buffers([torch.zeros(2, 3), torch.zeros(2, 4)]), r"buffers\[1\]"),
        (lambda: locate_rows(*[torch.zeros(1, 33).int()] * 2, None, two_experts()), "top_k: 33"),
        (lambda: route_rows(CountedPairs(*[i32([[0]])] * 3), i32([[0] * 3] * 2), two_experts(), 0, 8), "matrix"),
        (lambda: receive_rows(torch.zeros(2, 4), torch.zeros(3, 4), i32([1]), None), "source"),
        (lambda: receive_rows(None, torch.zeros(3, 4)[:, :2], i32([1]), 0.0), "target"),
        (lambda: fill_rows(torch.zeros(4, 6).double(), i32([2]), 0.0), "target: .*; allowed: floats or int32 of 16"),
        (lambda: copy_rows(torch.zeros(4, 6), torch.zeros(3, 6), i32([2])), "source|target"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_token_kernels_refuse_wrong_arguments(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


def two_experts() -> PhysicalExperts:
    return PhysicalExperts.divided((0, 2), torch.device("cpu"))
