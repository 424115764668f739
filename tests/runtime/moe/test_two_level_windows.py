"""Dispatch and combine on two levels with windows inside nodes: messages between nodes, none inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import test_payloads
import test_quantized_output
import torch
from dispatcher_settings import with_options
from rank_processes import OWN_GPUS, end_ranks, interpreted, run_ranks
from test_processes import SETTINGS, given, leaf, rounds_of, virtual_rounds
from test_windows import LONG_PARTS, Listed, digest, random_settings, results_of

import shardweave
from shardweave import kernels
from shardweave.kernels.signal import signal_kernel
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports.machines import Machines
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

pytestmark = pytest.mark.multi
FIXED = {"two_level": True, "chunk_capacity": 1 << 20}
SEVERAL = [{}, {"save": "copy"}, {"save": "redispatch", "zero_rows": True}, {"pooled_buffers": 0}]


def new_dispatcher(**more: Any) -> TokenDispatcher:
    d = TokenDispatcher(**with_options(**{**SETTINGS, **FIXED, **more}, transport="symmetric_memory"))
    assert "inside a node rows are pushed into pooled buffers or windows; no host read" in d.explain()
    return d


def on_nodes(nodes: Sequence[int]) -> None:
    """Pretend that the ranks are on these nodes; memory of the transport is poisoned."""
    Machines._parsed_node = lambda self, rank, text: ("here", nodes[rank])  # type: ignore[method-assign]

    def empty(self: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else -7
        return torch.full(tuple(shape), value, dtype=dtype, device=device)

    SymmetricMemoryTransport.empty = empty  # type: ignore[method-assign]


def rounds_in_windows(rank: int, several: list[dict]) -> list[list[bytes]]:
    return [rounds_of(rank, "symmetric_memory", **FIXED, **more) for more in several]


@pytest.mark.parametrize("size, node_size", [(4, 2), (3, 2), pytest.param(7, 3, marks=pytest.mark.long)])
def test_processes_equal_virtual_ranks(size: int, node_size: int) -> None:
    """A rank that has a node to itself as well."""
    found = run_ranks(rounds_in_windows, size, SEVERAL, environment={"SHARDWEAVE_NODE_SIZE": str(node_size)})
    want = virtual_rounds(size, nodes=[rank // node_size for rank in range(size)])
    for rank, of_settings in enumerate(found):
        for more, bits in zip(SEVERAL, of_settings, strict=True):
            assert bits == want[rank], (rank, more)


def in_the_interpreter(rank: int) -> str:
    assert kernels.interpreted(signal_kernel)
    collected = digest(rounds_of(rank, "symmetric_memory", rounds=1, **FIXED))
    layer_without_reads(rank)
    return collected


def layer_without_reads(rank: int) -> None:
    """A layer and its backward read nothing of a device."""
    d, t = new_dispatcher(), given(rank, 1)
    x, weights = leaf(t.x), leaf(t.weights)
    before = stats().host_reads.total()
    routed = d.dispatch(x, t.ids, weights)
    d.combine(routed.x * 2, routed, add=x).backward(t.gradient)
    assert stats().host_reads.total() == before


def test_interpreted_kernels_equal_virtual_ranks() -> None:
    virtual = "[t.digest(r) for r in t.virtual_rounds(4, rounds=1, nodes=[0, 0, 1, 1])]"
    environment = {"SHARDWEAVE_NODE_SIZE": "2"}
    expression = f"t.run_ranks(t.in_the_interpreter, 4, environment={environment}) == {virtual}"
    assert interpreted("test_two_level_windows", expression) == "True"


ODD: dict[str, dict[str, Any]] = {
    "rows": {"capacity": 9, "overflow": "drop"},
    "groups": {"layout": "batched", "expert_capacity": 4, "overflow": "drop", "pooled_buffers": 2},
    "chunks": {"chunk_capacity": 3, "overflow": "drop", "save": "redispatch"},
    "no room": {"chunk_capacity": 0, "overflow": "drop"},
    "replicas": {"expert_map": [[0, 1, 2], [], [4, 0], [3, 4, 1]], "save": "copy"},
    "odd rows": {"dtype": torch.float32, "hidden": 7, "align": 8, "zero_rows": True},
    "one": {"dtype": torch.float16, "hidden": 1, "top_k": 1},
    "nothing": {"max_tokens": 0, "dtype": torch.float32},
}  # fmt: skip


def in_windows(rank: int, nodes: Sequence[int], several: Sequence[dict[str, Any]]) -> list[Any]:
    on_nodes(nodes)
    return results_of(lambda **more: Listed(new_dispatcher(**more)), several, [rank])[0]


def on_one_level(nodes: Sequence[int], several: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Rows beyond a chunk are dropped there as well."""
    make = partial(shardweave.moe.VirtualTokenDispatcher, len(nodes), one_sided=False, nodes=nodes)
    fixed = {**FIXED, "two_level": False}
    return results_of(lambda **more: make(**with_options(**{**SETTINGS, **fixed, **more})), several, range(len(nodes)))


