"""A redistribution that one rank refuses and of which all ranks learn: none makes it, and the next ones work."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.errors import ArgumentError, DisagreementError, TransportError

pytestmark = pytest.mark.multi

CALLS = 50


def sharded(mesh: DeviceMesh, rows: int, columns: int, call: int, misfit: bool) -> tuple[DTensor, torch.Tensor]:
    """A matrix sharded by rows, with a local tensor that is too large if `misfit`, and the whole matrix."""
    whole = torch.arange(float(rows * columns)).view(rows, columns) + 1000 * call
    local = whole.chunk(mesh.size())[mesh.get_local_rank()].clone()
    if misfit:
        local = torch.zeros(len(local) + 1, columns)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()), whole


def kind_of(error: Exception) -> str:
    assert isinstance(error, ArgumentError) or isinstance(error, DisagreementError) and error.recoverable, error
    if isinstance(error, DisagreementError):
        assert "refused its arguments" in str(error) and "the next one works" in str(error), error
    return type(error).__name__


def many_calls(rank: int, transport: str, seed: int) -> None:
    """Calls of several requests in one order, some asynchronous, some refused by one rank or two, with ranks that are
    late. Repeated small requests push before their only barrier, so that a refusal ends them there."""
    ranks = dist.get_world_size()
    mesh, choose = DeviceMesh("cpu", list(range(ranks))), random.Random(seed)
    pending: list[tuple[Any, torch.Tensor, set[int]]] = []
    refused = 0

    def check(outcome: Any, whole: torch.Tensor, refusing: set[int], call: int) -> None:
        wanted = "right" if not refusing else "ArgumentError" if rank in refusing else "DisagreementError"
        try:
            outcome = outcome() if callable(outcome) else outcome
            assert outcome.to_local().add(0).equal(whole), (rank, call)
            outcome = "right"
        except (ArgumentError, DisagreementError) as error:
            outcome = kind_of(error)
        assert outcome == wanted, (rank, call, outcome, wanted)

    for call in range(CALLS):
        refusing = set(choose.sample(range(ranks), choose.choice((1, 1, 2)))) if choose.random() < 0.3 else set()
        refused += len(refusing) > 0
        rows, columns = choose.choice(((2 * ranks, 3), (4 * ranks, 5), (64 * ranks, 1500)))
        is_async, late = choose.random() < 0.4, choose.random() < 0.2
        x, whole = sharded(mesh, rows, columns, call, rank in refusing)
        if late and rank == call % ranks:
            time.sleep(0.15)  # peers look into the store meanwhile

        def redistribute(x: DTensor = x, is_async: bool = is_async) -> DTensor:
            return shardweave.redistribute(x, [Replicate()], async_op=is_async, transport=transport)

        if not is_async:
            check(redistribute, whole, refusing, call)
            continue
        try:
            pending.append((redistribute(), whole, refusing))
        except (ArgumentError, DisagreementError) as error:
            kind = "ArgumentError" if rank in refusing else "DisagreementError"
            assert kind_of(error) == kind and refusing, (rank, call, error)
        if len(pending) > 2:
            for given in pending:
                check(*given, call)
            pending.clear()
    for given in pending:
        check(*given, CALLS)
    assert refused > CALLS // 8


@pytest.mark.parametrize(("ranks", "transport"), [(2, "hierarchical"), (3, "shared_memory")])
def test_calls_after_refusals_are_right(ranks: int, transport: str) -> None:
    environment = {"SHARDWEAVE_TIMEOUT": "40", "SHARDWEAVE_NODE_SIZE": "2" if transport == "hierarchical" else ""}
    run_ranks(many_calls, ranks, transport, ranks, environment=environment)


def refused_first(rank: int, refusing: int, transport: str) -> list[str]:
    """The first call of all is refused, by a rank that is early or late; then a call of two ranks, and a batch."""
    mesh, outcomes = DeviceMesh("cpu", [0, 1, 2]), []
    pair = DeviceMesh("cpu", [0, 1])
    if rank == (refusing + 1) % 3:
        time.sleep(0.3)
    for call in range(6):
        refuses = rank == refusing and call in (0, 3)
        x, whole = sharded(mesh, 6, 4, call, refuses)
        try:
            if call == 3:
                (y,) = shardweave.redistribute_batch([x], [[Replicate()]], transport=transport)
            else:
                y = shardweave.redistribute(x, [Replicate()], transport=transport)
            outcomes.append("right" if y.to_local().equal(whole) else "wrong")
        except (ArgumentError, DisagreementError) as error:
            outcomes.append(kind_of(error))
        if rank < 2:
            x, whole = sharded(pair, 4, 3, call, False)
            assert shardweave.redistribute(x, [Replicate()], transport=transport).to_local().equal(whole)
    return outcomes


@pytest.mark.parametrize("refusing", [0, 2])
def test_refusal_of_the_first_call(refusing: int) -> None:
    for rank, outcomes in enumerate(run_ranks(refused_first, 3, refusing, "shared_memory")):
        refused = "ArgumentError" if rank == refusing else "DisagreementError"
        assert outcomes == [refused, "right", "right", refused, "right", "right"], (rank, outcomes)


def refused_between_meshes(rank: int) -> list[str]:
    """Ranks have different peers: ranks 1 and 3 do not meet rank 0, which refuses."""
    source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    whole, outcomes = torch.arange(32.0).view(8, 4), []
    for call in range(3):
        local = whole.chunk(2)[rank].clone() if rank < 2 else whole[:0]
        if rank == 0 and call == 1:
            local = torch.zeros(3, 4)
        x = DTensor.from_local(local, source, [Shard(0)], run_check=False, shape=(8, 4), stride=(4, 1))
        try:
            y = shardweave.redistribute(x, [Shard(0)], device_mesh=target, transport="shared_memory")
            outcomes.append("right" if rank < 2 or y.to_local().equal(whole.chunk(2)[rank - 2]) else "wrong")
        except (ArgumentError, TransportError) as error:
            assert not getattr(error, "recoverable", False)
            outcomes.append(type(error).__name__)
    return outcomes


def test_refusal_that_not_all_ranks_learn_of() -> None:
    outcomes = run_ranks(refused_between_meshes, 4, environment={"SHARDWEAVE_TIMEOUT": "20"})
    assert outcomes[0][:2] == ["right", "ArgumentError"] and outcomes[2][:2] == ["right", "DisagreementError"], outcomes
    assert "wrong" not in sum(outcomes, []) and outcomes[2][2] == "DisagreementError", outcomes
