"""`shardweave.redistribute` and `install` between real processes, against slicing the whole tensor."""

from __future__ import annotations

import gc
import math
import os
import random
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.multi

SHARD_TO_SUM = torch.__version__ >= (2, 14)
"""Whether `DTensor.redistribute` takes a shard to a partial sum; before torch 2.14 it refuses."""

TRANSPORTS = ("shared_memory", "process_group")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def whole_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that are exact in every dtype; neighbours differ."""
    n = math.prod(shape)
    return ((torch.arange(n) * 7 + 3) % 13 - (0 if dtype == torch.bool else 6)).reshape(shape).to(dtype)


def held_by(x: torch.Tensor, placements, mesh: DeviceMesh, order: dict[int, tuple[int, ...]]) -> torch.Tensor:
    """The shard of this rank, cut by torch.chunk in order."""
    coordinate = mesh.get_coordinate()
    for dim in range(x.ndim):
        cuts = order.get(dim, tuple(m for m, p in enumerate(placements) if p.is_shard() and p.dim == dim))
        for mesh_dim in cuts:
            parts = list(x.chunk(mesh.size(mesh_dim), dim))
            empty = x.narrow(dim, 0, 0)
            x = (parts + [empty] * mesh.size(mesh_dim))[coordinate[mesh_dim]]
    return x


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def orders_of(placements) -> list[dict[int, tuple[int, ...]]]:
    both = [p.dim for p in placements if p.is_shard()]
    return [{}, {both[0]: (1, 0)}] if len(both) == 2 and both[0] == both[1] else [{}]


def make(x: torch.Tensor, mesh: DeviceMesh, placements, order) -> DTensor:
    """A DTensor in any shard order, made by slicing, without redistribution."""
    local = held_by(x, placements, mesh, order).contiguous()
    spelled = list(placements)
    if order:
        spelled[0] = _StridedShard(placements[0].dim, split_factor=mesh.size(1))
    return DTensor.from_local(local, mesh, spelled, run_check=False, shape=x.shape, stride=x.contiguous().stride())


def every_sampled_pair(rank: int, transport: str, dtype: torch.dtype, seed: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = random.Random(seed)
    done = 0
    kept = []
    for shape in ((6, 5), (3, 1), (9, 4, 3), (0, 4)):
        tokens = [Replicate(), Shard(0), Shard(1)]
        layouts = [(p, order) for p in product(tokens, tokens) for order in orders_of(p)]
        for (source, source_order), (target, target_order) in generator.sample(list(product(layouts, layouts)), 24):
            x = whole_tensor(shape, dtype)
            y = make(x, mesh, source, source_order)
            y = shardweave.redistribute(y, target, shard_order=target_order or None, transport=transport)
            assert tuple(y.placements) == tuple(target)
            want = held_by(x, target, mesh, target_order)
            kept.append((y.to_local(), want, (shape, source, source_order, target, target_order)))
            done += 1
    # Compared at the end, to detect results that a later call overwrote.
    for got, want, what in kept:
        assert equal(got, want), (what, got, want)
    return done


def every_dtype(rank: int, transport: str) -> int:
    return sum(every_sampled_pair(rank, transport, dtype, seed) for seed, dtype in enumerate(DTYPES))


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("process_group", marks=pytest.mark.long)])
def test_sampled_layout_pairs_match_slicing_in_every_dtype(transport: str) -> None:
    assert run_ranks(every_dtype, 4, transport, timeout=300) == [96 * len(DTYPES)] * 4


def partial_pairs(rank: int, transport: str, every: int = 2) -> None:
    """One shape of two for each pair, where `every` is 2."""
    mesh = init_device_mesh("cpu", (2, 2))
    coordinate = mesh.get_coordinate()
    for dtype, op in product((torch.float32, torch.bfloat16, torch.int64), ("sum", "max", "avg")):
        if op == "avg" and dtype == torch.int64:
            continue
        for first, shape in enumerate(((6, 5), (7, 3))):
            parts = [whole_tensor(shape, dtype) + i for i in range(2)]
            stacked = torch.stack([p.double() for p in parts])
            reduced = {"sum": stacked.sum(0), "max": stacked.amax(0), "avg": stacked.mean(0)}[op].to(dtype)
            placements = (Replicate(), Shard(0), Shard(1))
            for other, target in list(product(placements, product(placements, repeat=2)))[first % every :: every]:
                source = (Partial(op), other)
                local = held_by(parts[coordinate[0]], (Replicate(), other), mesh, {}).contiguous()
                x = DTensor.from_local(local, mesh, source, run_check=False, shape=parts[0].shape, stride=(shape[1], 1))
                y = shardweave.redistribute(x, target, transport=transport)
                assert equal(y.to_local(), held_by(reduced, target, mesh, {})), (dtype, op, source, target)


@crossed("every, transport", [2, 1], TRANSPORTS, gate=lambda *of: of == (2, "process_group"))
def test_partial_sources_match_the_reduced_tensor(transport: str, every: int) -> None:
    run_ranks(partial_pairs, 4, transport, every)


def replicas_alike(rank: int) -> list[bytes]:
    mesh = init_device_mesh("cpu", (4,))
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        local = torch.randn(33, 5, generator=torch.Generator().manual_seed(rank)).to(dtype)
        x = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        for transport in TRANSPORTS:
            y = shardweave.redistribute(x, [Replicate()], transport=transport).to_local()
            out.append(y.view(torch.uint8).numpy().tobytes())
    return out


def test_float_sums_are_bitwise_equal_on_replicas_and_transports() -> None:
    results = run_ranks(replicas_alike, 4)
    assert all(r == results[0] for r in results)
    assert results[0][0] == results[0][1] and results[0][2] == results[0][3]


def stock_through_ours(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.arange(35.0).view(7, 5)
    before = shardweave.stats().calls["shared_memory"]
    with shardweave.installed():
        assert shardweave.is_installed()
        d = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
        y = d.redistribute(placements=[Shard(1), Shard(0)])
        assert torch.equal(y.full_tensor(), x)
        # Implicit redistribution: adding two layouts.
        z = d + distribute_tensor(2 * x, mesh, [Replicate(), Shard(0)])
        assert torch.equal(z.full_tensor(), 3 * x)
        w = d.detach().requires_grad_()
        w.redistribute(placements=[Replicate(), Replicate()]).sum().backward()
        assert torch.equal(w.grad.full_tensor(), torch.ones(7, 5))
        if SHARD_TO_SUM:
            p = d.redistribute(placements=[Partial(), Shard(1)])
            assert torch.equal(p.full_tensor(), x)
        else:
            with pytest.raises(RuntimeError):
                d.redistribute(placements=[Partial(), Shard(1)])
        # With a flattened mesh torch gathers uneven nested shards wrongly.
        mesh["a", "b"]._flatten()
        for n in (5, 6, 9):
            v = torch.arange(float(n))
            nested = make(v, mesh, (Shard(0), Shard(0)), {})
            assert torch.equal(nested.redistribute(placements=[Replicate(), Replicate()]).to_local(), v)
    assert not shardweave.is_installed()
    assert shardweave.stats().calls["shared_memory"] > before + 5


def test_install_replaces_explicit_implicit_and_backward() -> None:
    run_ranks(stock_through_ours, 4)


def submeshes_and_oddities(rank: int) -> None:
    transport = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows = transport["b"]
    x = torch.arange(10.0)
    y = shardweave.redistribute(distribute_tensor(x, rows, [Shard(0)]), [Replicate()])
    assert torch.equal(y.to_local(), x)
    half = DeviceMesh("cpu", [1, 3])
    if rank in (1, 3):
        local = x[:5] if rank == 1 else x[5:]
        d = DTensor.from_local(local, half, [Shard(0)], run_check=False)
        assert torch.equal(shardweave.redistribute(d, [Replicate()]).to_local(), x)
        assert torch.equal(shardweave.redistribute(d, [Replicate()], transport="process_group").to_local(), x)
    # A strided view is read in place.
    t = torch.arange(48.0).view(6, 8)
    local = held_by(t, (Shard(0), Shard(1)), transport, {}).t().contiguous().t()
    assert not local.is_contiguous()
    d = DTensor.from_local(local, transport, [Shard(0), Shard(1)], run_check=False)
    assert torch.equal(
        shardweave.redistribute(d, [Shard(1), Shard(0)]).to_local(), held_by(t, (Shard(1), Shard(0)), transport, {})
    )
    # Tensors without elements, and without dims.
    scalar = DTensor.from_local(torch.tensor(float(rank)), transport, [Partial(), Partial()], run_check=False)
    assert shardweave.redistribute(scalar, [Replicate(), Replicate()]).to_local().item() == 6.0
    # The result survives many later calls, and its memory is reused once it is dropped.
    big = distribute_tensor(torch.arange(4096.0).view(64, 64), transport, [Shard(0), Shard(1)])
    first = shardweave.redistribute(big, [Shard(1), Shard(0)]).to_local()
    copy = first.clone()
    addresses = set()
    for _ in range(20):
        addresses.add(shardweave.redistribute(big, [Shard(1), Shard(0)]).to_local().data_ptr())
    assert torch.equal(first, copy)
    assert first.data_ptr() not in addresses and len(addresses) <= 3
    # A partial target, which torch refuses.
    p = shardweave.redistribute(big, [Partial(), Shard(1)])
    total = p.to_local().clone()
    dist.all_reduce(total, group=transport.get_group("a"))
    assert torch.equal(total, held_by(torch.arange(4096.0).view(64, 64), (Replicate(), Shard(1)), transport, {}))


def test_submeshes_strides_scalars_and_lifetimes() -> None:
    run_ranks(submeshes_and_oddities, 4)


def lazy_views(rank: int, transport: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.complex(torch.arange(30.0).view(6, 5), -torch.arange(30.0).view(6, 5))
    for lazy in (whole.conj(), whole.conj().imag):
        for source, target in (((Shard(0), Replicate()), (Replicate(), Shard(1))), ((Shard(1), Shard(0)),) * 2):
            local = held_by(lazy, source, mesh, {})
            assert local.is_conj() or local.is_neg()
            x = DTensor.from_local(local, mesh, source, run_check=False, shape=lazy.shape, stride=(5, 1))
            y = shardweave.redistribute(x, [Replicate(), Replicate()], transport=transport).redistribute(mesh, target)
            assert torch.equal(y.to_local(), held_by(lazy.resolve_conj().resolve_neg(), target, mesh, {}))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_conjugated_and_negated_views(transport: str) -> None:
    run_ranks(lazy_views, 4, transport)


def unequal_speeds(rank: int, transport: str) -> None:
    """Rows of a mesh redistribute independently, with redistributions over the whole mesh in between."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(30.0).view(6, 5)
    x = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    for _ in range(4):
        for _ in range(3 if rank < 2 else 70):
            y = shardweave.redistribute(x, [Replicate(), Replicate()], transport=transport)
            assert torch.equal(y.to_local(), whole)
        z = shardweave.redistribute(x, [Shard(1), Shard(0)], transport=transport)
        z = shardweave.redistribute(z, [Shard(0), Shard(1)], transport=transport)
        assert torch.equal(z.to_local(), held_by(whole, z.placements, mesh, {}))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_of_one_mesh_are_independent(transport: str) -> None:
    run_ranks(unequal_speeds, 4, transport)


