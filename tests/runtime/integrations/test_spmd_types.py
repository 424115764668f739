"""`install(spmd_types=True)` against spmd_types without it, on the same ranks: values, gradients, errors, counters."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import types
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks, run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError

if importlib.util.find_spec("spmd_types"):
    import spmd_types as spmd
    from spmd_types import I, P, R, S, V

    ASYNC = "async_op" in inspect.signature(spmd.all_gather).parameters  # from 0.3

needs_spmd_types = pytest.mark.skipif(
    importlib.util.find_spec("spmd_types") is None, reason="spmd_types is not installed (pip install spmd_types)"
)
TRANSPORTS = ["shared_memory", "process_group"]
Outcome = tuple[Any, ...]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32, strided: bool = False) -> torch.Tensor:
    """Small whole numbers, which differ between ranks and whose sums are exact in every dtype and order."""
    shape = (*shape[:-1], 2 * shape[-1]) if strided and shape else shape
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return x[..., ::2] if strided and x.ndim else x


def give_gloo_all_to_all() -> None:
    """Let spmd_types run on a gloo that has no `all_to_all`, such as that of torch 2.11, by its own seam."""
    n = dist.get_world_size()
    try:
        dist.all_to_all(list(torch.empty(n, 1)), list(torch.empty(n, 1)))
    except RuntimeError:

        def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup) -> None:
            sizes = {tuple(x.shape) for x in (*outputs, *inputs)}
            if len(sizes) != 1 or len(inputs) != group.size():
                raise RuntimeError(f"all_to_all: {sizes}") from None
            given: list[Any] = [None] * group.size()
            dist.all_gather_object(given, [x.contiguous() for x in inputs], group=group)
            for output, row in zip(outputs, given, strict=True):
                output.copy_(row[group.rank()])

        stand_in = types.ModuleType("dist")
        stand_in.__getattr__ = partial(getattr, dist)  # type: ignore[method-assign]
        stand_in.all_to_all = all_to_all  # type: ignore[attr-defined]
        spmd.set_dist(stand_in)


def outcome(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Outcome:
    """What a call returns and its gradient, or the type and text of its error."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
    try:
        y = call(x)
        if not y.requires_grad:
            return y.clone(), None
        numbers = torch.arange(y.numel()).reshape(y.shape) % 7 + 1
        y.backward(numbers.to(y.dtype) * (1 + dist.get_rank()))
    except Exception as error:
        return type(error).__name__, re.sub(r"^\[.*?\]:?\[.*?\] ", "", str(error))  # rank, time, line
    return y.detach(), x.grad


def same(a: Outcome, b: Outcome) -> bool:
    """Strides too: the rounding of later sums may depend on them."""
    return all(
        (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride()) and x.equal(y)
        if isinstance(x, torch.Tensor)
        else x == y
        for x, y in zip(a, b, strict=True)
    )


Case = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, int | None]
"""A call, its argument, and how many of its collectives shardweave carries out, if that is known."""


def assert_all_same(cases: Sequence[Case]) -> list[Outcome]:
    """Assert that ours is stock's, and that as many collectives were carried out and none left."""
    shardweave.uninstall()
    stock = [outcome(call, x) for call, x, _ in cases]
    shardweave.install(spmd_types=True)
    found = []
    for (call, x, carried), theirs in zip(cases, stock, strict=True):
        shardweave.stats().reset()
        found.append(ours := outcome(call, x))
        assert same(ours, theirs), (call, x.shape, x.dtype, ours, theirs)
        if carried is not None and x.numel():
            counters = shardweave.stats()
            assert (sum(counters.calls.values()), dict(counters.delegations)) == (carried, {}), (call, x.shape)
    return found


