"""Errors of functions without a process group, and of arguments of the wrong type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.errors import ArgumentError, ShardweaveError, UnsupportedError

SETTINGS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens": 8}
X = torch.ones(4, 2)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda mesh: shardweave.TokenDispatcher(**SETTINGS), "call init_process_group first, or use VirtualToken"),
        (
            lambda mesh: shardweave.TokenDispatcher(mesh, **SETTINGS),
            "TokenDispatcher: .* call init_process_group first",
        ),
        (lambda mesh: shardweave.prepare(mesh, 1 << 20), "prepare: .* call init_process_group first"),
        (lambda mesh: shardweave.redistribute(shard(mesh), [Replicate()]), "call init_process_group first"),
        (lambda mesh: shardweave.explain(shard(mesh), [Replicate()]), "call init_process_group first"),
        (lambda mesh: shardweave.prepare_redistribute(shard(mesh), [Replicate()]), "call init_process_group first"),
        (lambda mesh: shardweave.redistribute_batch([shard(mesh)], [[Replicate()]]), "call init_process_group first"),
        (lambda mesh: shardweave.moe.shard_tokens(X, mesh), "call init_process_group first"),
        (lambda mesh: shardweave.moe.gather_tokens(X, mesh, 4), "call init_process_group first"),
    ],
    ids=range(9),
)
def test_calls_without_a_process_group(call: Callable[[DeviceMesh], Any], text: str) -> None:
    assert not dist.is_initialized()
    with pytest.raises(UnsupportedError, match=text):
        call(DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",), _init_backend=False, _rank=0))


def shard(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(X, mesh, [Shard(0)], run_check=False)


def wrong_arguments(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    other = dist.new_group([1])
    calls: list[tuple[Callable[[], Any], str]] = [
        *((lambda m=m: shardweave.prepare(m, 10), "mesh: .*; allowed: a DeviceMesh") for m in (None, "mesh")),
        *(
            (
                lambda n=n: shardweave.prepare(mesh, n),
                r"max_bytes: .*; allowed: a number of bytes above 0, up to 2\*\*62",
            )
            for n in (True, 0, 2**70)
        ),
        *(
            (
                lambda n=n: shardweave.moe.gather_tokens(X, mesh, n),
                r"tokens: .*; allowed: a whole number from 0 to 2\*\*40",
            )
            for n in (-1, 4.0, 2**70)
        ),
        (lambda: shardweave.moe.gather_tokens(X, mesh, 11), "y: 4 rows; allowed: [56], this rank's share of 11 "),
        *(
            (lambda m=m: shardweave.moe.shard_tokens(X, m), "mesh: .*; allowed: a 1-D DeviceMesh")
            for m in (None, "tp", 2)
        ),
        *((lambda m=m: shardweave.moe.gather_tokens(X, m, 8), "mesh: .*; allowed: a 1-D") for m in (None, "tp", 2)),
        (lambda: shardweave.moe.shard_tokens([1], mesh), r"\[1\] instead of a tensor"),
        *(
            (lambda g=g: shardweave.TokenDispatcher(g, **SETTINGS), "group_or_mesh: .*; allowed: a process group")
            for g in ("ep", 5, [0, 1])
        ),
    ]
    if rank == 0:  # the value of new_group on a rank outside the group
        calls.append((lambda: shardweave.TokenDispatcher(other, **SETTINGS), "group_or_mesh: .*; allowed: a process g"))
    for number, (call, text) in enumerate(calls):
        with pytest.raises(ArgumentError, match=f"(?s){text}") as raised:
            call()
        assert len(str(raised.value)) < 500, number
    assert shardweave.moe.gather_tokens(X * rank, mesh, 8).sum() == 8


@pytest.mark.multi
def test_arguments_of_the_wrong_type() -> None:
    run_ranks(wrong_arguments, 2)
    assert issubclass(ArgumentError, ShardweaveError)
