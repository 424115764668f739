"""The symmetric-memory transport on real processes: with reference kernels, with interpreted kernels, and on a GPU that
several processes share."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import test_redistribute
import test_redistribute_meshes
import torch
import torch.distributed as dist
from rank_processes import ONE_GPU, OWN_GPUS, interpreted, run_ranks
from test_redistribute import equal, held_by, orders_of, whole_tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from variants import crossed

import shardweave
from shardweave.errors import MeetingTimeoutError, TransportError, UnsupportedError
from shardweave.kernels.signal import wait_limit
from shardweave.runtime.transports.select import current_transports
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

pytestmark = pytest.mark.multi
DIRECTIONS = ["push", "pull"]
MESHES = {2: (2,), 3: (3,), 4: (2, 2)}
EACH_WITH_ONE_DIRECTION = crossed(
    "size, direction", list(MESHES), DIRECTIONS, gate=lambda size, direction: (size == 3) == (direction == "pull")
)
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "avg": lambda x: x.mean(0),
}


def transport_of(device: str, kind: type = SymmetricMemoryTransport) -> Any:
    """The transport of all ranks, which is of this class."""
    here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    transport, _ = current_transports().choose(
        tuple(range(torch.distributed.get_world_size())), here, "symmetric_memory"
    )
    assert type(transport) is kind
    return transport


def directed(rank: int, direction: str, function: Callable, *args: Any) -> Any:
    """`function(rank, "symmetric_memory", ...)` with steps that push, pull or select."""
    transport = transport_of("cpu")
    transport.windows.direction = direction  # type: ignore[assignment]
    value = function(rank, "symmetric_memory", *args)
    assert transport.error is None
    return value


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sampled_layout_pairs(direction: str) -> None:
    dtype = {"push": torch.bool, "pull": torch.float8_e4m3fn}[direction]
    run_ranks(directed, 4, direction, test_redistribute.every_sampled_pair, dtype, 0)


@pytest.mark.parametrize(
    ("function", "direction"),
    [
        pytest.param(function, direction, marks=() if direction in quick else pytest.mark.long)
        for function, quick in (
            (test_redistribute.partial_pairs, ["push"]),
            (test_redistribute.lazy_views, DIRECTIONS),
            (test_redistribute.unequal_speeds, ["push"]),
            (test_redistribute.modes, ["pull"]),
            (test_redistribute_meshes.to_other_meshes, ["pull"]),
        )
        for direction in DIRECTIONS
    ],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_common_cases_on_symmetric_memory(function: Callable, direction: str) -> None:
    run_ranks(directed, 4, direction, function)


def made(whole: torch.Tensor, mesh: DeviceMesh, placements, order, device: str) -> DTensor:
    local = held_by(whole, placements, mesh, order).contiguous().to(device)
    spelled = list(placements)
    if order:
        spelled[0] = _StridedShard(placements[0].dim, split_factor=mesh.size(1))
    return DTensor.from_local(local, mesh, spelled, run_check=False, shape=whole.shape, stride=whole.stride())


def random_requests(seed: int, mesh: tuple[int, ...], number: int) -> list[tuple]:
    """Sizes below the mesh size, zero, uneven and even; sources with partials."""
    generator = random.Random(seed)
    actual = []
    while len(actual) < number:
        shape = generator.choice([(7, 5), (1, 4), (2, 3), (8, 8), (5,), (9, 2, 3), (4, 0)])
        cuts = [Shard(d) for d in range(len(shape))]
        target = tuple(generator.choices([Replicate(), *cuts], k=len(mesh)))
        partial = Partial(generator.choice(list(OPS)))
        source = tuple(generator.choices([Replicate(), partial, *cuts], k=len(mesh)))
        source_order, target_order = generator.choice(orders_of(source)), generator.choice(orders_of(target))
        if source != target or source_order != target_order:
            actual.append((shape, source, source_order, target, target_order, generator.choice(list(DTYPES_OF))))
    return actual


DTYPES_OF = (torch.float32, torch.bfloat16, torch.float64)


def random_pairs(rank: int, device: str, direction: str, seed: int, number: int, other: str | None) -> int:
    """Exact values against the reduced and sliced whole; rounding sums bitwise against another transport."""
    transport = transport_of(device)
    transport.windows.direction = direction  # type: ignore[assignment]
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh(device, MESHES[size])
    kept = []
    for shape, source, source_order, target, target_order, dtype in random_requests(seed, MESHES[size], number):
        dims = [m for m, p in enumerate(source) if p.is_partial()]
        terms = [whole_tensor(shape, dtype) + 2 * i for i in range(math.prod(mesh.size(m) for m in dims))]
        coordinate, mine = mesh.get_coordinate(), 0
        for m in dims:
            mine = mine * mesh.size(m) + coordinate[m]
        x = made(terms[mine], mesh, source, source_order, device)
        y = shardweave.redistribute(x, target, shard_order=target_order or None, transport="symmetric_memory")
        op = source[dims[0]].reduce_op if dims else "sum"
        reduced = OPS[op](torch.stack(terms).double()).to(dtype)
        kept.append(
            (
                y.to_local(),
                held_by(reduced, target, mesh, target_order),
                (shape, source, source_order, target, target_order),
            )
        )
        if other is not None:
            generator = torch.Generator().manual_seed(rank)
            local = torch.randn(x.to_local().shape, generator=generator).to(dtype)
            r = DTensor.from_local(local, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
            results = [
                shardweave.redistribute(r, target, transport=name).to_local() for name in ("symmetric_memory", other)
            ]
            kept.append((*results, ("random numbers", shape, source, target)))
    # Checked at the end, to detect results that a later call overwrote.
    for got, want, what in kept:
        assert equal(got.cpu(), want), (what, got, want)
    assert transport.error is None
    return len(kept)


@EACH_WITH_ONE_DIRECTION
def test_random_pairs_equal_other_transport(size: int, direction: str) -> None:
    ends = run_ranks(random_pairs, size, "cpu", direction, size, 60, "shared_memory")
    assert ends == [120] * size


def many_rounds(rank: int, device: str, direction: str, rounds: int, kind: type = SymmetricMemoryTransport) -> None:
    """Repeated calls with new data, late ranks at random, and inputs that are overwritten after use."""
    transport_of(device, kind).windows.direction = direction
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh(device, (size,))
    generator = random.Random(rank)
    whole = torch.arange(63, dtype=torch.float32).view(7, 9)
    outs = []
    for n in range(rounds):
        x = made(whole + 100 * n, mesh, [Shard(0)], {}, device)
        p = DTensor.from_local((whole + n + rank).to(device), mesh, [Partial()], run_check=False)
        if generator.random() < 0.05:
            time.sleep(0.005)
        turned = shardweave.redistribute(x, [Shard(1)], transport="symmetric_memory")
        outs.append((turned, shardweave.redistribute(p, [Replicate()], transport="symmetric_memory")))
    for n, (turned, summed) in enumerate(outs):
        assert equal(turned.to_local().cpu(), held_by(whole + 100 * n, [Shard(1)], mesh, {}).contiguous()), n
        assert torch.equal(summed.to_local().cpu(), size * (whole + n) + sum(range(size))), n
    assert transport_of(device, kind).error is None


@EACH_WITH_ONE_DIRECTION
def test_consecutive_calls_are_independent(size: int, direction: str) -> None:
    run_ranks(many_rounds, size, "cpu", direction, 150)


def asynchronous(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(63.0).view(7, 9)
    x = made(whole, mesh, [Shard(0)], {}, "cpu")
    for turn in range(4):
        begun = [
            shardweave.redistribute(x, [p], async_op=True, transport="symmetric_memory")
            for p in (Shard(1), Replicate())
        ]
        assert all(isinstance(y._local_tensor, AsyncCollectiveTensor) for y in begun)
        for y in begun if turn % 2 else reversed(begun):
            assert equal(y.to_local(), held_by(whole, y.placements, mesh, {}))


def test_async_calls() -> None:
    run_ranks(asynchronous, 4)


def measured(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    shardweave.prepare(mesh, 1 << 16, transport="symmetric_memory")
    x = made(torch.arange(400.0).view(20, 20), mesh, [Shard(0), Shard(1)], {}, "cpu")
    text = shardweave.explain(x, [Shard(1), Shard(0)], transport="symmetric_memory")
    found = re.search(r"by pu..: windows of 400 B, 400 B for pu..; [\d.e+-]+ µs, [\d.e+-]+ for pu.., by measured", text)
    assert found, text
    return found[0]


def test_direction_follows_measured_rates() -> None:
    actual = run_ranks(measured, 4)
    assert len(set(actual)) == 1, actual


def prepared_in_between(rank: int) -> None:
    """Calls `prepare` in inference mode after an asynchronous call; all ranks bind their programs again."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(4, 6)
    x = made(whole, mesh, [Shard(0)], {}, "cpu")
    later = shardweave.redistribute(x, [Shard(1)], async_op=True, transport="symmetric_memory")
    with torch.inference_mode():
        shardweave.prepare(mesh, 1 << 12, transport="symmetric_memory")
    # The same request with other strides on one rank, which that rank has not bound yet.
    local = x.to_local() if rank else x.to_local().mT.contiguous().mT
    y = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
    for got in (later, shardweave.redistribute(y, [Shard(1)], transport="symmetric_memory")):
        assert equal(got.to_local(), held_by(whole, [Shard(1)], mesh, {}))