def assert_same(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Outcome:
    return assert_all_same([(call, x, None)])[0]


def exchanges(src: Any, dst: Any) -> int:
    """The number of collectives of a redistribution and its backward."""
    kind = {R: "R", I: "I", P: "P"}
    a, b = kind.get(src, "V"), kind.get(dst, "V")
    forward = (a, b) in (("P", "R"), ("P", "I"), ("P", "V"), ("V", "R"), ("V", "I")) or (a == b == "V" and src != dst)
    backward = (a, b) in (("P", "R"), ("I", "R"), ("P", "V"), ("V", "R"), ("I", "V")) or (a == b == "V" and src != dst)
    return forward + backward


def every_redistribution(rank: int) -> int:
    give_gloo_all_to_all()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    axes = [(4, dist.group.WORLD), (2, mesh.get_group("b"))]
    types = [R, I, V, P, S(0), S(1), S(-2)]
    dtypes = [(torch.float32, False), (torch.bfloat16, True), (torch.int64, False)]
    cases: list[Case] = []
    for (n, axis), src, dst, (dtype, strided) in product(axes, types, types, dtypes):
        dims = {getattr(t, "dim", 0) % 2 for t in (src, dst)}
        both_varying = all(t is V or isinstance(t, S) for t in (src, dst))
        call = partial(spmd.redistribute, axis=axis, src=src, dst=dst, backward_options={"op_dtype": torch.float32})
        expected = None
        if dtype is torch.float32:
            expected = (2 if len(dims) == 2 else 0) if both_varying else exchanges(src, dst)
        if both_varying and len(dims) == 2 and V in (src, dst):
            expected = 0  # spmd_types returns the tensor itself
        cases.append((call, values(rank, n, 2 * n, dtype=dtype, strided=strided), expected))
    found = assert_all_same(cases)
    assert all(isinstance(got[0], torch.Tensor) for got in found), found
    return len(found)


@needs_spmd_types
@pytest.mark.multi
@crossed("transport", TRANSPORTS, gate=lambda transport: transport == "shared_memory")
def test_every_pair_of_types(transport: str) -> None:
    assert run_ranks(every_redistribution, 4, environment={"SHARDWEAVE_TRANSPORT": transport}) == [294] * 4


def collectives_by_argument(rank: int) -> None:
    give_gloo_all_to_all()
    n, axis = 4, dist.group.WORLD
    full, half = {"backward_options": {"op_dtype": torch.float32}}, torch.bfloat16
    cases: list[tuple[int, tuple[int, ...], Callable[..., torch.Tensor]]] = []
    for dst in (R, I):
        for dim in (0, 1, 2):
            cases.append((2 if dst is R else 1, (3, 5), partial(spmd.all_gather, src=V, dst=dst, gather_dim=dim)))
        cases.append((2 if dst is R else 1, (), partial(spmd.all_gather, src=V, dst=dst)))
        cases.append((2 if dst is R else 1, (0, 3), partial(spmd.all_gather, src=S(1), dst=dst)))
        cases.append((2 if dst is R else 1, (5,), partial(spmd.all_reduce, src=V, dst=dst, op_dtype=half, **full)))
        cases.append((2 if dst is R else 1, (), partial(spmd.all_reduce, dst=dst)))
    for dim in (0, 1, 2):
        shape = [(n, 3, 2), (3, n, 2), (3, 2, n)][dim]
        cases.append((2, shape, partial(spmd.reduce_scatter, dst=V, scatter_dim=dim)))
        cases.append((2, shape, partial(spmd.reduce_scatter, dst=S(dim), out_dtype=torch.float64, **full)))
        for other in (0, 1, 2):
            cases.append((2, shape, partial(spmd.all_to_all, split_dim=dim, concat_dim=other)))
            if other != dim:
                cases.append((2, shape, partial(spmd.all_to_all, src=S(other), dst=S(dim))))
    assert_all_same([
        # all_reduce refuses strided tensors.
        (partial(call, axis=axis), values(rank, *shape, strided=strided and call.func is not spmd.all_reduce), carried)
        for carried, shape, call in cases
        for strided in (False, True)
    ])  # fmt: skip


@needs_spmd_types
@pytest.mark.multi
def test_arguments_of_collectives() -> None:
    run_ranks(collectives_by_argument, 4)


def without_program(rank: int) -> None:
    """What is left to spmd_types, most of it because it refuses it: the same errors, counted."""
    give_gloo_all_to_all()
    axis, reasons = dist.group.WORLD, shardweave.stats().delegations
    refused = [
        ((6, 3), partial(spmd.redistribute, src=P, dst=S(0))),
        ((6, 3), partial(spmd.redistribute, src=S(1), dst=S(0))),
        ((4, 3), partial(spmd.redistribute, src=S(2), dst=R)),
        ((4, 3), partial(spmd.redistribute, src=P, dst=S(-3))),
        ((3, 4), partial(spmd.reduce_scatter, dst=V)),
        ((3, 4), partial(spmd.all_gather, src=R, dst=R)),
        ((3, 4), partial(spmd.all_reduce, src=R, dst=R)),
        ((4, 3), partial(spmd.all_to_all, src=S(0), dst=S(1), split_dim=0)),
        ((4, 3), partial(spmd.redistribute, src="R", dst=P)),
        ((4, 3), partial(spmd.redistribute, src=P, dst=R, backward_options={"dtype": torch.float32})),
    ]
    for shape, call in refused:
        got = assert_same(partial(call, axis=axis), values(rank, *shape))
        assert isinstance(got[0], str), (call, got)
    low = values(rank, 4, dtype=torch.bfloat16).requires_grad_()
    with pytest.raises(ValueError, match="backward_options"):
        spmd.redistribute(low, axis, src=P, dst=R)
    with pytest.raises(AssertionError, match="contiguous"):
        spmd.all_reduce(values(rank, 3, 4, strided=True), axis, dst=R)
    assert set(reasons) == {"spmd_types: sizes, strides or dims that it refuses or handles itself"}
    sizes = [2] * 4  # gloo refuses different ones
    call = partial(spmd.all_to_all, axis=axis, output_split_sizes=sizes, input_split_sizes=sizes)
    got = assert_same(call, values(rank, 8, 3))
    assert got[0].equal(torch.cat([values(r, 8, 3)[2 * rank : 2 * rank + 2] for r in range(4)]))
    assert dict(reasons) == {"spmd_types: split sizes of an all-to-all, which differ between calls": 2}


@needs_spmd_types
@pytest.mark.multi
def test_refused_arguments_and_split_sizes() -> None:
    run_ranks(without_program, 4)


def uneven(rank: int) -> None:
    shardweave.install(spmd_types=True)
    axis = dist.group.WORLD
    for sizes in ([2, 2, 2, 1], [1, 1, 0, 0], [3, 3, 3, 0], [0, 0, 0, 0]):
        start, total = sum(sizes[:rank]), sum(sizes)
        whole = values(9, 2, total)
        x = whole[:, start : start + sizes[rank]].clone().requires_grad_()
        y = spmd.all_gather(x, axis, src=S(1), dst=R, split_sizes=sizes)
        y.backward(values(rank, 2, total))
        gradient = sum(values(r, 2, total) for r in range(4))
        assert y.equal(whole) and x.grad.equal(gradient[:, start : start + sizes[rank]])
        x = values(rank, 2, total).requires_grad_()
        y = spmd.reduce_scatter(x, axis, dst=S(1), split_sizes=sizes)
        y.backward(whole[:, start : start + sizes[rank]])
        assert y.equal(gradient[:, start : start + sizes[rank]]) and x.grad.equal(whole)
    assert not shardweave.stats().delegations


@needs_spmd_types
@pytest.mark.multi
def test_uneven_split_sizes() -> None:
    run_ranks(uneven, 4)


def different_sizes(rank: int) -> None:
    shardweave.install(spmd_types=True)
    spmd.redistribute(torch.zeros(2 + rank), dist.group.WORLD, src=S(0), dst=R)


@needs_spmd_types
@pytest.mark.multi
def test_ranks_with_different_sizes() -> None:
    for end in end_ranks(different_sizes, 2, environment={"SHARDWEAVE_TIMEOUT": "10"}):
        assert end.error in ("DisagreementError", "PeerError"), end


def in_place_and_async(rank: int) -> None:
    axis = dist.group.WORLD
    shardweave.install(spmd_types=True)
    x, want = values(rank, 3, 5), values(0, 3, 5) + values(1, 3, 5)
    y = spmd.all_reduce(x, axis, dst=R, inplace=True)
    assert x.equal(want) and y.data_ptr() == x.data_ptr()
    x = values(rank, 3, 5)
    assert spmd.all_reduce(x, axis, dst=R).equal(want) and x.equal(values(rank, 3, 5))
    with torch.inference_mode():
        assert spmd.all_reduce(values(rank, 3, 5), axis, dst=R).equal(want)
    if ASYNC:
        y = spmd.all_gather(x * 1, axis, src=S(0), dst=R, async_op=True)
        assert isinstance(y, AsyncCollectiveTensor) and (y + 0).equal(torch.cat([values(r, 3, 5) for r in (0, 1)]))
        sums = partial(spmd.all_reduce, dst=R), partial(spmd.reduce_scatter, dst=S(0))
        for call, dtype in product(sums, (None, torch.float64)):
            x = values(rank, 4, 500)
            y = call(x, axis, src=P, op_dtype=dtype, out_dtype=dtype, async_op=True)
            x.fill_(math.nan)  # before the result is used, which spmd_types allows
            total = (values(0, 4, 500) + values(1, 4, 500)).to(dtype or x.dtype)
            assert (y + 0).equal(total if len(y) == 4 else total.chunk(2)[rank])
        x = values(rank, 3, 5)
    shardweave.stats().reset()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with shardweave.installed(spmd_types=True, only=mesh["b"]):
        spmd.all_reduce(x, axis, dst=R)
    assert set(shardweave.stats().delegations) == {"an axis of a mesh that install(only=) leaves out"}
    shardweave.stats().reset()
    with shardweave.installed(spmd_types=True, only=DeviceMesh("cpu", [0])):  # a mesh without rank 1
        assert spmd.all_reduce(x, axis, dst=R).equal(want)
    assert set(shardweave.stats().delegations) == {"an axis of a mesh that install(only=) leaves out"}
    shardweave.stats().reset()
    with shardweave.installed(spmd_types=True, only=mesh):
        assert spmd.all_reduce(x, mesh.get_group("a"), dst=R).equal(want)
    assert spmd.all_reduce(x, mesh.get_group("b"), dst=R).equal(x)  # a group of one rank
    assert not shardweave.stats().delegations


@needs_spmd_types
@pytest.mark.multi
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_in_place_async_and_options(transport: str) -> None:
    run_ranks(in_place_and_async, 2, environment={"SHARDWEAVE_TRANSPORT": transport})


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spmd_types._collectives", None)
    with pytest.raises(ArgumentError, match="spmd_types: True, and it cannot be imported"):
        shardweave.install(spmd_types=True)
    assert not shardweave.is_installed()
