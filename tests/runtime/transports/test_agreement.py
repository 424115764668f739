"""Ranks that make different calls: errors name the ranks and both calls, on every transport, and no output is wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, TransportError

pytestmark = pytest.mark.multi

TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")
TWO_SIDED = "process_group"


def environment_of(transport: str, **more: str) -> dict[str, str]:
    pretended = {"SHARDWEAVE_NODE_SIZE": "2"} if transport == "hierarchical" else {}
    return {"SHARDWEAVE_TIMEOUT": "40", **pretended, **more}


def sharded(
    mesh: DeviceMesh, rows: int, columns: int, dtype: torch.dtype, add: int = 0
) -> tuple[DTensor, torch.Tensor]:
    """A matrix sharded by rows along a 1-D mesh, and the whole matrix."""
    whole = (torch.arange(rows * columns).view(rows, columns) + add).to(dtype)
    coordinate = mesh.get_coordinate()
    chunks = whole.chunk(mesh.size())
    mine = chunks[coordinate[0]] if coordinate and coordinate[0] < len(chunks) else whole[:0]
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(mine.clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride), whole


def misfit(x: DTensor) -> DTensor:
    """A DTensor with the same spec and a local tensor that is too large."""
    local = torch.zeros(x._local_tensor.shape[0] + 1, x.shape[1], dtype=x.dtype)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def outcome(call: Callable[[], bool]) -> str:
    """The outcome of a call: "right", "wrong" or the name and text of its error."""
    try:
        return "right" if call() else "wrong"
    except (ArgumentError, TransportError) as error:
        return f"{type(error).__name__}: {error}"


def lives(function: Callable[..., list[str]], cases: list[tuple], rank: int) -> list[list[str]]:
    """`function(rank, *case)` for each case, each in a new process group."""
    store, result = dist.distributed_c10d._get_default_store(), []
    size = dist.get_world_size()
    for i, case in enumerate(cases):
        dist.destroy_process_group()
        prefixed = dist.PrefixStore(f"life/{i}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        result.append(function(rank, *case))
        # All ranks end before any continues, so that connections that close are those of this group.
        store.set(f"ended/{i}/{rank}", "")
        store.wait([f"ended/{i}/{other}" for other in range(size)])
    return result


def refuse_and_go_on(rank: int, transport: str, refusing: int, shape: tuple[int, int]) -> list[str]:
    """One rank refuses a call that all ranks have made before, catches the error, and continues."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    result = []
    for step in range(4):
        x, whole = sharded(mesh, *shape, torch.float32, add=100 * step)
        given = misfit(x) if rank == refusing and step == 1 else x

        def call(given: DTensor = given, whole: torch.Tensor = whole) -> bool:
            return shardweave.redistribute(given, [Replicate()], transport=transport).to_local().equal(whole)

        result.append(outcome(call))
    return result


@crossed(
    "ranks, transport", [2, 3, 5], TRANSPORTS,
    gate=lambda ranks, transport: ranks == 3 or ranks == 2 and transport == TWO_SIDED,
)  # fmt: skip
def test_redistribute_refused_by_one_rank(transport: str, ranks: int) -> None:
    cases = [(transport, refusing, shape) for refusing in (0, ranks - 1) for shape in ((8, 6), (7, 1))]
    by_rank = run_ranks(_lives_of_refusals, ranks, cases, environment=environment_of(transport))
    for i, (_, refusing, _) in enumerate(cases):
        outcomes = [result[i] for result in by_rank]
        # On symmetric memory ranks may be one call apart: a peer that refuses its next call ends this one too.
        ends = ("right", "DisagreementError: ", "PeerError: ") if transport == "symmetric_memory" else "right"
        assert outcomes[refusing][0] == "right" and all(s[0].startswith(ends) for s in outcomes), outcomes
        assert outcomes[refusing][1].startswith("ArgumentError: "), outcomes
        assert not any("wrong" in steps for steps in outcomes), outcomes
        others = [steps[1:] for rank, steps in enumerate(outcomes) if rank != refusing]
        assert any(step.startswith("DisagreementError: ") for steps in others for step in steps), outcomes
        named = [s for steps in others for s in steps if s.startswith("DisagreementError: ")]
        assert any(f"rank {refusing} refused its arguments in call 2" in text for text in named), outcomes
        # No rank takes data of the third call for the second: ranks that need the refusing rank raise from there on,
        # unless all have learned of it.
        assert all("Error: " in steps[0] for steps in others), outcomes
        if transport == "shared_memory":
            assert all(steps[2:] == ["right", "right"] for steps in outcomes), outcomes


def _lives_of_refusals(rank: int, cases: list[tuple]) -> list[list[str]]:
    return lives(refuse_and_go_on, cases, rank)


