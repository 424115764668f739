"""VLLMPrepareFinalize by the calls of vLLM's modular kernel, and its signatures beside those of an installed vLLM."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from moe_reference import assert_near, dense, expert, matrices_of, tokens_of
from rank_processes import run_ranks
from test_threads import advanced_in_turns

from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.runtime.moe.options import DispatchOptions

try:
    from shardweave.runtime.integrations.vllm import VLLMPrepareFinalize
except ImportError:  # vLLM is there and cannot be imported, such as without a GPU
    sys.modules["vllm"] = None  # type: ignore[assignment]
    from shardweave.runtime.integrations.vllm import VLLMPrepareFinalize

    del sys.modules["vllm"]

EXPERTS, K, HIDDEN, MOST = 8, 2, 8, 9
COUNTS = [9, 0, 4, 7]
UNQUANTIZED = SimpleNamespace(quant_dtype=None)


class TopKWeightAndReduceDelegate:
    """Stands in for vLLM's class of this name."""


def made(top_k: int = K) -> VLLMPrepareFinalize:
    return VLLMPrepareFinalize(
        num_experts=EXPERTS, top_k=top_k, hidden=HIDDEN, max_num_tokens=MOST, dtype=torch.float32, device="cpu"
    )


def by_the_kernel(rank: int) -> None:
    size = dist.get_world_size()
    local, matrices = EXPERTS // size, matrices_of(EXPERTS, HIDDEN, torch.float32)
    own = matrices[rank * local : (rank + 1) * local]
    for top_k in (K, 1):
        seam = made(top_k)
        assert seam.num_dispatchers() == size and seam.max_num_tokens_per_rank() == MOST and seam.output_is_reduced()
        for step, asynchronous in enumerate((False, True)):
            t = tokens_of(rank, COUNTS[rank], top_k, EXPERTS, HIDDEN, torch.float32, "holes", step)
            if top_k == 2:  # distinct experts
                t.ids[:, 1] = torch.where(t.ids[:, 0] == t.ids[:, 1], -1, t.ids[:, 1])
            on_input = top_k == 1 and asynchronous
            arguments = t.x, t.weights, t.ids.int(), EXPERTS, None, on_input, UNQUANTIZED
            with torch.inference_mode():
                prepared = seam.prepare_async(*arguments)() if asynchronous else seam.prepare(*arguments)
                rows, scales, metadata, ids, weights = prepared
                assert rows.shape == (local, size * MOST, HIDDEN) and scales is ids is weights is None
                counts = metadata.expert_num_tokens
                assert counts.dtype is torch.int32 and metadata.expert_num_tokens_cpu is None
                delegate = TopKWeightAndReduceDelegate()
                output = seam.allocate_fused_expert_output(tuple(rows.shape), rows.dtype, rows.device, delegate)
                assert output.shape == rows.shape
                assert seam.allocate_fused_expert_output((1, 2), rows.dtype, rows.device, delegate) is None
                output.fill_(float("nan"))
                for e, n in enumerate(counts.tolist()):
                    output[e, :n] = expert(rows[e, :n], own[e])
                y = torch.full_like(t.x, float("nan"))
                given = y, output, t.weights, t.ids, on_input, delegate
                assert (seam.finalize_async(*given)() if asynchronous else seam.finalize(*given)) is None
            if on_input:
                there = (t.ids >= 0).double()
                t.x, t.weights = (t.x * t.weights).float(), there.float()
            assert_near(y.clone(), dense(t, matrices)["y"], torch.float32, f"y of step {step}, top {top_k}")
        seam.dispatcher.check()


@pytest.mark.multi
@pytest.mark.parametrize("size", [1, 2, 4])
def test_by_the_calls_of_the_kernel(size):
    run_ranks(by_the_kernel, size)


