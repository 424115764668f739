"""generate_permute_indices against a brute force that places rows one by one."""

from __future__ import annotations

import pytest
import torch

from shardweave.errors import ArgumentError
from shardweave.runtime.moe.permute_indices import generate_permute_indices


def placed(counts: list[list[int]], max_len: int, alignment: int) -> tuple[list[int], list[int], list[int]]:
    """Place the rows of `counts[rank][expert]` one by one."""
    number, groups = 0, [[] for _ in counts[0]]
    for of_rank in counts:
        for expert, count in enumerate(of_rank):
            for _ in range(count):
                groups[expert].append(number)
                number += 1
    places, sizes, offsets = [], [], []
    for group in groups:
        while not group or len(group) % alignment:
            group.append(-1)
        places += group
        sizes.append(len(group))
        offsets.append(len(places))
    return (places + [-1] * max_len)[:max_len], sizes, offsets


CASES = [
    # experts of the rank, ranks, most rows of each, alignment
    (1, 1, 0, 1),
    (1, 1, 3, 8),
    (3, 1, 5, 4),
    (1, 5, 4, 16),
    (4, 3, 6, 1),
    (4, 3, 6, 8),
    (7, 4, 3, 3),  # not a power of two
    (32, 8, 40, 16),
]


@pytest.mark.plan
@pytest.mark.parametrize("experts, ranks, most, alignment", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("room", ["exact", "more", "less", "none"])
def test_permute_indices_equal_brute_force(experts, ranks, most, alignment, dtype, room):
    g = torch.Generator().manual_seed(experts * 100 + ranks)
    counts = torch.randint(0, most + 1, (ranks, experts), generator=g)
    counts[:, experts // 2] = 0  # an expert without rows
    if ranks > 1:
        counts[1] = 0  # and a source
    _, _, offsets = placed(counts.tolist(), 0, alignment)
    max_len = {"exact": offsets[-1], "more": offsets[-1] + 13, "less": offsets[-1] * 2 // 3, "none": 0}[room]
    given = counts.flatten().to(dtype).repeat_interleave(2)[::2]  # not contiguous
    results = generate_permute_indices(given, experts, ranks, max_len, alignment)
    assert [t.dtype for t in results] == [torch.int32] * 3
    assert [t.tolist() for t in results] == list(placed(counts.tolist(), max_len, alignment))


@pytest.mark.plan
@pytest.mark.parametrize(
    "change, text",
    [
        ({"experts_per_rank": 0}, "experts_per_rank: 0"),
        ({"num_ranks": True}, "num_ranks: True"),
        ({"max_len": -1}, "max_len: -1"),
        ({"alignment": 0}, "alignment: 0"),
        ({"tokens_per_expert_group": torch.zeros(5, dtype=torch.int64)}, r"shape \(5,\); allowed: .* \(6,\)"),
        ({"tokens_per_expert_group": torch.zeros(6)}, "torch.float32 of shape"),
    ],
)
def test_permute_indices_refuse_arguments(change, text):
    given = {
        "tokens_per_expert_group": torch.zeros(6, dtype=torch.int64),
        "experts_per_rank": 3,
        "num_ranks": 2,
        "max_len": 64,
        "alignment": 8,
    }
    with pytest.raises(ArgumentError, match=text):
        generate_permute_indices(**{**given, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_permute_indices_without_sync_on_gpu():
    counts = torch.tensor([[3, 0, 9], [1, 0, 2]])
    given = counts.flatten().cuda()
    generate_permute_indices(given, 3, 2, 40, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = generate_permute_indices(given, 3, 2, 40, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [t.tolist() for t in results] == list(placed(counts.tolist(), 40, 8))
