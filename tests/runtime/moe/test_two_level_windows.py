"""Dispatch and combine on two levels with windows inside nodes: messages between nodes, none inside them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import test_no_sync
import test_payloads
import test_quantized_output
import test_windows
import torch
from rank_processes import OWN_GPUS, end_ranks, interpreted, run_ranks
from sync_guard import SyncGuard, on_the_host
from test_phases import phased_rounds
from test_processes import SETTINGS, E, given, leaf, raw, rounds_of, virtual_rounds
from test_windows import digest, odd_tokens, trained

import shardweave
from shardweave import kernels
from shardweave.kernels.signal import signal_kernel
from shardweave.runtime.moe import dispatcher
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.report import on_wire
from shardweave.runtime.moe.transfer import two_level
from shardweave.runtime.moe.transfer.two_level_fixed import TwoLevelFixedTransfer
from shardweave.runtime.moe.transfer.two_level_window import TwoLevelWindowTransfer
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports.comm_requests import Transfer
from shardweave.runtime.transports.machines import Machines
from shardweave.runtime.transports.process_group import ProcessGroupTransport
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

pytestmark = pytest.mark.multi
FIXED = {"two_level": True, "splits": "fixed"}
SEVERAL = [{}, {"save": "copy"}, {"save": "redispatch", "zero_rows": True}, {"pooled_buffers": 0}]


def new_dispatcher(**more: Any) -> TokenDispatcher:
    d = TokenDispatcher(**{**SETTINGS, **FIXED, **more}, transport="symmetric_memory")
    assert type(d.transfers[0]) is TwoLevelWindowTransfer
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


@pytest.mark.parametrize(
    "size, node_size", [(4, 2), (3, 2), *(pytest.param(*of, marks=pytest.mark.long) for of in ((5, 3), (7, 3), (8, 4)))]
)
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
    layer_under_the_guard(rank)
    return collected


def layer_under_the_guard(rank: int) -> None:
    """A layer and its backward under the sync guard; exempt are signals, which kernels process on a GPU, and the sizes
    of messages, which are on the host."""
    d, t = new_dispatcher(), given(rank, 1)
    x, weights = leaf(t.x), leaf(t.weights)
    before = stats().host_reads.total()
    with pytest.MonkeyPatch.context() as patch, SyncGuard() as guard, test_no_sync.control_words_of(guard):
        patch.setattr(two_level, "_sizes_by_rank", on_the_host(two_level._sizes_by_rank))
        routed = d.dispatch(x, t.ids, weights)
        y = d.combine(routed.x * 2, routed, add=x)
        y.backward(t.gradient)
    assert guard.seen["clone"] and guard.seen["empty"], guard.seen
    assert stats().host_reads.total() == before


@pytest.mark.parametrize("size, node_size", [(4, 2), pytest.param(3, 2, marks=pytest.mark.long)])
def test_interpreted_kernels_equal_virtual_ranks(size: int, node_size: int) -> None:
    virtual = (
        f"[t.digest(r) for r in t.virtual_rounds({size}, rounds=1, nodes=[r // {node_size} for r in range({size})])]"
    )
    environment = {"SHARDWEAVE_NODE_SIZE": str(node_size)}
    ran = interpreted(
        "test_two_level_windows", f"t.run_ranks(t.in_the_interpreter, {size}, environment={environment}) == {virtual}"
    )
    assert ran == "True"


def sent_bytes(rank: int, kind: type) -> tuple[dict[str, Counter[int]], dict[str, int], str]:
    """The bytes that a rank sends to each other, by operation; those between nodes that are reported; `explain`."""
    if kind is TwoLevelFixedTransfer:
        dispatcher.windows_inside = lambda *_: False
    d, t = TokenDispatcher(**SETTINGS, **FIXED, transport="symmetric_memory"), given(rank, 1)
    assert type(d.transfers[0]) is kind
    sent: Counter[int] = Counter()
    begin = ProcessGroupTransport.begin

    def counted(self: Any, request: Any) -> Any:
        assert isinstance(request, Transfer)
        for peer, buffer in request.sends:
            sent[peer] += buffer.numel()
        return begin(self, request)

    ProcessGroupTransport.begin = counted  # type: ignore[method-assign]
    found = {}
    x, weights = leaf(t.x), leaf(t.weights)
    routed = d.dispatch(x, t.ids, weights)
    found["dispatch"] = sent.copy()
    sent.clear()
    y = d.combine(routed.x * 2, routed)
    found["combine"] = sent.copy()
    sent.clear()
    y.backward(t.gradient)
    found["backward"] = sent.copy()
    reported = {name: most for name, (_, most) in on_wire(d.config, d.transfers[0], d.config.chunk_rows).items()}
    reported["backward"] = reported["backward of combine"] + reported["backward of dispatch"]
    return found, reported, d.explain()


def test_only_bytes_between_nodes_are_sent() -> None:
    """As many as with messages inside nodes, and as reported."""
    environment, nodes = {"SHARDWEAVE_NODE_SIZE": "2"}, [0, 0, 1, 1]
    windows, messages = (
        run_ranks(sent_bytes, 4, kind, environment=environment)
        for kind in (TwoLevelWindowTransfer, TwoLevelFixedTransfer)
    )
    for rank in range(4):
        (of_windows, reported, text), (of_messages, *_) = windows[rank], messages[rank]
        for operation, sent in of_windows.items():
            between = {peer: n for peer, n in of_messages[operation].items() if nodes[peer] != nodes[rank]}
            assert sent == between and sent.total() < of_messages[operation].total(), (rank, operation)
            assert sent.total() == reported[operation], (rank, operation)
        assert "inside a node rows are pushed into pooled buffers or windows; no host read" in text
        assert "inside a node, bytes that a rank writes or reads in windows" in text


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


def random_settings(seed: int, ranks: int) -> dict[str, Any]:
    draw = random.Random(seed)
    more: dict[str, Any] = {
        "dtype": draw.choice([torch.float32, torch.bfloat16, torch.float16]), "hidden": draw.choice([1, 7, 24, 64]),
        "top_k": draw.randint(1, 5), "align": draw.choice([1, 4, 8]), "max_tokens": draw.choice([1, 5, 12]),
        "save": draw.choice(["buffer", "copy", "redispatch"]), "pooled_buffers": draw.randint(0, 3),
        "zero_rows": draw.choice([True, False]), "overflow": "drop",
    }  # fmt: skip
    if draw.random() < 0.5:
        more["chunk_capacity"] = draw.choice([1, 4, 1.5])
    if draw.random() < 0.5:
        more["expert_capacity"] = draw.randint(0, 6)
    if draw.random() < 0.3:
        more["capacity"] = draw.choice([8, 16])
    if draw.random() < 0.5:
        of_rank = [[e for e in range(E) if draw.random() < 0.5 or e % ranks == r] for r in range(ranks)]
        more["expert_map"] = of_rank
    return more


def results_of(make: Callable[..., Any], several: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[list[Any]]:
    """Of each rank, of dispatchers of some ranks or of all, which have lists."""
    collected: list[list[Any]] = [[] for _ in ranks]
    for more in several:
        d, settings = make(**more), {**SETTINGS, **more}
        for i in range(2):
            by_rank = trained(d, settings, [odd_tokens(settings, rank, i) for rank in ranks])
            for of_rank, got in zip(collected, by_rank, strict=True):
                of_rank.append(got)
        tokens = [odd_tokens(settings, rank, 2) for rank in ranks]
        routed = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])
        for of_rank, r in zip(collected, routed, strict=True):
            of_rank.append([raw(r.load().per_source), raw(r.dropped)])
        d.check()
    return collected


class Listed(test_windows.Listed):
    def check(self) -> None:
        self.d.check()


def in_windows(rank: int, nodes: Sequence[int], several: Sequence[dict[str, Any]]) -> list[Any]:
    on_nodes(nodes)
    return results_of(lambda **more: Listed(new_dispatcher(**more)), several, [rank])[0]


def on_one_level(nodes: Sequence[int], several: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Rows beyond a chunk are dropped there as well."""
    make = partial(shardweave.moe.VirtualTokenDispatcher, len(nodes), one_sided=False, nodes=nodes)
    fixed = {**FIXED, "two_level": False}
    return results_of(lambda **more: make(**{**SETTINGS, **fixed, **more}), several, range(len(nodes)))