def all_refuse(rank: int, transport: str) -> list[str]:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    result = []
    for step in range(6):
        x, whole = sharded(mesh, 8, 6, torch.float32, add=step)
        given = misfit(x) if step in (0, 2, 3) else x
        result.append(outcome(lambda g=given, w=whole: _gathered(g, transport).equal(w)).split(":")[0])
    return result


def _gathered(x: DTensor, transport: str) -> torch.Tensor:
    return shardweave.redistribute(x, [Replicate()], transport=transport).to_local()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_redistribute_refused_by_all_ranks(transport: str) -> None:
    wrong = "ArgumentError"
    for outcomes in run_ranks(all_refuse, 3, transport, environment=environment_of(transport)):
        assert outcomes == [wrong, "right", wrong, wrong, "right", "right"]


def swapped(rank: int, transport: str, known: bool) -> list[str]:
    """Two requests of equal size, which one rank makes in a different order."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    requests = [sharded(mesh, 8, 6, torch.float32), sharded(mesh, 8, 6, torch.int32, add=1000)]
    result = []
    for step in range(2 if known else 1):
        if step == known and rank == 0:
            requests.reverse()
        for x, whole in requests:
            result.append(outcome(lambda x=x, w=whole: _gathered(x, transport).equal(w)))
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("known", [True, False])
def test_calls_in_different_order_raise_with_descriptions(transport: str, known: bool) -> None:
    for ranks in (2, 4):
        outcomes = run_ranks(swapped, ranks, transport, known, environment=environment_of(transport))
        assert not any("wrong" in steps for steps in outcomes), outcomes
        if known:
            assert all(steps[0] == "right" for steps in outcomes), outcomes
            # On symmetric memory ranks may be one call apart: a peer that fails in its next call ends this one too.
            ends = ("right", "PeerError: ") if transport == "symmetric_memory" else "right"
            assert all(steps[1].startswith(ends) for steps in outcomes), outcomes
        texts = [s for steps in outcomes for s in steps if s.startswith("DisagreementError: ")]
        assert texts, outcomes
        for text in texts:
            assert "float32[8, 6]" in text and "int32[8, 6]" in text, text
            assert f"call {3 if known else 1} of ranks {tuple(range(ranks))}: S0 → R " in text, text


def groups_in_another_order(rank: int, transport: str) -> list[str]:
    """A call of two ranks and a call of all ranks; rank 0 makes that of the two ranks first."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])]
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            assert _gathered(sharded(mesh, 6, 2, torch.float32)[0], transport) is not None
    result = []
    for mesh in meshes if rank == 0 else reversed(meshes):
        if mesh.get_coordinate() is not None:
            x, whole = sharded(mesh, 6, 2, torch.float32)
            result.append(outcome(lambda x=x, w=whole: _gathered(x, transport).equal(w)))
    return result


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "symmetric_memory"])
def test_calls_of_overlapping_groups_in_different_order(transport: str) -> None:
    start = time.monotonic()
    outcomes = run_ranks(groups_in_another_order, 3, transport, environment=environment_of(transport))
    assert not any("wrong" in steps for steps in outcomes), outcomes
    if transport != "symmetric_memory":  # where it is the device that waits
        assert any(s.startswith("DisagreementError: ") for steps in outcomes for s in steps), outcomes
        assert time.monotonic() - start < 35, outcomes


def overlapping_batch(rank: int, transport: str, ranks: int) -> bool:
    """As for two pipeline stages with a shared embedding: tensors on pairs of ranks, and one on the middle pair."""
    grid = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    middle, last = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [0, 3])
    for step in range(3):
        whole = torch.arange(48.0).view(8, 6) + step
        here = grid.get_coordinate()
        local = whole.chunk(2)[here[1]].clone() if here else whole[:0]
        a = DTensor.from_local(local, grid, [Replicate(), Shard(0)], run_check=False, shape=whole.shape, stride=(6, 1))
        b, of_b = sharded(middle, 5, 3, torch.int32, add=step)
        c, of_c = sharded(last, 4, 2, torch.float32, add=7 * step)
        targets = [[Replicate(), Replicate()], [Replicate()], [Shard(1)]]
        # Ranks from 4 on are in none of the meshes, and call as well.
        x, y, z = (t.to_local() for t in shardweave.redistribute_batch([a, b, c], targets, transport=transport))
        assert rank > 3 or x.equal(whole), (rank, x)
        assert rank not in (1, 2) or y.equal(of_b), (rank, y)
        if rank in (0, 3):
            assert z.equal(of_c[:, :1] if rank == 0 else of_c[:, 1:]), (rank, z)
        if rank > 3:
            assert x is not None and not x.numel() and not y.numel() and not z.numel()
    all_ranks, whole = sharded(DeviceMesh("cpu", list(range(ranks))), 10, 2, torch.float32)
    return _gathered(all_ranks, transport).equal(whole)


