"""NaN and infinities pass reductions. Results are equal to the bit among replicas and runs; among transports too, but
for the bits of a NaN and the sign of a zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from variants import crossed

import shardweave

OPS = {"sum": "P", "avg": "Pavg", "max": "Pmax", "min": "Pmin", "product": "Pprod"}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)
RANKS, ELEMENTS = 4, 203
TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")
SPECIALS = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0)


def terms(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each rank, [ELEMENTS]: for each pair of special numbers and of ranks an element, and random ones."""
    generator = torch.Generator().manual_seed(DTYPES.index(dtype))
    whole = torch.randn(RANKS, ELEMENTS, generator=generator)
    pairs = [(i, j, a, b) for i, j in ((0, 1), (1, 3), (3, 2), (2, 0)) for a in SPECIALS for b in SPECIALS]
    assert len(pairs) < ELEMENTS
    for element, (i, j, a, b) in enumerate(pairs):
        whole[i, element], whole[j, element] = a, b
    return list(whole.to(dtype))


def exact(op: str, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.stack([term.double() for term in terms(dtype)])
    if op in ("max", "min"):
        return getattr(whole, f"a{op}")(0)
    return whole.prod(0) if op == "product" else whole.sum(0) / (RANKS if op == "avg" else 1)


def check_values(op: str, dtype: torch.dtype, result: torch.Tensor) -> None:
    """NaN and infinities are where float64 has them, and the rest is near."""
    want, found = exact(op, dtype), result.double()
    assert found.isnan().equal(want.isnan()), (op, dtype)
    if dtype is torch.float8_e4m3fn:  # it has no infinities: torch converts larger numbers to the largest
        want = want.clamp(-448, 448)
    else:
        assert found.isposinf().equal(want.isposinf()) and found.isneginf().equal(want.isneginf()), (op, dtype)
    both = found.isfinite() & want.isfinite()
    close = torch.isclose(found[both], want[both], rtol=RANKS * torch.finfo(dtype).eps, atol=1e-2)
    assert both.sum() > ELEMENTS // 4 and close.all(), (op, dtype)


def simulated(op: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    name = str(dtype).removeprefix("torch.")
    return shardweave.simulate(shardweave.plan((RANKS,), (ELEMENTS,), name, OPS[op], "R"), terms(dtype), **options)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).tolist())


def alike(result: bytes, dtype: torch.dtype) -> bytes:
    """The bits with one NaN and one zero for all. Which NaN torch's conversions make, and which zero is the maximum of
    both, depends on the length of what it computes at once."""
    values = torch.frombuffer(bytearray(result), dtype=dtype)
    wide = values.double()
    return bits(torch.where(wide.isnan() | (wide == 0), torch.zeros((), dtype=dtype), values)) + bits(wide.isnan())


@pytest.mark.plan
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_special_values_pass_and_replicas_are_equal(op: str, dtype: torch.dtype) -> None:
    outs = simulated(op, dtype)
    check_values(op, dtype, outs[0])
    ways: list[dict[str, Any]] = [
        {}, {"one_sided": False}, {"one_sided": False, "backend": "gloo"}, {"one_sided": False, "node_size": 2},
    ]  # fmt: skip
    for way in ways:
        (replica,) = {bits(out) for out in simulated(op, dtype, **way)}
        assert alike(replica, dtype) == alike(bits(outs[0]), dtype), way


@pytest.mark.plan
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize < 4], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_small_floats_are_rounded_once(op: str, dtype: torch.dtype, ranks: int) -> None:
    """Of positive terms the result is within half a unit in the last place of that in float64."""
    terms = torch.rand(ranks, 257, generator=torch.Generator().manual_seed(ranks), dtype=torch.float64)
    terms = ((7 + 2 * terms) / 8 if op == "product" else (1 + 7 * terms) / 8).to(dtype)
    program = shardweave.plan((ranks,), (257,), str(dtype).removeprefix("torch."), OPS[op], "R")
    found, whole = shardweave.simulate(program, list(terms))[0].double(), terms.double()
    reduced = {"sum": whole.sum(0), "avg": whole.mean(0), "product": whole.prod(0)}
    want = reduced[op] if op in reduced else getattr(whole, f"a{op}")(0)
    limits = torch.finfo(dtype)
    last_place = torch.ldexp(torch.tensor(limits.eps), torch.frexp(want.clamp(min=limits.smallest_normal))[1] - 1)
    assert ((found - want).abs() / last_place).max() <= (0 if op in ("max", "min") else 0.5 + 1e-3)


@pytest.mark.plan
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_rows_alone_have_the_bits_of_rows_inside_a_larger_tensor(op: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = (torch.rand(RANKS, 37, 19, generator=generator) + 0.5).to(dtype)
    name = str(dtype).removeprefix("torch.")

    def reduced(rows: torch.Tensor) -> bytes:
        program = shardweave.plan((RANKS,), tuple(rows.shape[1:]), name, OPS[op], "R")
        return bits(shardweave.simulate(program, list(rows))[0].flatten())

    inside = reduced(whole)
    size = 19 * dtype.itemsize
    for first, last in ((0, 1), (5, 7), (11, 30), (36, 37)):
        assert reduced(whole[:, first:last].contiguous()) == inside[first * size : last * size], (first, last)


def reductions(rank: int, transport: str, topology: shardweave.Topology | None) -> list[bytes]:
    """The bits of each reduction, to replicas and to the pieces of shards, twice."""
    mesh, results = DeviceMesh("cpu", list(range(RANKS)), _init_backend=False), []
    for op in OPS:
        for dtype in DTYPES:
            x = DTensor.from_local(terms(dtype)[rank], mesh, [Partial(op)], run_check=False)
            for _ in range(2):
                for placement in (Replicate(), Shard(0)):
                    y = shardweave.redistribute(x, [placement], transport=transport, topology=topology)
                    results.append(bits(y.to_local()))
    return results


def reduced_by_rank(transport: str, topology: shardweave.Topology | None = None) -> list[tuple[bytes, ...]]:
    """The reductions to replicas, which are equal on all ranks and in both runs, as are the pieces of shards."""
    environment = {"SHARDWEAVE_NODE_SIZE": "2"} if transport == "hierarchical" else {}
    by_rank = run_ranks(reductions, RANKS, transport, topology, environment=environment)
    replicas, dtypes = [tuple(results[::4]) for results in by_rank], DTYPES * len(OPS)
    assert len(set(replicas)) == 1 and len(replicas[0]) == len(dtypes)
    for rank, results in enumerate(by_rank):
        assert results[::4] == results[2::4] and results[1::4] == results[3::4], (transport, rank)
        for whole, piece, dtype in zip(results[::4], results[1::4], dtypes, strict=True):
            size = -(-ELEMENTS // RANKS) * dtype.itemsize
            assert alike(piece, dtype) == alike(whole[rank * size : (rank + 1) * size], dtype), (transport, rank, dtype)
    return replicas


@pytest.mark.multi
@crossed("transport", TRANSPORTS, gate=lambda transport: transport in ("shared_memory", "hierarchical"))
def test_reductions_are_equal_among_replicas_transports_and_runs(transport: str) -> None:
    several = transport == "hierarchical"
    found = iter(reduced_by_rank(transport, shardweave.NVLINK_NODE if several else None)[0])
    for op in OPS:
        for dtype in DTYPES:
            assert alike(next(found), dtype) == alike(bits(simulated(op, dtype)[0]), dtype), (op, dtype)
    if several:
        reduced_by_rank(transport)  # in another order, by the topology of the nodes
