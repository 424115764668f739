"""Traced redistributions: the graphs of all ranks give the bits of eager programs, in as many collectives and bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from traced_ranks import collectives_in, fake_rank, graph_of, groups_of_rank, run_together, spec, trace_all

import shardweave
from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.integrations.autoparallel import redistribute_local_tensor

PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.uint16,
)


class Request:
    """A redistribution and random shards of its source."""

    def __init__(self, mesh: Sequence[int], shape: Sequence[int], dtype: torch.dtype, source: str, target: str) -> None:
        self.program = shardweave.plan(mesh, shape, dtype, source, target)
        locals_ = [self._values(self.program.source_shape(r), dtype) for r in range(self.program.mesh.size)]
        self.fields = tuple(shape), dtype, source, target, locals_
        self.locals = locals_

    @staticmethod
    def _values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            x = 3 * torch.randn(tuple(shape), dtype=torch.complex64 if dtype.is_complex else torch.float32)
        else:
            x = torch.randint(-9 if dtype.is_signed else 0, 9, tuple(shape))
        return x.to(dtype)

    def transpose(self) -> None:
        """Give the shards other strides."""
        self.locals[:] = [x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim else x for x in self.locals]

    def check(self, graphs: Sequence[Any], groups: Sequence[Any]) -> None:
        program, name = self.program, f"{self.fields[:4]} on {self.program.mesh}"
        wanted = self.locals if program.is_identity else shardweave.simulate(program, self.locals)
        for rank, (got, want) in enumerate(zip(run_together(graphs, self.locals, groups), wanted, strict=True)):
            assert got.shape == want.shape and got.dtype == want.dtype, f"{name}, rank {rank}"
            assert bytes_of(got) == bytes_of(want), f"{name}, rank {rank}: {got}, not {want}"
        collectives = [collectives_in(*of, rank) for rank, of in enumerate(zip(graphs, groups, strict=True))]
        assert {len(of_rank) for of_rank in collectives} == {program.exchanges}, name
        assert [sum(size for *_, size in of_rank) for of_rank in collectives] == program.bytes_received, name


def bytes_of(x: torch.Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def check_all(mesh: Sequence[int], requests: Sequence[Request], **options: Any) -> None:
    graphs, groups = trace_all(mesh, [request.fields for request in requests], **options)
    for request, of_ranks in zip(requests, graphs, strict=True):
        request.check(of_ranks, groups)


def pairs(mesh_dims: int, ndim: int) -> list[tuple[str, str]]:
    """All pairs of layouts that `install` does not leave to torch."""
    layouts = [" ".join(p) for p in product(["R", "P", *(f"S{d}" for d in range(ndim))], repeat=mesh_dims)]
    return [pair for pair in product(layouts, repeat=2) if is_carried(*pair)]


def is_carried(source: str, target: str) -> bool:
    ends = (text.partition(" @")[0].split() for text in (source, target))
    return all(
        not b.startswith("P") or a in ("R", b) or (b == "P" and a[0] == "S" and "/" not in a)
        for a, b in zip(*ends, strict=True)
    )


def some(mesh: Sequence[int], shape: Sequence[int], every: int = 1) -> list[Request]:
    return [Request(mesh, shape, torch.float32, *pair) for pair in pairs(len(mesh), len(shape))[::every]]


@pytest.mark.parametrize(("mesh", "every"), [((4,), 1), ((2, 2), 9)])
@pytest.mark.parametrize("shape", [(8, 12), (5, 3)])
def test_pairs_of_layouts(mesh: tuple[int, ...], every: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check_all(mesh, some(mesh, shape, every))


@pytest.mark.long
def test_all_pairs_of_layouts() -> None:
    torch.manual_seed(0)
    check_all((2, 2), some((2, 2), (5, 3)))


def random_layout(draw: random.Random, mesh_dims: int, ndim: int, partial: str | None) -> str:
    """Shards, strided shards, replicas and one kind of partial, in any shard order."""
    tokens = []
    for _ in range(mesh_dims):
        kind = draw.random()
        if ndim == 0 or kind < 0.25:
            tokens.append(partial if partial and kind < 0.12 else "R")
        else:
            tokens.append(f"S{draw.randrange(ndim)}" + (f"/{draw.choice([2, 2, 3, 4])}" if kind > 0.85 else ""))
    text = " ".join(tokens)
    if "/" in text or draw.random() < 0.5:
        return text
    orders = []
    for d in range(ndim):
        cuts = [str(m) for m, token in enumerate(tokens) if token == f"S{d}"]
        if len(cuts) > 1:
            draw.shuffle(cuts)
            orders.append(f"{d}:{','.join(cuts)}")
    return f"{text} @ {' '.join(orders)}" if orders else text


def random_requests(seed: int, mesh: Sequence[int], count: int) -> list[Request]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    requests: list[Request] = []
    while len(requests) < count:
        ndim = draw.choice([0, 1, 2, 2, 3])
        shape = [draw.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 12]) for _ in range(ndim)]
        partial = draw.choice([None, "P", "P", "Pavg", "Pmax", "Pmin", "Pprod"])
        source = random_layout(draw, len(mesh), ndim, partial)
        target = random_layout(draw, len(mesh), ndim, partial if draw.random() < 0.3 else None)
        if not is_carried(source, target):
            continue
        try:
            request = Request(mesh, shape, draw.choice(DTYPES), source, target)
        except UnsupportedError:
            continue
        if draw.random() < 0.3:
            request.transpose()
        requests.append(request)
    return requests


@pytest.mark.parametrize("by_autograd", [False, True])
def test_random_requests(by_autograd: bool) -> None:
    check_all((2, 2), random_requests(1, (2, 2), 25), by_autograd=by_autograd)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "by_autograd"), [((4,), True), ((2, 2), False), ((2, 3), True), ((2, 2, 2), False)])
def test_many_random_requests(mesh: tuple[int, ...], by_autograd: bool) -> None:
    for part in range(PARTS):
        check_all(mesh, random_requests(100 + part, mesh, 100), by_autograd=by_autograd)


def test_reductions_of_the_backend() -> None:
    """With `reduction="fast"` sums are the collectives that torch's passes look for."""
    torch.manual_seed(0)
    wanted = {
        ("P R", "S0 R"): ["reduce_scatter_tensor"],
        ("P R", "S1 R"): ["reduce_scatter_tensor"],
        ("P P", "R R"): ["reduce_scatter_tensor", "all_gather_into_tensor"],
        ("Pavg R", "R R"): ["all_reduce"],
        ("Pmax R", "R R"): ["all_to_all_single"],  # backends may lose NaN
        ("S0 R", "R R"): ["all_gather_into_tensor"],
        ("R S1", "R R"): ["all_gather_into_tensor"],
        ("S0 S1", "S1 S0"): ["all_to_all_single"],
    }
    requests = [Request((2, 2), (8, 4), torch.float32, *pair) for pair in wanted]
    for request in requests:  # sums of whole numbers do not depend on their order
        request.locals[:] = [x.round() for x in request.locals]
    graphs, groups = trace_all((2, 2), [request.fields for request in requests], reduction="fast")
    for request, of_ranks, names in zip(requests, graphs, wanted.values(), strict=True):
        for rank, of in enumerate(zip(of_ranks, groups, strict=True)):
            assert [name for name, *_ in collectives_in(*of, rank)] == names, request.fields[:4]
        got = run_together(of_ranks, request.locals, groups)
        for a, b in zip(got, shardweave.simulate(request.program, request.locals), strict=True):
            assert torch.equal(a, b), request.fields[:4]


