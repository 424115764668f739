"""Meshes with permuted ranks: bitwise equal to torch, or refused.

Along a mesh dim whose ranks do not ascend, torch scatters, gathers and reduces by the order of the process group, which
it sorts, and cuts replicas by mesh coordinate.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.checkpoint import LoadPlanner, SavePlanner
from shardweave.errors import UnsupportedError
from shardweave.runtime.convert_specs import unordered_dims
from shardweave.runtime.moe.shard_tokens import shard_tokens

pytestmark = pytest.mark.multi

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
TRANSPORTS = ["shared_memory", "process_group"]
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))
REASON = re.compile(r"shards along mesh dim \d, whose ranks do not ascend: .*; allowed: .*")
TWO_DIMS = {
    # The dims along which ranks do not ascend everywhere.
    "((0, 1), (2, 3))": (),
    "((0, 2), (1, 3))": (),
    "((1, 0), (3, 2))": (1,),
    "((0, 1), (3, 2))": (1,),
    "((2, 3), (0, 1))": (0,),
    "((3, 1), (2, 0))": (0, 1),
    "((0, 3), (2, 1))": (0, 1),
}


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def by_coordinate(x: torch.Tensor, mesh: DeviceMesh, placements: Any) -> torch.Tensor:
    for m, p in enumerate(placements):
        if isinstance(p, Shard):
            chunks, at = x.chunk(mesh.size(m), p.dim), mesh.get_coordinate()[m]
            x = chunks[at] if at < len(chunks) else x.narrow(p.dim, 0, 0)
    return x.contiguous()


def source_of(x: torch.Tensor, mesh: DeviceMesh, placements: Any, by_torch: bool) -> DTensor:
    """Shards by `distribute_tensor` or by coordinate; each term of a partial is the whole tensor."""
    if by_torch:
        shards = [R if p.is_partial() else p for p in placements]
        local = distribute_tensor(x, mesh, shards).to_local()
    else:
        local = by_coordinate(x, mesh, placements)
    given = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(local.clone(), mesh, placements, **given).requires_grad_()


def moved(x: torch.Tensor, mesh: DeviceMesh, source: Any, target: Any, by_torch: bool) -> list[torch.Tensor]:
    """The result of a redistribution on this rank, its gradient, and the full tensor of each."""
    given = source_of(x, mesh, source, by_torch)
    got = given.redistribute(placements=target)
    (got * got).to_local().sum().backward()
    wholes = [got.full_tensor(), given.full_tensor()]
    gradient = given.grad
    return [t.detach() for t in (got.to_local(), gradient.to_local(), *wholes, gradient.full_tensor())]


def same(found: list[torch.Tensor], stock: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and a.dtype == b.dtype and a.equal(b) for a, b in zip(found, stock, strict=True))


def delegated() -> int:
    """The number of delegations since the last call, which must all have the expected reason."""
    found = dict(shardweave.stats().delegations)
    shardweave.stats().delegations.clear()
    assert all(REASON.fullmatch(reason) for reason in found), found
    return sum(found.values())


def compare(
    mesh: DeviceMesh, x: torch.Tensor, source: Any, target: Any, unordered: tuple[int, ...], by_torch: bool
) -> int:
    """Compare shardweave with torch. Returns the number of delegations."""
    what = f"{mesh.mesh.tolist()} {source} → {target}, by torch: {by_torch}"
    stock = moved(x, mesh, source, target, by_torch)
    with shardweave.installed():
        assert same(moved(x, mesh, source, target, by_torch), stock), what
    count = delegated()
    if not {m for m in unordered if S0 in (a := (source[m], target[m])) or S1 in a}:
        terms = [mesh.size(m) for m, p in enumerate(source) if p.is_partial()]
        value = x * int(torch.tensor(terms).prod()) if terms else x
        assert stock[0].equal(by_coordinate(value, mesh, target)) and stock[2].equal(value), what
        assert not count, what
    elif source != target:
        assert count, what
    return count


def in_one_dim(rank: int, tables: list[list[int]], every: int) -> list[tuple[int, int]]:
    """The numbers of comparisons and delegations for each mesh."""
    meshes, found = [DeviceMesh("cpu", table) for table in tables], []
    for table, mesh in zip(tables, meshes, strict=True):
        done, left, n, cases = 0, 0, len(table), 0
        unordered = () if table == sorted(table) else (0,)
        if rank in table:
            assert unordered_dims(mesh) == unordered
            shapes = whole(4 * n, 2 * n), whole(2 * n - 1, n + 2), whole(1, 3)
            for x, source, target, by_torch in product(shapes, (R, S0, S1, P), (R, S0, S1), (True, False)):
                cases += 1
                # torch drops rows of uneven shards unless ranks ascend.
                if cases % every == 0 and not (by_torch and unordered and x.shape[0] % n):
                    left += compare(mesh, x, (source,), (target,), unordered, by_torch)
                    done += 1
        found.append((done, left))
    return found


@pytest.mark.parametrize("transport", [pytest.param("shared_memory", marks=pytest.mark.long), "process_group"])
def test_one_dim_mesh_matches_torch_bitwise(transport: str) -> None:
    tables = [[1, 0], [2, 0, 1], [0, 2, 1, 3], [3, 0, 4, 1, 2], [4, 1, 2], [1, 2, 4]]
    for found in run_ranks(in_one_dim, 5, tables, 11, environment={"SHARDWEAVE_TRANSPORT": transport}):
        for table, (done, left) in zip(tables, found, strict=True):
            assert (left > 0) == (done > 0 and table != sorted(table))


def in_two_dims(rank: int, every: int) -> list[int]:
    """The number of delegations for each mesh."""
    counts, cases = [], 0
    for text, unordered in TWO_DIMS.items():
        mesh, left = DeviceMesh("cpu", eval(text)), 0
        assert unordered_dims(mesh) == unordered
        for source, target in product(product((R, S0, S1, P), repeat=2), product((R, S0, S1), repeat=2)):
            cases += 1
            if cases % every:
                continue
            by_torch = bool(cases // every % 2)
            left += compare(mesh, whole(8, 4), source, target, unordered, by_torch)
            sharded = {m for m in (0, 1) if {S0, S1} & {source[m], target[m]}}
            if not sharded & set(unordered):
                compare(mesh, whole(7, 5), source, target, unordered, by_torch)
        counts.append(left)
    return counts


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_dim_mesh_matches_torch_bitwise(transport: str) -> None:
    every = max(1, 37 // PARTS)
    for counts in run_ranks(in_two_dims, 4, every, environment={"SHARDWEAVE_TRANSPORT": transport}, timeout=500):
        assert [bool(c) for c in counts] == [bool(odd) for odd in TWO_DIMS.values()]


def round_trips(rank: int) -> None:
    """torch's inconsistency. If this test fails, torch has fixed it and delegation is no longer needed."""
    mesh, x = DeviceMesh("cpu", [1, 0]), whole(4, 2)
    with shardweave.installed():
        assert distribute_tensor(x, mesh, [S0]).full_tensor().equal(x)
        assert distribute_tensor(x, mesh, [S0]).redistribute(placements=[S1]).full_tensor().equal(x)
        cut = DTensor.from_local(x, mesh, [R], run_check=False).redistribute(placements=[S0])
        assert cut.full_tensor().equal(x.roll(2, 0)), "torch agrees with itself by now: delegate no more"
        summed = DTensor.from_local(x, mesh, [P], run_check=False).redistribute(placements=[S0])
        assert summed.full_tensor().equal(2 * x)
    assert delegated() == 7