@pytest.mark.parametrize(
    "nodes, names",
    [
        ([0, 1, 1, 0], ("groups", "chunks", "replicas")),
        *(pytest.param(nodes, tuple(ODD), marks=pytest.mark.long) for nodes in ([0, 1, 1, 0], [0, 1, 0, 0])),
    ],
    ids=str,
)
def test_unusual_settings_equal_virtual_ranks(nodes: list[int], names: tuple[str, ...]) -> None:
    several = [ODD[name] for name in names]
    assert run_ranks(in_windows, len(nodes), nodes, several) == on_one_level(nodes, several)


@pytest.mark.long
def test_unusual_settings_by_interpreted_kernels() -> None:
    given_here = "[0, 1, 1, 0], list(t.ODD.values())"
    expression = f"t.run_ranks(t.in_windows, 4, {given_here}) == t.on_one_level({given_here})"
    assert interpreted("test_two_level_windows", expression) == "True"


@pytest.mark.long
@pytest.mark.parametrize("nodes", [[0, 1, 0, 1, 0], [0, 1, 1, 2, 1], [0, 0, 1, 1, 2, 2]], ids=str)
def test_random_settings_equal_virtual_ranks(nodes: list[int]) -> None:
    several = [random_settings(100 * len(nodes) + seed, len(nodes)) for seed in range(16)]
    found, want = run_ranks(in_windows, len(nodes), nodes, several), on_one_level(nodes, several)
    for rank in range(len(nodes)):
        for i, (got, wanted) in enumerate(zip(found[rank], want[rank], strict=True)):
            assert got == wanted, (rank, several[i // 3])


def packed_rows(rank: int, nodes: Sequence[int]) -> list[list[bytes]]:
    on_nodes(nodes)
    test_payloads.forwarded(rank, "symmetric_memory", {"payloads": test_payloads.FP4, **FIXED})
    d = TokenDispatcher(**test_payloads.SETTINGS, **FIXED, quantize="fp8_128", transport="symmetric_memory")
    quantized = test_payloads.results_of(*test_payloads.one_round(d, [rank]))
    more = {**FIXED, "pooled_buffers": 3}
    return [quantized, test_quantized_output.rounds_of(rank, "symmetric_memory", "mxfp8", more)]


def virtual_packed_rows(nodes: Sequence[int]) -> list[list[list[bytes]]]:
    more = {**FIXED, "one_sided": False, "nodes": nodes}
    d = shardweave.moe.VirtualTokenDispatcher(3, **test_payloads.SETTINGS, quantize="fp8_128", **more)
    of_all = test_payloads.one_round(d, range(3))
    quantized = [test_payloads.results_of(*[part[r : r + 1] for part in of_all]) for r in range(3)]
    return [list(of_rank) for of_rank in zip(quantized, test_quantized_output.wanted("mxfp8", **more), strict=True)]


def test_payloads_and_quantized_rows_equal_virtual_ranks() -> None:
    assert run_ranks(packed_rows, 3, [0, 1, 0]) == virtual_packed_rows([0, 1, 0])


@pytest.mark.long
def test_quantized_rows_by_interpreted_kernels() -> None:
    expression = "t.run_ranks(t.packed_rows, 3, [0, 1, 0]) == t.virtual_packed_rows([0, 1, 0])"
    assert interpreted("test_two_level_windows", expression) == "True"


def in_phases(rank: int, nodes: Sequence[int]) -> list[bytes]:
    on_nodes(nodes)
    return phased_rounds(rank, "symmetric_memory", **FIXED)


def test_phases_equal_virtual_ranks() -> None:
    nodes = [0, 1, 1, 0]
    assert run_ranks(in_phases, 4, nodes) == virtual_rounds(4, nodes=nodes)


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


def compiled(rank: int, nodes: Sequence[int], compiles: bool) -> list[bytes]:
    on_nodes(nodes)
    d, collected = new_dispatcher(), []

    def layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            routed = d.dispatch(x, ids, weights)
            x = d.combine(torch.tanh(routed.x), routed, add=x)
        return x

    run = torch.compile(layers, backend="aot_eager", fullgraph=True) if compiles and rank == 0 else layers
    for i in range(2):
        t = given(rank, i)
        x, weights = leaf(t.x), leaf(t.weights)
        y = run(x, t.ids, weights)
        y.backward(t.gradient)
        collected += [raw(y), raw(x.grad), raw(weights.grad)]
    d.check()
    return collected


@pytest.mark.long
def test_compiled_equals_eager() -> None:
    nodes = [0, 1, 1, 0]
    assert run_ranks(compiled, 4, nodes, True) == run_ranks(compiled, 4, nodes, False)


def on_a_gpu(rank: int) -> str:
    assert type(TokenDispatcher(**SETTINGS, **FIXED, device="cuda", transport="symmetric_memory").transfers[0]) is (
        TwoLevelWindowTransfer
    )
    return digest(rounds_of(rank, "symmetric_memory", device="cuda", **FIXED))


@pytest.mark.multigpu
def test_gpus_of_two_nodes_equal_virtual_ranks() -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip(f"{torch.cuda.device_count()} GPUs; 4 are needed")
    found = run_ranks(on_a_gpu, 4, environment={"SHARDWEAVE_NODE_SIZE": "2", **OWN_GPUS}, timeout=300)
    # On the same device: torch sums in other orders on CPUs.
    assert found == [digest(rounds) for rounds in virtual_rounds(4, device="cuda", nodes=[0, 0, 1, 1])]
