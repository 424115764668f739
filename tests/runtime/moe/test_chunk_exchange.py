"""Chunks of rows between all ranks, in messages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shardweave.errors import DisagreementError
from shardweave.runtime.moe.transfer.chunk_exchange import ChunkExchange, Rows
from shardweave.runtime.transports.in_process import InProcessTransport, run_all

pytestmark = pytest.mark.plan


def check_exchange(sizes: list[list[int]], parts: list[torch.Tensor]) -> None:
    """Exchange rows that tell where they come from, and compare what arrives. `sizes[i][j]`: rows from rank i to j;
    `parts`: empty tensors of the shapes and dtypes of rows."""
    ranks = tuple(range(10, 10 + len(sizes)))[::-1]
    runs: dict[int, Any] = {}
    expected, received = {}, {}
    for me, rank in enumerate(ranks):
        of_rank = []
        for number, part in enumerate(parts):

            def rows(source: int, target: int, number: int = number, part: torch.Tensor = part) -> torch.Tensor:
                generator = torch.Generator().manual_seed(1000 * number + 10 * source + target)
                shape = (sizes[source][target], *part.shape[1:])
                return torch.randint(0, 100, shape, generator=generator).to(part.dtype)

            sends = torch.cat([rows(me, other) for other in range(len(sizes))])
            receive_sizes = [row[me] for row in sizes]
            into = torch.full((sum(receive_sizes), *part.shape[1:]), 111).to(part.dtype)
            of_rank.append(Rows(sends, sizes[me], into, receive_sizes))
            expected[rank, number] = torch.cat([rows(other, me) for other in range(len(sizes))])
            received[rank, number] = into
        runs[rank] = ChunkExchange(InProcessTransport(False), ranks, me).run(7, of_rank)
    run_all(runs)
    assert all(received[key].equal(want) for key, want in expected.items())


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_of_any_sizes_arrive(world: int) -> None:
    parts = [
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.empty(0, dtype=torch.float32),
        torch.empty(0, 1, 5, dtype=torch.uint8),
    ]
    for seed in range(5):
        of = random.Random(seed)
        sizes = [[of.choice((0, 0, 1, 2, 7)) for _ in range(world)] for _ in range(world)]
        check_exchange(sizes, parts[: of.randint(1, 3)])


def test_no_rank_takes_rows_of_another_request() -> None:
    runs = {}
    for me in range(2):
        exchange, rows = ChunkExchange(InProcessTransport(False), (0, 1), me), torch.zeros(2, 4)
        runs[me] = exchange.run(7 + me, [Rows(rows, [1, 1], rows.clone(), [1, 1])])
    with pytest.raises(DisagreementError):
        run_all(runs)
