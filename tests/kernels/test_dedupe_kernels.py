"""The kernels of tokens that cross once for each rank, and their CPU paths, against loops over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_token_kernels import CASES, POISON, device, random_case, rows_of, same, tokens_like  # noqa: F401

from shardweave.kernels.tokens.combine_rows import combine_rows, combine_rows_reference
from shardweave.kernels.tokens.group_rows import Groups, PhysicalExperts
from shardweave.kernels.tokens.offer_tokens import RowTables, offer_tokens
from shardweave.kernels.tokens.push_rows import push_rows_reference
from shardweave.kernels.tokens.push_sums import push_sums
from shardweave.kernels.tokens.rows import Buffers, RowLaunch, TokenRows
from shardweave.kernels.tokens.spread_rows import OwnRows, spread_rows

NARROW = RowLaunch(64, 1)


def check(rng: np.random.Generator, case, dtype: torch.dtype, hidden: int, on: str, launch: RowLaunch | None) -> None:
    """Dispatch and combine among all ranks of a case; every buffer is poisoned before."""
    ranks, k = case.ranks, case.ids[0].shape[1]
    most = max(len(ids) for ids in case.ids) + 1  # of no rank
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(on))

    def poisoned(*shape: int, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
        value = 77 if dtype is torch.int32 else POISON
        return [torch.full(shape, value, dtype=dtype, device=on) for _ in range(ranks)]

    offered, buffers, numbers = poisoned(most, hidden), poisoned(case.capacity, hidden), poisoned(
        case.capacity, dtype=torch.float32
    )  # fmt: skip
    tables = [OwnRows(*own) for own in zip(
        poisoned(ranks * most, k, dtype=torch.int32), poisoned(ranks * most, k, dtype=torch.float32), strict=True
    )]  # fmt: skip
    row_tables = RowTables(*(Buffers(list(parts)) for parts in zip(*tables, strict=True)))
    located = [rows_of(case, rank, on, physical_experts) for rank in range(ranks)]
    want, want_numbers = [b.cpu().clone() for b in buffers], [n.cpu().clone() for n in numbers]
    weights, onces = [], []
    for rank, (rows, groups) in enumerate(located):
        tokens = len(case.ids[rank])
        x = tokens_like(rng, (tokens, hidden + 3), dtype, on)[:, 1 : hidden + 1]
        weights.append(torch.rand(tokens, k + 1, device=on)[:, :k])
        onces.append(torch.full((tokens, k), 77, dtype=torch.int32, device=on))
        offer_tokens(x, offered[rank], rows, weights[rank], row_tables, onces[rank], rank, launch)
        same(offered[rank][:tokens], x)
        assert (offered[rank][tokens:] == POISON).all()
        given = TokenRows(rows.key.cpu(), rows.row.cpu()), want, Groups(*[g.cpu() for g in groups])
        push_rows_reference(x.cpu(), *given, rank, weights[rank].cpu(), want_numbers)
    for rank, (_, groups) in enumerate(located):
        keep = OwnRows(torch.full_like(tables[rank].row, 5), torch.full_like(tables[rank].weight, 5))
        for failed in (1, 0):
            error = torch.tensor([failed], device=on)
            spread = Buffers(offered), tables[rank], buffers[rank], groups, 12, keep, numbers[rank], error, launch
            spread_rows(*spread)
            assert not failed or (keep.row == -1).all()
        same(keep.row, tables[rank].row)
        same(keep.weight, tables[rank].weight)
        same(buffers[rank], want[rank])
        same(numbers[rank], want_numbers[rank])
        buffers[rank].fill_(POISON)
        spread_rows(Buffers(offered), keep, buffers[rank], groups, 12, launch=launch)
        same(buffers[rank], want[rank])

    values = [tokens_like(rng, (case.capacity, hidden), dtype, on) for _ in range(ranks)]
    for weighted in (True, False):
        sums = [poisoned(most, hidden) for _ in range(ranks)]  # [token's rank][experts' rank]
        for rank, table in enumerate(tables):
            targets = Buffers([of_rank[rank] for of_rank in sums])
            push_sums(values[rank], table.row, table.weight if weighted else None, targets, launch=launch)
        for rank, (rows, _) in enumerate(located):
            given = weights[rank].cpu() if weighted else None
            expected = combine_rows_reference(
                TokenRows(rows.key.cpu(), rows.row.cpu()), [v.cpu() for v in values], given, None
            )
            out = torch.full_like(offered[rank][: len(expected)], POISON)
            combine_rows(TokenRows(rows.key, onces[rank]), Buffers(sums[rank]), out, launch=launch)
            same(out, expected)
            # One sum for each token and rank that has rows of it; nothing else is written.
            arrived = torch.stack([(of_rank != POISON).any(1) for of_rank in sums[rank]], 1)
            there = [[any(pair is not None and pair[0] == r for pair in pairs) for r in range(ranks)]
                     for pairs in case.rows[rank]]  # fmt: skip
            assert arrived[: len(there)].tolist() == there and not arrived[len(there) :].any()


IN_THE_GATE = [CASES[i] for i in (4, 6, 8, 10, 13)]  # repeated ids, drops, batched groups, replicas, one rank
EACH = [pytest.param(*case, marks=[] if case in IN_THE_GATE else pytest.mark.long) for case in CASES]


@pytest.mark.parametrize("kind, given", EACH, ids=str)
def test_tokens_cross_once(device, kind, given):  # noqa: F811
    rng = np.random.default_rng(7)
    case = random_case(rng, kind, **given)
    check(rng, case, torch.bfloat16, 12, device, None)


@pytest.mark.parametrize("dtype, hidden", [(torch.float32, 8), (torch.float16, 33), (torch.bfloat16, 200)], ids=str)
def test_tokens_cross_once_in_several_blocks(device, dtype, hidden):  # noqa: F811
    rng = np.random.default_rng(3)
    case = random_case(rng, "odd", k=6, tokens=[5, 0, 3], align=4, experts=8)
    check(rng, case, dtype, hidden, device, NARROW)
