"""The host's work for a dispatch and a combine among ranks that synchronise on the device: calls of Python functions,
launches and torch operations, counted where a GPU would run kernels and with launches that do nothing.
"""

from __future__ import annotations

import sys
from ast import literal_eval
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from warm_python import run_python

# Limits, a little above what was counted.
MOST = {
    "pooled": {"dispatch": (68, 5, 15), "combine": (82, 2, 1)},
    "copied, unused rows zeroed": {"dispatch": (65, 5, 13), "combine": (74, 2, 1)},
    "once per rank": {"dispatch": (68, 6, 16), "combine": (81, 3, 1)},
    "quantized": {"dispatch": (86, 6, 27), "combine": (82, 2, 1)},
    "two levels": {"dispatch": (665, 14, 220), "combine": (280, 5, 28)},
}
"""By settings and call: Python calls, launches, torch operations."""
SETTINGS: dict[str, dict[str, Any]] = {
    "pooled": {"pooled_buffers": 2},
    "copied, unused rows zeroed": {"pooled_buffers": 0, "zero_rows": True},
    "once per rank": {"dedupe": True},
    "quantized": {"pooled_buffers": 2, "quantize": "fp8_128"},
    "two levels": {"pooled_buffers": 2, "two_level": True, "splits": "fixed"},
}
NODES = [0, 0, 1, 1]
"""Of the ranks, with two levels."""
T, H, K, E, RANKS = 512, 64, 8, 64, 4


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


class Kernel:
    """In place of a compiled kernel."""

    def __init__(self, launched: Counter[str], name: str) -> None:
        self._launched, self._name = launched, name

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return self._launch

    def _launch(self, *arguments: Any) -> None:
        self._launched[self._name] += 1


