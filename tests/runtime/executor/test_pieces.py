"""Messages in pieces: the same bits as whole, however small the pieces are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import brute_force_oracle as oracle
import pytest
import torch
from rank_processes import run_ranks
from test_node_topologies import HOW, Drawn, drawn, without_latency
from test_simulate import poison  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardweave
from shardweave.planner import Program, plan
from shardweave.runtime.executor import pieces
from shardweave.runtime.executor.pieces import cuts_of, part_of_row, pieces_of
from shardweave.runtime.transports.process_group import ProcessGroupTransport

pytestmark = pytest.mark.plan

WHOLE = 1 << 62


@pytest.mark.parametrize("extent", [(), (0,), (1, 1), (7,), (1, 5, 3), (4, 1, 6), (2, 9)])
def test_cuts_cover_box(extent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 12)
    cuts = cuts_of(extent, 4)
    if math.prod(extent) <= 3:
        assert cuts == [None]
        return
    axes, starts, stops = zip(*[cut for cut in cuts if cut], strict=True)
    assert len(set(axes)) == 1 and extent[: axes[0]] == (1,) * axes[0]
    assert (0, *stops[:-1]) == starts and stops[-1] == extent[axes[0]]


def test_pieces_keep_order_of_message(monkeypatch: pytest.MonkeyPatch) -> None:
    program = plan((2,), (13, 5), "float32", "S0", "S1")
    rows = [(i, row) for i, row in enumerate(program.steps[0].boxes.rows())]
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50)
    cut = [part for piece in pieces_of(rows, 4) for part in piece]
    assert len(pieces_of(rows, 4)) > len(rows)
    for i, row in rows:
        parts = [part_of_row(row, cut_) for key, _, cut_ in cut if key == i]
        assert [part for key, part, _ in cut if key == i] == parts
        assert sum(math.prod(part.extent) for part in parts) == math.prod(row.extent)


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


@pytest.mark.parametrize("target", ["R R", "S0 S0", "S1 R", "R S0", "S0 S1", "S1 S1 @ 1:1,0"])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3)], ids=str)
def test_pieces_of_sums_give_same_bits(mesh: tuple[int, int], target: str, poison: None) -> None:  # noqa: F811
    """Sums inside nodes are sent to other nodes piece by piece."""
    nodes = [rank // mesh[1] for rank in range(mesh[0] * mesh[1])]
    how = {"one_sided": False, "node_size": mesh[1]}
    for partial in ("P", "Pmax"):
        case = mesh, nodes, f"{partial} {partial}", target
        check_same_bits(case, (37, 22), torch.float32, how, (64, 200, 1000))


def test_pieces_of_scalars_give_same_bits(poison: None) -> None:  # noqa: F811
    case = (4, 3), [rank // 3 for rank in range(12)], "P P", "R R"
    check_same_bits(case, (), torch.float64, {"one_sided": False, "node_size": 3}, (1, 8))


def fails_in_packing(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.zeros(2048, 1024), mesh, [Shard(0)])
    if rank:
        start = ProcessGroupTransport._start
        ProcessGroupTransport._start = lambda self, request: start(self, request._replace(before_send=boom))  # type: ignore[method-assign]
    try:
        shardweave.redistribute(x, [Shard(1)], transport="process_group")
    except Exception as error:  # the rank's own, or that of its peer
        return f"{type(error).__name__}: {error}"
    return "no error"


def boom(send: int) -> None:
    raise RuntimeError("no memory to pack")


@pytest.mark.multi
def test_failure_in_packing_is_that_of_its_rank() -> None:
    peer, own = run_ranks(fails_in_packing, 2)
    assert own == "RuntimeError: no memory to pack"
    assert peer.startswith("PeerError: ") and "rank 1 failed" in peer and "no memory to pack" in peer


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many_pieces_give_same_bits(part: int, poison: None) -> None:  # noqa: F811
    check_random(range(100 + 60 * part, 160 + 60 * part))
