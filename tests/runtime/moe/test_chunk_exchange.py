"""Chunks of rows between all ranks: in one all-to-all where they are small, else in messages."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shardweave.errors import DisagreementError
from shardweave.runtime.moe.transfer.base import Steps
from shardweave.runtime.moe.transfer.chunk_exchange import ChunkExchange, Rows
from shardweave.runtime.transports.backend_limits import BACKENDS
from shardweave.runtime.transports.comm_requests import AllToAll, CommRequest
from shardweave.runtime.transports.in_process import InProcessTransport, run_all

pytestmark = pytest.mark.plan
LIMIT = BACKENDS["gloo"].all_to_all


class Ordered(InProcessTransport):
    """With a process group of all ranks, in another order than theirs."""

    def group_order(self, ranks: Any) -> tuple[int, ...] | None:
        return tuple(sorted(ranks)) if self.backend else None


def seen(run: Steps[Any], requests: list[CommRequest]) -> Steps[Any]:
    """The same run, whose requests are listed."""
    answer = None
    while True:
        try:
            request = run.send(answer)
        except StopIteration as end:
            return end.value
        requests.append(request)
        answer = yield request


def exchanged(backend: str | None, sizes: list[list[int]], parts: list[torch.Tensor]) -> list[CommRequest]:
    """Exchange rows that tell where they come from, and compare what arrives. `sizes[i][j]`: rows from rank i to j;
    `parts`: empty tensors of the shapes and dtypes of rows. Returns the requests of all ranks."""
    ranks = tuple(range(10, 10 + len(sizes)))[::-1]
    runs: dict[int, Any] = {}
    requests: list[CommRequest] = []
    most = max(n for row in sizes for n in row)
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
        exchange = ChunkExchange(Ordered(False, backend), ranks, me)
        runs[rank] = seen(exchange.run(7, of_rank, most), requests)
    run_all(runs)
    assert all(received[key].equal(want) for key, want in expected.items())
    return requests


@pytest.mark.parametrize("backend", [None, "gloo", "nccl"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_of_any_sizes_arrive(backend: str | None, world: int) -> None:
    parts = [
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.empty(0, dtype=torch.float32),
        torch.empty(0, 1, 5, dtype=torch.uint8),
    ]
    for seed in range(5):
        of = random.Random(seed)
        sizes = [[of.choice((0, 0, 1, 2, 7)) for _ in range(world)] for _ in range(world)]
        requests = exchanged(backend, sizes, parts[: of.randint(1, 3)])
        collective = backend == "gloo" and world > 1 and any(map(any, sizes))
        assert [isinstance(request, AllToAll) for request in requests] == [collective] * world


@pytest.mark.parametrize("more", [0, 1])
def test_largest_chunk_of_any_rank_decides(more: int) -> None:
    rows = torch.empty(0, 64, dtype=torch.float32), torch.empty(0, dtype=torch.float32)
    most = LIMIT // 260 + more
    requests = exchanged("gloo", [[1, 1, most], [0, 0, 1], [1, 0, 0]], list(rows))
    assert [isinstance(request, AllToAll) for request in requests] == [not more] * 3
    assert LIMIT - 260 < (most - more) * 260 <= LIMIT


def test_no_rank_takes_rows_of_another_request() -> None:
    runs = {}
    for me in range(2):
        exchange, rows = ChunkExchange(InProcessTransport(False, "gloo"), (0, 1), me), torch.zeros(2, 4)
        runs[me] = exchange.run(7 + me, [Rows(rows, [1, 1], rows.clone(), [1, 1])], 1)
    with pytest.raises(DisagreementError):
        run_all(runs)


@pytest.mark.parametrize(("most", "collectives"), [(40, True), (40, False), (4 * LIMIT, True), (4 * LIMIT + 1, True)])
def test_messages_of_unknown_sizes_arrive_and_memory_is_used_again(most: int, collectives: bool) -> None:
    """In one all-to-all, whose group may have another order than the ranks, or each on its own; the message to itself
    stays."""
    ranks, transport = (12, 10, 11), Ordered(False, "gloo")
    exchanges = [ChunkExchange(transport, ranks, me) for me in range(3)]
    for number in range(2):
        runs, sizes = {}, [[(5 * i + 16 * j + number) % 40 for j in range(3)] for i in range(3)]
        for me, rank in enumerate(ranks):
            messages = exchanges[me].new_messages(sizes[me])
            for other, message in enumerate(messages):
                message[:] = 10 * me + other
            requests: list[CommRequest] = []
            runs[rank] = seen(exchanges[me].exchange_messages(7, messages, most, collectives), requests)
        for rank, arrived in run_all(runs).items():
            me = ranks.index(rank)
            for other, message in enumerate(arrived):
                assert (message[: sizes[other][me]] == 10 * other + me).all() and len(message) >= sizes[other][me]
        assert isinstance(requests[0], AllToAll) == (collectives and most <= 4 * LIMIT)
    another = ChunkExchange(transport, ranks, 0).new_messages([9, 9, 9])
    assert np.shares_memory(another[0], exchanges[0].new_messages([9, 9, 9])[0])
    assert not np.shares_memory(another[0], exchanges[1].new_messages([9, 9, 9])[0])