def test_results_have_the_order_of_dims_of_the_spec() -> None:
    with fake_rank(0, (2, 2)) as mesh, shardweave.installed():
        source, target = (spec(mesh, text, (8, 12), torch.float32) for text in ("S0 S1", "S1 S0"))
        target.tensor_meta = target.tensor_meta._replace(stride=(1, 8))  # a transposed tensor
        graph = graph_of(
            lambda x: redistribute_local_tensor(x, source, target),
            torch.ones(4, 6),
        )
    (output,) = next(iter(reversed(graph.graph.nodes))).args
    assert output.meta["val"].stride() == (1, 4)


def test_meshes_that_are_parts_of_the_world() -> None:
    """Along one mesh dim its group serves. Along both, a pipeline stage needs a group of all its ranks."""
    with fake_rank(5, (2, 2, 2)) as world, shardweave.installed():
        mesh = world["b", "c"]
        source, gathered, swapped = (spec(mesh, text, (8, 12), torch.float32) for text in ("S0 S1", "S0 R", "S1 S0"))
        shardweave.stats().reset()

        def names(target: Any) -> list[str]:
            graph = graph_of(
                lambda x: torch_redistribute.redistribute_local_tensor(x, source, target), torch.ones(4, 6)
            )
            return [name for name, *_ in collectives_in(graph, groups_of_rank(), 5)]

        before = shardweave.stats().delegations.copy()  # of earlier tests' graphs
        assert names(gathered) == ["all_gather_into_tensor"] and shardweave.stats().delegations == before
        assert len(names(swapped)) > 1  # torch's own
        (reason,) = shardweave.stats().delegations - before
        assert reason.startswith("no process group of ranks [4, 5, 6, 7]") and "prepare(mesh)" in reason
        mesh._flatten("stage")
        assert names(swapped) == ["all_to_all_single"] and shardweave.stats().delegations.total() == before.total() + 1


def test_a_wrong_local_shape_is_named() -> None:
    with fake_rank(0, (2, 2)) as mesh, shardweave.installed():
        specs = [spec(mesh, text, (8, 12), torch.float32) for text in ("S0 S1", "S1 S0")]
        with pytest.raises(ArgumentError, match=r"shape \(4, 5\)"):
            graph_of(lambda x: redistribute_local_tensor(x, *specs), torch.ones(4, 5))