@crossed("ranks, transport", [4, 5, 6], TRANSPORTS, gate=lambda ranks, transport: ranks == 5)
def test_batch_of_overlapping_groups_with_bystanders(transport: str, ranks: int) -> None:
    assert all(run_ranks(overlapping_batch, ranks, transport, ranks, environment=environment_of(transport)))


def refuse_unplanned_and_go_on(rank: int, transport: str, refusing: Sequence[int], variant: str) -> list[str]:
    """Some ranks refuse a call before planning, when its participants are unknown, and continue."""
    all_ranks = DeviceMesh("cpu", list(range(dist.get_world_size())))
    pair = DeviceMesh("cpu", [0, 1])
    result = []
    for step in range(4):
        x, whole = sharded(all_ranks, 6, 5, torch.float32, add=100 * step)
        placements, more = [Replicate()], {}
        if rank in refusing and step == 1:
            placements, more = {
                "placements": ([Shard(7)], {}),
                "dtype": ([Replicate()], {"forward_dtype": "float16"}),
                "quantized": ([Replicate()], {"forward_dtype": torch.quint8}),
                "order": ([Replicate()], {"shard_order": {0: (0,)}}),
                "batch": ([Shard(7)], {}),
                "not a DTensor": ([Replicate()], {}),
            }[variant]
            if variant == "not a DTensor":
                x = x.to_local()

        def call(x: Any = x, placements: Any = placements, more: Any = more, whole: Any = whole) -> bool:
            if variant == "batch":
                return shardweave.redistribute_batch([x], [placements], transport=transport)[0].to_local().equal(whole)
            return shardweave.redistribute(x, placements, transport=transport, **more).to_local().equal(whole)

        result.append(outcome(call))
        if rank < 2 and all(each == "right" or each.startswith("ArgumentError") for each in result):
            y, all_of_it = sharded(pair, 3, 2, torch.int32, add=step)  # a group within the mesh
            result.append(outcome(lambda y=y, all_of_it=all_of_it: _gathered(y, transport).equal(all_of_it)))
    return result


@crossed(
    "variant, transport", ["placements", "dtype", "quantized", "order", "batch", "not a DTensor"], TRANSPORTS,
    gate=lambda variant, transport: variant in ("placements", "batch") or transport == TWO_SIDED,
)  # fmt: skip
def test_refusal_before_planning_by_one_rank(transport: str, variant: str) -> None:
    by_rank = run_ranks(refuse_unplanned_and_go_on, 3, transport, [0], variant, environment=environment_of(transport))
    for rank, outcomes in enumerate(by_rank):
        steps = [outcomes[i] for i in range(len(outcomes)) if rank == 2 or i % 2 == 0]
        assert steps[0] == "right" and "wrong" not in outcomes, by_rank
        if rank == 0:
            assert steps[1].startswith("ArgumentError"), by_rank
            assert "right" not in steps[2:], by_rank
        else:
            assert steps[1].startswith(("DisagreementError", "PeerError")), by_rank
    error_texts = "rank 0 refused its arguments in a call of ranks of (0, 1, 2)"
    assert any(error_texts in text for outcomes in by_rank[1:] for text in outcomes), by_rank


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_refusal_before_planning_by_all_ranks(transport: str) -> None:
    for variant in ("placements", "batch"):
        by_rank = run_ranks(
            refuse_unplanned_and_go_on, 3, transport, [0, 1, 2], variant, environment=environment_of(transport)
        )
        for outcomes in by_rank:
            assert [text[:13] for text in outcomes if text != "right"] == ["ArgumentError"], by_rank


def skewed(rank: int, transport: str) -> bool:
    """Rank 0 waits for rank 2, which is late, while rank 1 has finished this call and waits in the next one."""
    pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 2])]
    for step in range(3):
        if rank == 2 and step == 1:
            time.sleep(2.5)
        given = [sharded(mesh, 6, 2, torch.float32, add=step) for mesh in pairs]
        ys = shardweave.redistribute_batch([x for x, _ in given], [[Replicate()]] * 2, transport=transport)
        for y, (x, whole) in zip(ys, given, strict=True):
            assert x.device_mesh.get_coordinate() is None or y.to_local().equal(whole)
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_peer_in_later_call_is_no_disagreement(transport: str) -> None:
    assert all(run_ranks(skewed, 3, transport, environment=environment_of(transport)))