def python_calls(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `call`, and the calls of Python functions that it makes."""
    number = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call" and "/tests/" not in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, number


def counts() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What `MOST` limits, launches of backward, and what is wrong with results' memory. For a process of its own."""
    from stub_libcuda import kernels_on_the_cpu
    from sync_guard import seen_inside

    from shardweave.bench.gpu.lone_rank import TIMEOUT, Alone, Mirror, MirrorTransport, alone_among
    from shardweave.kernels import launch
    from shardweave.runtime.moe import dispatcher as dispatcher_module
    from shardweave.runtime.moe.dispatcher import TokenDispatcher
    from shardweave.runtime.transports.hierarchical import HierarchicalSymmetricMemoryTransport
    from shardweave.runtime.transports.process_group import GroupRanks, ProcessGroupTransport

    kernels_on_the_cpu()
    launched: Counter[str] = Counter()
    launch.loaded = lambda kernel, *rest, **options: Kernel(launched, kernel.fn.__name__)
    transport = MirrorTransport(0, RANKS, TIMEOUT, Mirror(torch.device("cpu")), Alone())
    transport._watchdog = None  # GPUs have none
    alone_among({"symmetric_memory": transport})
    world = GroupRanks.of(dist.group.WORLD, range(RANKS), 0)
    messages = ProcessGroupTransport(0, RANKS, TIMEOUT, "nccl", Alone(), world)
    between = HierarchicalSymmetricMemoryTransport(transport, messages, dict(enumerate(NODES)))
    dist.batch_isend_irecv = lambda operations: []  # nothing is sent, and everything has arrived
    found = mock.Mock(number_dispatcher=lambda ranks: 1)
    found.machines.nodes_of = lambda ranks: NODES
    dispatcher_module.transports_of = lambda *_: found
    dispatcher_module.why_not_backend = lambda *_: None
    x, ids, weights = torch.randn(T, H).bfloat16(), torch.randint(0, E, (T, K)), torch.rand(T, K)
    counted, wrong = {}, []
    for name, settings in SETTINGS.items():
        found.choose = lambda *_, name=name: (between if name == "two levels" else transport, "")
        if name == "two levels":  # the last: operations of torch index by what kernels have not written
            torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
        d = TokenDispatcher(
            num_experts=E, top_k=K, hidden=H, max_tokens=T, overflow="drop", transport="symmetric_memory", **settings
        )

        def measured(call: Callable[[], Any]) -> tuple[int, int, int]:
            call()  # kernels are loaded
            launched.clear()
            with seen_inside(), Operations() as operations:
                call()
            kernels = launched.total()
            _, calls = python_calls(call)
            assert launched.total() == 2 * kernels
            return calls, kernels, operations.number

        with torch.no_grad():
            dispatched = measured(partial(d.dispatch, x, ids, weights))
            routed = d.dispatch(x, ids, weights)
            values = rows_of(routed) * 1
            counted[name] = {"dispatch": dispatched, "combine": measured(partial(d.combine, values, routed))}
            counted[name]["backward"] = backward_launches(d, launched, x, ids, weights)
            others = [d.dispatch(x[:t], ids[:t], weights[:t]) for t in (T, 1, 1, 1, 0, 0)]
            wrong += [f"{name}: {text}" for text in shared_or_strided(others)]
    return counted, wrong


def rows_of(routed: Any) -> torch.Tensor:
    return routed.x if routed.scale is None else routed.dequantized()


@torch.enable_grad()
def backward_launches(d: Any, launched: Counter[str], *tokens: torch.Tensor) -> dict[str, int]:
    """By kernel, of the backward of a combine that gives gradients of weights, and of its dispatch."""
    x, ids, weights = tokens[0].detach().requires_grad_(), tokens[1], tokens[2].detach().requires_grad_()
    routed = d.dispatch(x, ids, weights)
    y = d.combine(rows_of(routed) * routed.weights[:, None].to(x.dtype), routed)
    launched.clear()
    y.backward(torch.ones_like(y))
    assert x.grad is not None and weights.grad is not None
    return {name.removesuffix("_kernel"): number for name, number in sorted(launched.items())}


def shared_or_strided(several: list[Any]) -> list[str]:
    """Results of dispatches that lie in the memory of others, or are not contiguous, or not as the first of a shape."""
    wrong, owners, first = [], dict[int, tuple[int, int]](), dict[tuple[int, int], Any]()
    for number, routed in enumerate(several):
        # Elements of quantized rows are columns of wider rows.
        rows = (routed.x,) if routed.scale is None else (routed.scale,)
        for i, tensor in enumerate((*rows, *routed._record.tensors())):
            form, at = (tensor.dtype, tensor.shape), tensor.untyped_storage().data_ptr()
            if tensor.numel() and owners.setdefault(at, (number, i)) != (number, i):
                wrong.append(f"result {i} of dispatch {number} lies in the memory of {owners[at]}")
            if not tensor.is_contiguous() or first.setdefault((len(routed.topk_weights), i), form) != form:
                wrong.append(f"result {i} of dispatch {number}: {form}, {tensor.stride()}")
    return wrong


@pytest.fixture(scope="module")
def counted() -> tuple[dict[str, dict[str, Any]], list[str]]:
    folders = [str(Path(__file__).parent), *(p for p in sys.path if p.endswith("helpers"))]
    ran = run_python(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}; import test_host_work as t; print(t.counts())"],
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return literal_eval(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_host_work_is_bounded(settings: str, call: str, counted: Any) -> None:
    got, most = counted[0][settings][call], MOST[settings][call]
    assert all(0 < g <= m for g, m in zip(got, most, strict=True)), (got, most)


@pytest.mark.parametrize("settings", SETTINGS)
def test_backward_signals_in_its_launches(settings: str, counted: Any) -> None:
    """But for the wait before rows are written to the window: that takes more programs than may wait."""
    once_per_rank = {
        "signal": 2, "offer_tokens": 1, "spread_rows": 1, "weigh_rows": 1, "receive_rows": 1, "offer_rows": 1,
        "gather_values": 1, "push_sums": 1, "combine_rows": 1,
    }  # fmt: skip
    once_per_expert = {
        "signal": 1, "push_rows": 1, "weigh_rows": 1, "receive_rows": 1, "offer_rows": 2, "gather_values": 1,
        "combine_rows": 1,
    }  # fmt: skip
    # Rows of own tokens and of forwarded ones each have a launch. Messages bring words to compare. What is sent back is
    # overwritten after a failure, and so are numbers that those of other nodes have been added to.
    two_levels = {
        **once_per_expert, "signal": 4, "push_rows": 2, "gather_values": 2, "combine_rows": 2, "compare_words": 3,
    }  # fmt: skip
    want = {"once per rank": once_per_rank, "two levels": two_levels}.get(settings, once_per_expert)
    if settings == "copied, unused rows zeroed":
        want |= {"fill_rows": 1}  # of the gradients of the rows' weights
    assert counted[0][settings]["backward"] == want


def test_results_have_memory_of_their_own(counted: Any) -> None:
    assert not counted[1]