def modes(rank: int, transport: str) -> None:
    """Inference mode, then training, then fake tensors."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(30.0).view(6, 5)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    for first, target in ((True, [Replicate(), Shard(1)]), (False, [Shard(1), Shard(1)])):
        for inference in (first, not first, first):
            with torch.inference_mode(inference):
                y = shardweave.redistribute(x, target, transport=transport).to_local()
                assert torch.equal(y, held_by(whole, target, mesh, {}))
        weight = torch.ones_like(y, requires_grad=True)
        y = shardweave.redistribute(x, target, transport=transport).to_local()
        (y * weight).sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad, y)
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="fake tensor mode"):
        shardweave.redistribute(x, [Replicate(), Replicate()], transport=transport)
    assert torch.equal(shardweave.redistribute(x, [Replicate(), Replicate()], transport=transport).to_local(), whole)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_inference_and_grad_modes(transport: str) -> None:
    run_ranks(modes, 4, transport)


def several_process_groups(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    kept, sockets = [], []
    for life in range(6):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(30000.0).view(60, 500) + life
        x = distribute_tensor(whole, mesh, [Shard(0)])
        for _ in range(3):
            y = shardweave.redistribute(x, [Replicate()])
            # Meshes of the same ranks are equal, but this one has the new process groups.
            assert y.device_mesh is mesh
            kept.append((y.to_local(), whole))
        assert list(shardweave.stats().transports) == [(0, 1)]
        del x, y, mesh
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"life {life}", store), rank=rank, world_size=2)
        gc.collect()
        sockets.append(sum("socket" in os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()))
    # Two more per process group if destroyed groups were kept; those of the last ones may close late.
    assert sockets[-1] - sockets[1] < 6, f"destroyed groups are kept alive: {sockets}"
    # These tensors still own the memory of destroyed groups.
    assert all(torch.equal(y, whole) for y, whole in kept)


def test_tensors_outlive_their_process_group() -> None:
    run_ranks(several_process_groups, 2)


def another_dtype_than_in_the_spec(rank: int, transport: str) -> None:
    """As FSDP2 makes DTensors of cast parameters that it reshards to fewer ranks after forward."""
    x = distribute_tensor(torch.arange(48.0).view(8, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    cast = DTensor(x._local_tensor.bfloat16(), x._spec, requires_grad=False)
    y = shardweave.redistribute(cast, [Replicate()], transport=transport)
    assert y.to_local().equal(torch.arange(48.0).view(8, 6).bfloat16())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_local_tensors_of_another_dtype_than_the_spec(transport: str) -> None:
    run_ranks(another_dtype_than_in_the_spec, 2, transport)


def layouts_in_other_forms(rank: int, transport: str) -> None:
    mesh, x = init_device_mesh("cpu", (2, 2)), whole_tensor((8, 6), torch.float32)
    source, on = make(x, mesh, (Shard(0), Shard(1)), {}), "float32[8, 6] on 2×2"
    forms = (
        ("S1 S0", (Shard(1), Shard(0)), None),
        ("R S0", (Replicate(), Shard(0)), None),
        ("S0 S0", (Shard(0), Shard(0)), None),
        ("S0 S0 @ 0:1,0", (Shard(0), Shard(0)), {0: (1, 0)}),
        ("(Shard(dim=1), Replicate())", (Shard(1), Replicate()), None),
    )
    for text, placements, order in forms:
        layout = shardweave.Layout.parse(text)
        want = shardweave.redistribute(source, placements, shard_order=order, transport=transport)
        for form in (text, layout, *([] if order else [layout.placements, list(placements)])):
            y = shardweave.redistribute(source, form, transport=transport, topology="nvlink")
            assert y._spec == want._spec and y.to_local().equal(want.to_local()), form
            shardweave.prepare_redistribute(source, form, transport=transport, topology="nvlink-infiniband")
            explained = shardweave.explain(source, form, transport=transport, topology="nvlink")
            assert explained.startswith(f"S0 S1 → {layout} ") and "topology given" in explained
    texts, placements = [text for text, *_ in forms], [want for _, want, order in forms if not order]
    with torch.no_grad():
        batch = shardweave.redistribute_batch([source] * 5, texts, transport=transport, topology="nvlink")
        for y, (_, want, order) in zip(batch, forms, strict=True):
            assert y.to_local().equal(held_by(x, want, mesh, order or {}))
        shardweave.redistribute_batch([source] * 3, ["S1 S0", "S1 S0", "R R"], transport=transport)
    counted = [text for text, _ in shardweave.stats().redistributions]
    assert f"a batch of 3 tensors: 2 times S0 S1 → S1 S0   {on}; S0 S1 → R R   {on}" in counted
    first = "; ".join(f"S0 S1 → {text}   {on}" for text in texts[:4])
    assert any(text.startswith(f"a batch of 5 tensors: {first}; 1 more, 0x") for text in counted)
    for form, text in (
        ("S1 S9", "placements: mesh dim 1 shards tensor dim 9, out of range; allowed: 0..1"),
        ("s1 R", "placements: unknown token 's1'; allowed: R, S<dim>"),
        ([Shard(0)], "placements: 1 given for a mesh of 2 dims"),
    ):
        for call in (shardweave.redistribute, shardweave.explain, shardweave.prepare_redistribute):
            with pytest.raises(ArgumentError) as raised:
                call(source, form, transport=transport)
            assert text in str(raised.value)
    with pytest.raises(ArgumentError, match="^shard_order: given together with the layout S0 S0"):
        shardweave.redistribute(source, "S0 S0", shard_order={0: (1, 0)})
    with pytest.raises(ArgumentError, match="^topology: 'nvlinks'; allowed: a Topology, or None, or a name"):
        shardweave.redistribute(source, "S1 S0", topology="nvlinks")  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", [*TRANSPORTS, "hierarchical"])
def test_layouts_as_text_and_topologies_by_name(transport: str) -> None:
    environment = {"SHARDWEAVE_NODE_SIZE": "2" if transport == "hierarchical" else ""}
    run_ranks(layouts_in_other_forms, 4, transport, environment=environment)


def wrong_under_install(rank: int) -> None:
    """The errors name the argument of `DTensor.redistribute`."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = make(whole_tensor((8, 6), torch.float32), mesh, (Replicate(), Shard(0)), {})
    with shardweave.installed():
        for placements, text in (
            ([Shard(0)], "placements: 1 given for a mesh of 2 dims; allowed: one per mesh dim"),
            ([Shard(0)] * 3, "placements: 3 given for a mesh of 2 dims; allowed: one per mesh dim"),
            ([Shard(2), Replicate()], "placements: mesh dim 0 shards tensor dim 2; allowed: -2..1"),
        ):
            for requires_grad in (False, True):
                with pytest.raises(ArgumentError) as raised:
                    x.detach().requires_grad_(requires_grad).redistribute(placements=placements)
                assert str(raised.value) == text
        assert x.redistribute(placements=[Replicate()] * 2).to_local().equal(whole_tensor((8, 6), torch.float32))


def test_wrong_placements_under_install() -> None:
    run_ranks(wrong_under_install, 4)