@pytest.mark.parametrize(
    "nodes, names",
    [
        ([0, 1, 1, 0], ("groups", "chunks", "replicas")),
        pytest.param([0, 1, 0, 0], tuple(ODD), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_unusual_settings_equal_virtual_ranks(nodes: list[int], names: tuple[str, ...]) -> None:
    several = [ODD[name] for name in names]
    assert run_ranks(in_windows, len(nodes), nodes, several) == on_one_level(nodes, several)


@pytest.mark.long
def test_unusual_settings_by_interpreted_kernels() -> None:
    given_here = "[0, 1, 1, 0], [*t.ODD.values()][1::2]"
    expression = f"t.run_ranks(t.in_windows, 4, {given_here}) == t.on_one_level({given_here})"
    assert interpreted("test_two_level_windows", expression) == "True"


@pytest.mark.long
@pytest.mark.parametrize("nodes", [[0, 1, 0, 1, 0], [0, 1, 1, 2, 1], [0, 0, 1, 1, 2, 2]], ids=str)
def test_random_settings_equal_virtual_ranks(nodes: list[int]) -> None:
    several = [random_settings(100 * len(nodes) + seed, len(nodes)) for seed in range(LONG_PARTS // 2)]
    found, want = run_ranks(in_windows, len(nodes), nodes, several), on_one_level(nodes, several)
    for rank in range(len(nodes)):
        for i, (got, wanted) in enumerate(zip(found[rank], want[rank], strict=True)):
            assert got == wanted, (rank, several[i // 3])


def packed_rows(rank: int, nodes: Sequence[int]) -> list[list[bytes]]:
    on_nodes(nodes)
    test_payloads.forwarded(rank, "symmetric_memory", {"payloads": test_payloads.FP4, **FIXED})
    d = TokenDispatcher(
        **with_options(**test_payloads.SETTINGS, **FIXED, quantize="fp8_128", transport="symmetric_memory")
    )
    quantized = test_payloads.results_of(*test_payloads.one_round(d, [rank]))
    more = {**FIXED, "pooled_buffers": 3}
    return [quantized, test_quantized_output.rounds_of(rank, "symmetric_memory", "mxfp8", more)]


def virtual_packed_rows(nodes: Sequence[int]) -> list[list[list[bytes]]]:
    more = {**FIXED, "one_sided": False, "nodes": nodes}
    d = shardweave.moe.VirtualTokenDispatcher(3, **with_options(**test_payloads.SETTINGS, quantize="fp8_128", **more))
    of_all = test_payloads.one_round(d, range(3))
    quantized = [test_payloads.results_of(*[part[r : r + 1] for part in of_all]) for r in range(3)]
    return [list(of_rank) for of_rank in zip(quantized, test_quantized_output.wanted("mxfp8", **more), strict=True)]


def test_payloads_and_quantized_rows_equal_virtual_ranks() -> None:
    assert run_ranks(packed_rows, 3, [0, 1, 0]) == virtual_packed_rows([0, 1, 0])


def never_combines(rank: int) -> bool:
    d, t = new_dispatcher(), given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    out = torch.zeros_like(t.x)
    if rank != 1:
        d.combine(routed.x, routed, out=out)
    return bool(out.isnan().any()) or not len(out)


def test_missing_rank_is_noticed_on_all_nodes() -> None:
    """By an error, or by sums that are NaN on another node, whose ranks may hear of the error in their next call.

    A rank without tokens has no sums.
    """
    ends = end_ranks(never_combines, 4, environment={"SHARDWEAVE_NODE_SIZE": "2", "SHARDWEAVE_TIMEOUT": "6"})
    assert [end.error is not None or end.value for end in ends] == [rank != 1 for rank in range(4)], ends
    assert ends[0].error is not None
    assert all(end.error in (None, "MeetingTimeoutError", "PeerError") for end in ends), ends


def refuses(rank: int) -> str:
    d, t = new_dispatcher(), given(rank, 1)
    d.dispatch(t.x, t.ids, t.weights)
    d.dispatch(t.x[:, :8] if rank == 1 else t.x, t.ids, t.weights)
    return "not refused"


def disagrees(rank: int) -> str:
    first, second, t = new_dispatcher(), new_dispatcher(), given(rank, 1)
    (second if rank == 1 else first).dispatch(t.x, t.ids, t.weights)
    return "not noticed"


@pytest.mark.parametrize("function, error", [(refuses, "ArgumentError"), (disagrees, "DisagreementError")])
def test_wrong_call_of_a_rank_raises_on_all_nodes(function: Callable[[int], str], error: str) -> None:
    ends = end_ranks(function, 4, environment={"SHARDWEAVE_NODE_SIZE": "2", "SHARDWEAVE_TIMEOUT": "20"})
    errors = [end.error for end in ends]
    assert error in errors[:2] and set(errors) <= {error, "DisagreementError", "PeerError"}, ends
    assert errors[1] == error or function is disagrees, ends[1]


def on_a_gpu(rank: int) -> str:
    new_dispatcher(device="cuda")
    return digest(rounds_of(rank, "symmetric_memory", device="cuda", **FIXED))


@pytest.mark.multigpu
def test_gpus_of_two_nodes_equal_virtual_ranks() -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip(f"{torch.cuda.device_count()} GPUs; 4 are needed")
    found = run_ranks(on_a_gpu, 4, environment={"SHARDWEAVE_NODE_SIZE": "2", **OWN_GPUS}, timeout=300)
    # On the same device: torch sums in other orders on CPUs.
    assert found == [digest(rounds) for rounds in virtual_rounds(4, device="cuda", nodes=[0, 0, 1, 1])]
