"""Results of asynchronous calls, used by several threads at once, within their own wait, saved, and compiled."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_agreement import environment_of, outcome, sharded
from test_threads import in_threads
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.errors import TransportError

pytestmark = pytest.mark.multi

TRANSPORTS = ("shared_memory", "process_group", "hierarchical")
"""Those on which a call begins without its peers."""


def begun(x: DTensor) -> DTensor:
    return shardweave.redistribute(x, [Replicate()], async_op=True)


USES: tuple[Callable[[DTensor], torch.Tensor], ...] = (
    lambda y: y.to_local() + 0,
    lambda y: y._local_tensor.wait().clone(),
    lambda y: torch.cat([rows + 0 for rows in y.to_local().split(3)]),
    lambda y: torch.from_numpy(y.to_local().detach().numpy().copy()),
)


def used_while_a_peer_is_late(rank: int) -> list[str]:
    """All threads use a result, or a view whose DTensor is gone, before the last rank makes the call."""
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    mesh, other = DeviceMesh("cpu", list(range(size))), DeviceMesh("cpu", torch.arange(size).view(1, size))

    def to_columns(x: DTensor) -> DTensor:
        return shardweave.redistribute(x, [Shard(1)], async_op=True)

    def to_other_mesh(x: DTensor) -> DTensor:
        return shardweave.redistribute(x, [Replicate(), Shard(1)], device_mesh=other, async_op=True)

    def installed(x: DTensor) -> DTensor:
        with shardweave.installed():
            return x.redistribute(placements=[Shard(1)], async_op=True)

    results: list[str] = []
    for number, kind in enumerate((to_columns, to_other_mesh, installed)):
        for _ in range(4):  # from then on buffers are ready, and the only exchange is the first meeting
            (kind(sharded(mesh, 12, 8, torch.float32)[0]).to_local() + 0).sum()
        for views in (False, True):
            x, whole = sharded(mesh, 12, 8, torch.float32, add=number + 10 * views)
            want, key = whole.chunk(size, 1)[rank], f"used/{number}/{views}"
            if rank == size - 1:
                with suppress(dist.DistStoreError):  # a call that needs memory first begins together with its peers
                    store.wait([f"{key}/{r}/{i}" for r in range(size - 1) for i in range(len(USES))], timedelta(0, 0.5))
                time.sleep(0.02)
            y: Any = kind(x)
            assert isinstance(y._local_tensor, AsyncCollectiveTensor)
            uses: Any = USES
            if views:
                y, uses = y.to_local(), (lambda view: view + 0,) * len(USES)

            def use(i: int, y: Any = y, uses: Any = uses, want: torch.Tensor = want, key: str = key) -> str:
                store.set(f"{key}/{rank}/{i}", "")
                return outcome(lambda: uses[i](y).equal(want))

            results += in_threads(*[partial(use, i) for i in range(len(USES))])
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_wait_for_one_result(transport: str) -> None:
    ranks = 4 if transport == "hierarchical" else 2
    environment = environment_of(transport, SHARDWEAVE_TRANSPORT=transport)
    assert run_ranks(used_while_a_peer_is_late, ranks, environment=environment) == [["right"] * 6 * len(USES)] * ranks


def used_and_never_complete(rank: int, transport: str) -> list[str]:
    mesh = DeviceMesh("cpu", [0, 1])
    x, whole = sharded(mesh, 10, 6, torch.float32)
    for _ in range(4):
        begun(x).to_local().sum()
    if rank == 1:
        return []
    y = begun(x)
    use = partial(outcome, lambda: (y.to_local() + 0).equal(whole))
    return [*in_threads(*[use] * 3), use()]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_all_threads_get_the_error(transport: str) -> None:
    environment = {"SHARDWEAVE_TIMEOUT": "2", "SHARDWEAVE_TRANSPORT": transport}
    texts, _ = run_ranks(used_and_never_complete, 2, transport, environment=environment)
    assert len(texts) == 4 and all(text.startswith(("MeetingTimeoutError: ", "PeerError: ")) for text in texts), texts


def used_in_a_signal_handler(rank: int) -> list[str]:
    """A handler that interrupts the wait for a result cannot use it; the wait goes on."""
    store, mesh = dist.distributed_c10d._get_default_store(), DeviceMesh("cpu", [0, 1])
    x, whole = sharded(mesh, 10, 6, torch.float32)
    for _ in range(4):
        begun(x).to_local().sum()
    if rank == 1:
        store.wait(["handled"])
    y, texts = begun(x), []

    def handle(*_: object) -> None:
        try:
            texts.append(str((y.to_local() + 0).equal(whole)))
        except TransportError as error:
            texts.append(str(error))
        store.set("handled", "")

    if rank == 0:
        signal.signal(signal.SIGUSR1, handle)
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1])
        timer.start()
    return [str((y.to_local() + 0).equal(whole)), *texts]


def test_use_within_its_own_wait_is_refused() -> None:
    environment = environment_of("shared_memory", SHARDWEAVE_TRANSPORT="shared_memory")
    (whole, text), other = run_ranks(used_in_a_signal_handler, 2, environment=environment)
    assert whole == "True" and other == ["True"]
    assert "is used within the wait for it, on the same thread; allowed: after it has returned" in text


def saved(rank: int) -> None:
    x, whole = sharded(DeviceMesh("cpu", [0, 1]), 10, 6, torch.float32)
    for given in (begun(x)._local_tensor, begun(x).to_local()):
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is torch.Tensor and loaded.equal(whole)


def test_saved_result_is_complete() -> None:
    run_ranks(saved, 2)


def deeply_copied(rank: int) -> None:
    """As a plain tensor of its own memory; torch refuses what autograd has recorded, and still does."""
    x, whole = sharded(DeviceMesh("cpu", [0, 1]), 10, 6, torch.float32)
    y = begun(x)
    for given, copied in ((y, deepcopy(y)), (z := begun(x).to_local(), deepcopy(z))):
        local = copied.to_local() if isinstance(copied, DTensor) else copied
        given.zero_()
        assert type(local) is torch.Tensor and local.equal(whole)
    with pytest.raises(RuntimeError, match="created explicitly by the user"):
        deepcopy(begun(x.detach().requires_grad_()).to_local())


def test_copied_result_is_complete() -> None:
    run_ranks(deeply_copied, 2)


def compiled(rank: int) -> None:
    x, whole = sharded(DeviceMesh("cpu", [0, 1]), 10, 6, torch.float32)
    twice = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert twice(begun(x)._local_tensor).equal(2 * whole)


@pytest.mark.long
def test_compiled_function_waits() -> None:
    run_ranks(compiled, 2)
