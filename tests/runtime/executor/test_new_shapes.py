"""Tensors of new lengths in each call on real ranks, in any order."""

from __future__ import annotations

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardweave

LENGTHS = (5, 0, 1, 1001, 2, 3, 1000, 4, 7)
PAIRS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Partial(), Shard(0)),
    (Partial(), Replicate()),
)


def part(whole: torch.Tensor, placement: Placement, rank: int, ranks: int) -> torch.Tensor:
    """The shard of a rank by torch.chunk; later ranks may hold nothing."""
    if not isinstance(placement, Shard):
        return whole
    size = -(-whole.shape[placement.dim] // ranks)
    low, high = (min(i * size, whole.shape[placement.dim]) for i in (rank, rank + 1))
    return whole.narrow(placement.dim, low, high - low)


def new_lengths(rank: int, ranks: int, transport: str) -> int:
    mesh, checked = init_device_mesh("cpu", (ranks,)), 0
    for turned, length in enumerate((*LENGTHS, *LENGTHS[::-1])):  # the second time all are known
        for source, target in PAIRS[:: -1 if turned % 2 else 1]:
            for shape in ((length, 6), (3, length)):
                terms = [torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(7 * length + i)).double()
                         for i in range(ranks)]  # fmt: skip
                partial = isinstance(source, Partial)
                whole = torch.stack(terms).sum(0) if partial else terms[0]
                local = terms[rank] if partial else part(whole, source, rank, ranks).contiguous()
                x = DTensor.from_local(
                    local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
                )
                results = shardweave.redistribute(x, [target], transport=transport).to_local()
                want = part(whole, target, rank, ranks)
                assert results.shape == want.shape and results.equal(want), (source, target, shape)
                checked += 1
    return checked


@pytest.mark.multi
@pytest.mark.parametrize(("ranks", "transport"), [(4, "shared_memory"), (3, "process_group")])
def test_redistribute_new_lengths(ranks: int, transport: str) -> None:
    assert run_ranks(new_lengths, ranks, ranks, transport) == [2 * len(LENGTHS) * len(PAIRS) * 2] * ranks