def test_full_tensor_inverts_distribute_tensor() -> None:
    run_ranks(round_trips, 2)


def flattened(rank: int) -> None:
    mesh, x = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b")), whole(8, 2)
    given = distribute_tensor(x, mesh, [S0, S0])
    assert given.full_tensor().equal(x)
    flat = mesh._flatten("ab")
    assert unordered_dims(flat) == (0,) and not unordered_dims(mesh)
    assert not given.full_tensor().equal(x), "torch gathers in the order of the mesh by now"
    with shardweave.installed():
        assert given.full_tensor().equal(x)
        assert not delegated()
        assert distribute_tensor(x, flat, [S0]).full_tensor().equal(x)
        assert delegated() == 1


def test_gather_over_a_transposed_and_flattened_mesh() -> None:
    run_ranks(flattened, 4)


def refusals(rank: int, path: str) -> None:
    rows = DeviceMesh("cpu", [[2, 3], [0, 1]])
    plain, odd = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [2, 0, 1, 3])
    x = whole(8, 4)
    there = distribute_tensor(x, plain, [S0])
    here = distribute_tensor(x, odd, [S0])
    copies = DTensor.from_local(x, odd, [R], run_check=False)
    calls: list[Callable[[], Any]] = [
        lambda: shardweave.redistribute(here, [R]),
        lambda: shardweave.redistribute(copies, [S1]),
        lambda: shardweave.redistribute(there, [S0], device_mesh=odd),
        lambda: shardweave.redistribute(here, [S0], device_mesh=plain),
        lambda: shardweave.redistribute_batch([there, here], [[R], [R]]),
        lambda: shardweave.explain(here, [R]),
        lambda: shardweave.prepare_redistribute(here, [R]),
        lambda: shard_tokens(x, odd),
        lambda: shardweave.redistribute(DTensor.from_local(x, rows, [R, S0], run_check=False), [S0, S0]),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError) as raised:
            call()
        assert REASON.fullmatch(str(raised.value))
    with shardweave.installed(), pytest.raises(UnsupportedError, match=REASON):
        there.redistribute(odd, [S0])
    for action, planner in (
        (dcp_save, SavePlanner()),
        (dcp_load, LoadPlanner()),
    ):
        if action is dcp_load:
            dcp_save({"x": there}, checkpoint_id=path)
        with pytest.raises(CheckpointException) as failed:
            action({"x": here}, checkpoint_id=path, planner=planner)
        for error, _ in failed.value.failures.values():
            assert isinstance(error, UnsupportedError) and str(error).startswith("x: shards along mesh dim 0")
    # Replicas, sums and shards along the other dim are unaffected.
    for source, target in (((R, S0), (R, R)), ((P, S0), (R, S1)), ((P, R), (R, S0)), ((R, R), (P, S1))):
        local = by_coordinate(x, rows, source)
        given = DTensor.from_local(local, rows, source, run_check=False, shape=x.shape, stride=x.stride())
        got = shardweave.redistribute(given, target)
        value = x * 2 if P in source else x / 2 if P in target else x
        assert got.to_local().equal(by_coordinate(value, rows, target)), (source, target)
    moved_there = shardweave.redistribute(there, [R, S1], device_mesh=rows)
    assert moved_there.to_local().equal(by_coordinate(x, rows, [R, S1]))
    assert shardweave.redistribute(there, [R], device_mesh=odd).to_local().equal(x)
    assert not shardweave.stats().delegations