def dispatcher_refuses_while_pending(rank: int, transport: str) -> bool:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    d = shardweave.TokenDispatcher(
        None, num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype=torch.float32, transport=transport
    )
    ids = torch.tensor([[0, 3], [1, 2]])
    for step in range(3):
        x, whole = sharded(mesh, 8, 6, torch.float32, add=step)
        later = shardweave.redistribute(x, [Replicate()], async_op=True, transport=transport)
        with pytest.raises(ArgumentError, match="x: "):
            d.dispatch(torch.zeros(2, 7), ids, torch.ones(2, 2))
        routed = d.dispatch(torch.full((2, 8), 1.0 + rank), ids, torch.ones(2, 2))
        assert (d.combine(routed.x, routed) == 2 * (1.0 + rank)).all()
        assert later.to_local().equal(whole)
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dispatcher_refusal_with_pending_async_redistribution(transport: str) -> None:
    assert all(run_ranks(dispatcher_refuses_while_pending, 3, transport, environment=environment_of(transport)))


def set_up(rank: int, what: str) -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    x, whole = sharded(mesh, 8, 6, torch.float32)
    odd = rank == 1
    if what == "SHARDWEAVE_TRANSPORT":
        if odd:
            os.environ["SHARDWEAVE_TRANSPORT"] = "process_group"
        return outcome(lambda: _gathered(x, None).equal(whole))
    options: dict[str, Any] = {
        "topology": {"topology": shardweave.NVLINK_NODE if odd else None},
        "reduction": {"reduction": "fast" if odd else "ordered"},
        "costs": {"costs": odd},
        "install": {},
    }[what]
    if what == "install" and odd:
        return outcome(lambda: shardweave.redistribute(x, [Replicate()]).to_local().equal(whole))
    with shardweave.installed(**options):
        return outcome(lambda: x.redistribute(placements=[Replicate()]).to_local().equal(whole))


@pytest.mark.parametrize(
    ("what", "named", "values"),
    [
        ("SHARDWEAVE_TRANSPORT", "SHARDWEAVE_TRANSPORT: ", ("not set", "process_group")),
        ("topology", "install(topology=): ", ("none", "nvlink")),
        ("reduction", "install(reduction=): ", ("ordered", "fast")),
        ("costs", "install(costs=): ", ("off", "on")),
        ("install", "install(): ", ("called", "not called")),
    ],
)
def test_different_settings_raise_at_first_rendezvous(what: str, named: str, values: tuple[str, str]) -> None:
    for text in run_ranks(set_up, 2, what, environment=environment_of("shared_memory")):
        assert text.startswith("DisagreementError: " + named) and "rank 0" in text and "rank 1" in text, text
        assert all(value in text.lower() for value in values), text


def not_installed(rank: int, met: bool) -> list[str]:
    """Rank 1 has not called install(): torch executes its redistribution, and rank 0 waits. `met`: after a call."""
    from shardweave.runtime.transports.rendezvous import long_wait

    long_wait.WARN_AFTER = 1.0
    outcomes: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            outcomes.append(record.getMessage())

    logging.getLogger("shardweave").addHandler(Kept())
    mesh = DeviceMesh("cpu", [0, 1])
    x, _ = sharded(mesh, 8, 6, torch.float32)
    if met:
        shardweave.redistribute(x, [Shard(1)])
    with shardweave.installed() if rank == 0 and not met else contextlib.nullcontext():
        call = partial(shardweave.redistribute, x) if met else x.redistribute
        result = outcome(lambda: call(placements=[Replicate()]) is None) if rank == 0 else "stock"
        if rank == 1:
            time.sleep(5)
    return [result, *outcomes]


@pytest.mark.parametrize("met", [False, True])
def test_long_wait_warns_about_missing_install(met: bool) -> None:
    waiting, other = run_ranks(not_installed, 2, met, environment={"SHARDWEAVE_TIMEOUT": "4"})
    assert waiting[0].startswith("MeetingTimeoutError: rank 1 did not arrive within 4 s") and other == ["stock"]
    (outcomes,) = waiting[1:]
    assert "rank 0 has waited" in outcomes and "for ranks [1]" in outcomes and "shardweave.install()" in outcomes
    status = "has the same settings and waits nowhere" if met else "has not used shardweave in this process group"
    assert f"rank 1 {status}" in outcomes, outcomes


def die_first(rank: int, transport: str | None) -> None:
    if rank == 1:
        os._exit(3)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), _init_backend=False)
    shardweave.redistribute(sharded(mesh, 8, 6, torch.float32)[0], [Replicate()], transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_dead_before_first_rendezvous_is_named(transport: str) -> None:
    start = time.monotonic()
    ends = end_ranks(die_first, 3, transport, environment=environment_of(transport), timeout=60)
    assert time.monotonic() - start < 30  # not the timeout, 40 s
    others = [end for rank, end in enumerate(ends) if rank != 1]
    assert all(end.error in ("PeerError", "RuntimeError") for end in others), ends
    assert any("rank 1 is gone" in end.message for end in others), ends