def test_prepare_after_bind_rebinds_on_all_ranks() -> None:
    run_ranks(prepared_in_between, 2)


def later_and_backward(rank: int, direction: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    transport_of("cpu").windows.direction = direction  # type: ignore[assignment]
    whole = torch.arange(63.0).view(7, 9)
    x = made(whole, mesh, (Shard(0), Shard(1)), {}, "cpu").requires_grad_()
    y = shardweave.redistribute(x, (Shard(1), Replicate()), async_op=True, transport="symmetric_memory")
    assert equal(y.detach().to_local(), held_by(whole, (Shard(1), Replicate()), mesh, {}))
    (y * y).sum().backward()
    assert x.grad is not None and equal(x.grad.to_local(), held_by(2 * whole, (Shard(0), Shard(1)), mesh, {}))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_async_calls_and_gradients(direction: str) -> None:
    run_ranks(later_and_backward, 4, direction)


def chosen(rank: int) -> str:
    mesh = init_device_mesh("cpu", (4,))
    gathered = made(torch.arange(48.0).view(8, 6), mesh, [Shard(0)], {}, "cpu")
    text = shardweave.explain(gathered, [Replicate()], transport="symmetric_memory")
    assert "by pull: windows of 48 B, 144 B for push" in text and "on transport symmetric_memory: requested" in text, (
        text
    )
    odd = made(torch.arange(40.0).view(8, 5), mesh, [Shard(0)], {}, "cpu")
    text = shardweave.explain(odd, [Replicate()], transport="symmetric_memory")
    assert "by push: windows of 144 B, not pulled from shards of which runs do not begin and end at mult" in text, text
    summed = DTensor.from_local(torch.ones(8, 5), mesh, [Partial()], run_check=False)
    text = shardweave.explain(summed, [Shard(0)], transport="symmetric_memory")
    assert "by push: windows of 144 B, 160 B for pull" in text, text
    return os.environ["SHARDWEAVE_TRANSPORT"]


def test_explain_shows_direction_and_reason() -> None:
    run_ranks(chosen, 4, environment={"SHARDWEAVE_TRANSPORT": "symmetric_memory"})


def stays_away(rank: int, direction: str, number: int) -> list[str]:
    """Rank 1 stops making calls; returns the errors of the others, raised twice. Outputs, of a batch of `number`
    tensors, are poisoned."""
    mesh, store = init_device_mesh("cpu", (3,)), dist.distributed_c10d._get_default_store()
    transport = transport_of("cpu")
    transport.windows.direction = direction  # type: ignore[assignment]
    given = [made(torch.arange(12.0) + i, mesh, [Shard(0)], {}, "cpu") for i in range(number)]

    def call() -> None:
        shardweave.redistribute_batch(given, [[Replicate()]] * number, transport="symmetric_memory")

    for _ in range(3):
        call()
    if rank == 1:
        store.wait(["told/0", "told/2"], timedelta(seconds=60))
        return []
    outputs, empty = [], transport.empty

    def recorded(*args: Any) -> torch.Tensor:
        outputs.append(empty(*args))
        return outputs[-1]

    transport.empty = recorded  # type: ignore[method-assign]
    texts = []
    for _ in range(2):
        with pytest.raises(TransportError) as errors:
            call()
        texts.append(f"{errors.type.__name__}: {errors.value}")
    store.set(f"told/{rank}", "")
    assert len(outputs) == number and all(out.isnan().all() for out in outputs)
    return texts


@pytest.mark.parametrize(
    ("direction", "number"), [("push", 1), ("push", 3), pytest.param("pull", 1, marks=pytest.mark.long)]
)
def test_missing_rank_is_named_and_invalidates_transport(direction: str, number: int) -> None:
    ends = run_ranks(stays_away, 3, direction, number, environment={"SHARDWEAVE_TIMEOUT": "1"})
    for rank in (0, 2):
        first, second = ends[rank]
        assert second.startswith(first) and f"rank {rank} was waiting" in first and "of ranks (0, 1, 2)" in first
        # Rank 2 may be notified by rank 0 before its own wait times out, or vice versa.
        assert "MeetingTimeoutError: rank 1 did not arrive within 1 s" in first or "PeerError: rank" in first
    assert any(text.startswith("MeetingTimeoutError: rank 1") for text in (ends[0][0], ends[2][0]))


def no_windows_on_meta(rank: int) -> None:
    with pytest.raises(
        UnsupportedError, match="transport: symmetric_memory cannot carry ranks .* allowed: process_group"
    ):
        current_transports().choose((0, 1), torch.device("meta"), "symmetric_memory")


def test_unsupported_device_raises() -> None:
    run_ranks(no_windows_on_meta, 2)


def in_the_interpreter(rank: int, direction: str, size: int) -> int:
    from shardweave import kernels
    from shardweave.kernels.signal import signal_kernel

    assert kernels.interpreted(signal_kernel)
    many_rounds(rank, "cpu", direction, 6)
    return random_pairs(rank, "cpu", direction, size, 12, None)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_kernels_in_interpreter(size: int) -> None:
    runs = f"t.run_ranks(t.in_the_interpreter, {size}, d, {size}) for d in t.DIRECTIONS"
    assert interpreted("test_symmetric", f"*[{runs}]") == " ".join([str([12] * size)] * 2)


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", MESHES)
def test_random_pairs_of_processes_on_one_gpu(gpu: None, size: int, direction: str) -> None:
    ends = run_ranks(random_pairs, size, "cuda", direction, size, 20, None, environment=ONE_GPU, timeout=300)
    assert ends == [20] * size


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_two_hundred_calls_of_processes_on_one_gpu(gpu: None, size: int, direction: str) -> None:
    run_ranks(many_rounds, size, "cuda", direction, 200, environment=ONE_GPU, timeout=300)


def replayed(rank: int, direction: str) -> None:
    """Graphs of one, two and three redistributions, each captured as the very first calls of their request, replayed
    with other data, with calls in between; and a call behind work that the device has not done."""
    size = torch.distributed.get_world_size()
    transport_of("cuda").windows.direction = direction  # type: ignore[assignment]
    mesh = init_device_mesh("cuda", (size,))
    shardweave.prepare(mesh, 1 << 16, transport="symmetric_memory")

    def carry(y: DTensor, number: int) -> list[torch.Tensor]:
        return [shardweave.redistribute(y, [Shard(1)], transport="symmetric_memory").to_local() for _ in range(number)]

    for uses in (1, 2, 3):
        whole = torch.arange(63.0 + 9 * uses).view(-1, 9)
        x = made(whole, mesh, [Shard(0)], {}, "cuda")
        local = x.to_local()
        shardweave.prepare_redistribute(x, [Shard(1)], transport="symmetric_memory")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = carry(x, uses)
        for n in range(1, 6):
            now = whole + 100 * n
            local.copy_(held_by(now, [Shard(0)], mesh, {}).to("cuda"))
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            want = held_by(now, [Shard(1)], mesh, {})
            assert all(torch.equal(out.cpu(), want) for out in outs), (uses, n)
            if n % 3 == 0:
                assert torch.equal(carry(x, 1)[0].cpu(), want), (uses, n)
    calls_while_the_device_is_busy(mesh)
    assert transport_of("cuda").error is None


def calls_while_the_device_is_busy(mesh: DeviceMesh) -> None:
    whole = torch.arange(7.0 * 9).view(7, 9)
    x = made(whole, mesh, [Shard(0)], {}, "cuda")
    p = DTensor.from_local(whole.to("cuda"), mesh, [Partial()], run_check=False)
    given = [(x, Shard(1), whole), (x, Replicate(), whole), (p, Replicate(), whole * mesh.size())]

    def call() -> list[DTensor]:
        return [shardweave.redistribute(y, [target], transport="symmetric_memory") for y, target, _ in given]

    call()  # the allocator's first blocks of these sizes, and what is bound without `prepare_redistribute`
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(int(4e8))  # some 200 ms
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = call()
        pending = not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending, "a call waited for the device"
    for y, (_, target, want) in zip(outs, given, strict=True):
        assert torch.equal(y.to_local().cpu(), held_by(want, [target], mesh, {}))


def on_several_streams(rank: int) -> None:
    """Inputs are written, calls made and results used on streams that have nothing else to wait for each other."""
    mesh = init_device_mesh("cuda", (2,))
    whole, outs = torch.arange(63.0).view(7, 9), []
    x = made(whole, mesh, [Shard(0)], {}, "cuda").to_local()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for n in range(20):
        with torch.cuda.stream(streams[n % 2]):
            torch.cuda._sleep(int(1e6))
            given = DTensor.from_local(x + n, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(9, 1))
            y = shardweave.redistribute(given, [Replicate()], async_op=n % 3 == 0, transport="symmetric_memory")
        if n % 3:
            streams[n // 2 % 2].wait_stream(streams[n % 2])
        with torch.cuda.stream(streams[n // 2 % 2]):  # an asynchronous result waits itself
            outs.append((y, y.to_local() + 0))  # whose memory is not used again meanwhile
    torch.cuda.synchronize()
    assert all(out.cpu().equal(whole + n) for n, (_, out) in enumerate(outs))


@pytest.mark.gpu
def test_calls_on_several_streams(gpu: None) -> None:
    run_ranks(on_several_streams, 2, environment=ONE_GPU, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_captured_first_calls_do_not_sync(gpu: None, size: int, direction: str) -> None:
    run_ranks(replayed, size, direction, environment=ONE_GPU, timeout=300)


def never_comes_to_the_gpu(rank: int) -> str:
    mesh = init_device_mesh("cuda", (2,))
    x = made(torch.arange(12.0), mesh, [Shard(0)], {}, "cuda")
    y = made(torch.arange(12), mesh, [Shard(0)], {}, "cuda")
    for _ in range(3):
        shardweave.redistribute(x, [Replicate()], transport="symmetric_memory")
        shardweave.redistribute(y, [Replicate()], transport="symmetric_memory")
    torch.cuda.synchronize()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 was told"], timedelta(seconds=100))
        return ""
    transport_of("cuda").wait_limit = wait_limit(0.2, torch.device("cuda"))  # both have come until here
    out = shardweave.redistribute(x, [Replicate()], transport="symmetric_memory").to_local()
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(MeetingTimeoutError) as errors:
        shardweave.redistribute(y, [Replicate()], transport="symmetric_memory")
    store.set("rank 0 was told", "")
    return str(errors.value)


@pytest.mark.gpu
def test_missing_rank_on_gpu_is_named(gpu: None) -> None:
    environment = {**ONE_GPU, "SHARDWEAVE_TIMEOUT": "3"}
    first, _ = run_ranks(never_comes_to_the_gpu, 2, environment=environment, timeout=120)
    assert "rank 1 did not arrive within 3 s; rank 0 was waiting for it" in first


@pytest.mark.multigpu
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_gpu_per_rank(direction: str) -> None:
    size = min(torch.cuda.device_count(), 4)
    if size < 2:
        pytest.skip(f"{size} GPUs; 2 are needed")
    size = 2 if size == 3 else size
    run_ranks(random_pairs, size, "cuda", direction, size, 20, None, environment=OWN_GPUS, timeout=300)
    run_ranks(many_rounds, size, "cuda", direction, 200, environment=OWN_GPUS, timeout=300)


def with_another_device_current(rank: int) -> None:
    mesh, whole = init_device_mesh("cuda", (2,)), torch.arange(63.0).view(7, 9)
    own, other = torch.cuda.current_device(), (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    x = made(whole, mesh, [Shard(0)], {}, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.device(other):
        for transport in ("symmetric_memory", "process_group"):
            ys = [shardweave.redistribute(x, [Shard(1)], transport=transport)]
            ys += shardweave.redistribute_batch([x, x], [[Shard(1)]] * 2, transport=transport)
            for y in ys:
                assert y.to_local().device.index == own
                assert y.to_local().cpu().equal(held_by(whole, [Shard(1)], mesh, {}))
        assert torch.cuda.current_device() == other


@pytest.mark.multigpu
def test_calls_while_another_device_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPUs; 2 are needed")
    run_ranks(with_another_device_current, 2, environment=OWN_GPUS, timeout=300)