def test_unordered_mesh_is_refused_by_shardweave_functions(tmp_path: Any) -> None:
    run_ranks(refusals, 4, str(tmp_path))


def under_fsdp(rank: int) -> None:
    """FSDP2 uses the order of the process group everywhere, also for uneven shards, and so does `adapt_fsdp`."""
    mesh, found = DeviceMesh("cpu", [2, 0, 1]), []
    for adapted in (False, True):
        torch.manual_seed(3)
        model = nn.Linear(5, 7, dtype=torch.float64)
        weight = model.weight.detach().clone()
        fully_shard(model, mesh=mesh)
        if adapted:
            shardweave.fsdp.adapt_fsdp(model)
        with shardweave.installed():
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            assert model.weight.full_tensor().equal(weight)
            found.append(model.weight.grad.full_tensor())
    assert found[0].equal(found[1]) and found[0].equal(torch.full((7, 5), 2.0, dtype=torch.float64))
    assert delegated() == 4


def test_fsdp_on_an_unordered_mesh() -> None:
    run_ranks(under_fsdp, 3)


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="groups are always sorted")
def test_mesh_of_an_unsorted_group_is_delegated() -> None:
    run_ranks(of_a_group, 2)


def of_a_group(rank: int) -> None:
    mesh, x = DeviceMesh.from_group(dist.new_group([1, 0], sort_ranks=False), "cpu"), whole(3, 4)
    for source, target in product((R, S0, S1, P), (R, S0, S1)):
        compare(mesh, x, (source,), (target,), (0,), by_torch=True)


@pytest.mark.skipif(
    "preserve_rank_order" not in inspect.signature(DeviceMesh.__init__).parameters, reason="meshes sort their groups"
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mesh_with_preserve_rank_order(transport: str) -> None:
    run_ranks(preserved, 4, environment={"SHARDWEAVE_TRANSPORT": transport})


def preserved(rank: int) -> None:
    options: Any = {"preserve_rank_order": True}
    one, two = DeviceMesh("cpu", [2, 0, 1, 3], **options), DeviceMesh("cpu", [[3, 1], [2, 0]], **options)
    assert unordered_dims(one) == unordered_dims(two) == ()
    for source, target in product((R, S0, S1, P), (R, S0, S1)):
        compare(one, whole(7, 9), (source,), (target,), (), by_torch=True)
        compare(two, whole(8, 4), (source, S0), (target, S1), (), by_torch=True)
