"""Messages in pieces: the same bits as whole, however small the pieces are."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import brute_force_oracle as oracle
import pytest
import torch
from test_node_topologies import HOW, Drawn, drawn, without_latency
from test_simulate import poison  # noqa: F401

import shardweave
from shardweave.planner import Program, plan
from shardweave.runtime.executor import pieces

pytestmark = pytest.mark.plan

WHOLE = 1 << 62


def outputs(program: Program, locals_: Sequence[torch.Tensor], how: dict, nbytes: int) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", nbytes)
        return shardweave.simulate(program, locals_, **how)


def check_same_bits(case: Drawn, shape: tuple[int, ...], dtype: torch.dtype, how: dict, sizes: Sequence[int]) -> None:
    mesh, nodes, source, target = case
    program = plan(mesh, shape, str(dtype)[6:], source, target, topology=without_latency(nodes))
    generator = torch.Generator().manual_seed(7)
    given = torch.randn(oracle.contribution_shape(mesh, shape, source), generator=generator, dtype=torch.float64)
    locals_ = [x.to(dtype) for x in oracle.local_shards(mesh, shape, source, given)]
    whole = outputs(program, locals_, how, WHOLE)
    for nbytes in sizes:
        for rank, (a, b) in enumerate(zip(outputs(program, locals_, how, nbytes), whole, strict=True)):
            assert torch.equal(a, b), f"{case} {shape} {dtype} {how} {nbytes} rank {rank}\n{program.explain()}"


def check_random(seeds: range) -> None:
    """Compare pieces of a few bytes with whole messages."""
    for seed in seeds:
        random = Random(seed)
        case = drawn(seed, ("P", "Pavg", "Pmax", None)[seed % 4], uneven=seed % 3 > 0)
        if case is None:
            continue
        shape = random.choice([(11, 6), (7, 9), (1, 5), (0, 3), (24, 12)])
        dtype = random.choice([torch.float32, torch.bfloat16, torch.float64])
        for how in (*HOW, {"one_sided": False}, {"one_sided": False, "node_size": 3}):
            check_same_bits(case, shape, dtype, how, (1, 40))


def test_pieces_give_same_bits(poison: None) -> None:  # noqa: F811
    check_random(range(24))


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
def test_many_pieces_give_same_bits(part: int, poison: None) -> None:  # noqa: F811
    check_random(range(100 + 60 * part, 160 + 60 * part))