def several_microbatches(rank: int) -> None:
    """prepare and finalize of two microbatches in turn: on two threads right, on one thread refused."""
    seam, matrices, delegate = made(), matrices_of(EXPERTS, HIDDEN, torch.float32), TopKWeightAndReduceDelegate()
    own = matrices.chunk(2)[rank]
    outputs = {}

    def steps(seed: int) -> Iterator[None]:
        t = tokens_of(rank, 9 - 3 * seed, K, EXPERTS, HIDDEN, torch.float32, "uniform", seed)
        t.ids[:, 1] = torch.where(t.ids[:, 0] == t.ids[:, 1], -1, t.ids[:, 1])
        rows, _, metadata, _, _ = seam.prepare(t.x, t.weights, t.ids.int(), EXPERTS, None, False, UNQUANTIZED)
        yield
        output = seam.allocate_fused_expert_output(tuple(rows.shape), rows.dtype, rows.device, delegate)
        for e, n in enumerate(metadata.expert_num_tokens.tolist()):
            output[e, :n] = expert(rows[e, :n], own[e])
        yield
        y = torch.full_like(t.x, float("nan"))
        seam.finalize(y, output, t.weights, t.ids, False, delegate)
        outputs[seed] = y, dense(t, matrices)["y"]

    advanced_in_turns(steps(0), steps(1))
    for seed, (y, want) in outputs.items():
        assert_near(y, want, torch.float32, f"y of microbatch {seed}")
    first, second = steps(0), steps(1)
    for microbatch in (first, second, first, second):
        next(microbatch)
    with pytest.raises(ArgumentError, match="finalize: topk_weights: not those of this thread's last prepare; allowed"):
        next(first)
    for _ in second:  # goes on
        pass
    assert_near(*outputs[1], torch.float32, "y of the second microbatch")


@pytest.mark.multi
def test_microbatches_of_several_threads():
    run_ranks(several_microbatches, 2)


def refused(rank: int) -> None:
    seam, x = made(), torch.zeros(2, HIDDEN)
    ids, weights, delegate = torch.zeros(2, K, dtype=torch.int32), torch.ones(2, K), TopKWeightAndReduceDelegate()
    with pytest.raises(ArgumentError, match="num_experts: 3; allowed: that of the dispatcher, 8"):
        seam.prepare(x, weights, ids, 3, None, False, UNQUANTIZED)
    quantized = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="quant_config: quant_dtype torch.float8_e4m3fn; allowed"):
        seam.prepare(x, weights, ids, EXPERTS, None, False, quantized)
    with pytest.raises(UnsupportedError, match="apply_router_weight_on_input: True with top_k 2; allowed: top_k 1"):
        seam.prepare(x, weights, ids, EXPERTS, None, True, UNQUANTIZED)
    with pytest.raises(ArgumentError, match="finalize: nothing was prepared"):
        seam.finalize(x, x, weights, ids, False, delegate)
    rows, *_ = seam.prepare(x, weights, ids, EXPERTS, None, False, quantized, defer_input_quant=True)
    with pytest.raises(UnsupportedError, match="weight_and_reduce_impl: int; allowed: TopKWeightAndReduceDelegate"):
        seam.finalize(x, rows, weights, ids, False, 3)
    seam.finalize(x, rows, weights, ids, False, delegate)
    for refused, text in (
        (DispatchOptions(layout="batched"), "layout: 'batched'; allowed here: 'grouped', since vLLM's experts"),
        (DispatchOptions(capacity=1.5), "capacity: 1.5; allowed here: None"),
        ({"align": 2}, "options: {'align': 2}; allowed: a DispatchOptions"),
    ):
        with pytest.raises(ArgumentError, match=text):
            VLLMPrepareFinalize(num_experts=8, top_k=2, hidden=8, max_num_tokens=9, device="cpu", options=refused)


@pytest.mark.multi
def test_refused_arguments():
    run_ranks(refused, 1)


@pytest.mark.plan
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (pip install vllm)")
def test_signatures_are_those_of_vllm():
    """All methods of vLLM's base classes that are abstract or asynchronous, by their source: it may not be importable
    here."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    source = Path(folder, "model_executor/layers/fused_moe/modular_kernel.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    checked = set()
    for name in ("FusedMoEPrepareAndFinalize", "FusedMoEPrepareAndFinalizeModular"):
        for node in classes[name].body:
            if not isinstance(node, ast.FunctionDef):
                continue
            abstract = any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in node.decorator_list)
            if abstract or node.name.endswith("_async") or node.name == "allocate_fused_expert_output":
                ours = inspect.getattr_static(VLLMPrepareFinalize, node.name)
                ours = ours.fget if isinstance(ours, property) else ours
                theirs = [argument.arg for argument in node.args.args]
                assert list(inspect.signature(ours).parameters) == theirs, node.name
                checked.add(node.name)
    assert {"prepare", "finalize", "prepare_async", "finalize_async", "activation_format"} <= checked
