"""Ranges in NVTX, by a stand-in for `torch.cuda.nvtx`, and in torch's profiler."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import profile

import shardweave
from shardweave.errors import ArgumentError, UnsupportedError

MODULE = "shardweave.runtime.executor.ranges"


class Nvtx(SimpleNamespace):
    """Records the names of ranges, indented by their depth."""

    def __init__(self) -> None:
        super().__init__(names=[], depth=0)

    def mark(self, name: str) -> None:
        pass

    def range_push(self, name: str) -> None:
        self.names.append("  " * self.depth + name.removeprefix("shardweave::"))
        self.depth += 1

    def range_pop(self) -> None:
        self.depth -= 1


def program() -> None:
    """A redistribution, its backward, an asynchronous one, and a layer of experts with its backward."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
    with shardweave.installed():
        x.redistribute(placements=[Shard(1)]).to_local().sum().backward()
        x.detach().redistribute(placements=[Replicate()], async_op=True).to_local().sum()
    experts = shardweave.TokenDispatcher(num_experts=4, top_k=2, hidden=8, max_tokens=6, dtype=torch.float32)
    tokens, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    routed = experts.dispatch(tokens, torch.randint(0, 4, (6, 2)), weights)
    experts.combine(2 * routed.x, routed).sum().backward()


def profiled_program(rank: int) -> list[str]:
    with profile() as profiled:
        program()
    return [event.key.removeprefix("shardweave::") for event in profiled.events() if "shardweave::" in event.key]


@pytest.mark.multi
def test_profiler_has_the_same_ranges() -> None:
    for names in run_ranks(profiled_program, 2):
        assert names.count("redistribute") == 2
        for name in ("begin", "finish", "dispatch", "combine", "backward of combine", "backward of dispatch"):
            assert names.count(name) == 1, names


@pytest.mark.plan
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_nvtx_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv("SHARDWEAVE_NVTX", value)
        module = runpy.run_module(MODULE)
        assert module["wants_ranges"] is module["_profiles"]
        assert module["call_range"] is torch.profiler.record_function
    nvtx = Nvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.setenv("SHARDWEAVE_NVTX", "1")
    module = runpy.run_module(MODULE)
    assert module["wants_ranges"]()
    with pytest.raises(ValueError), module["call_range"]("shardweave::redistribute"):
        raise ValueError
    assert nvtx.names == ["redistribute"] and nvtx.depth == 0
    monkeypatch.setenv("SHARDWEAVE_NVTX", "yes")
    with pytest.raises(ArgumentError, match="SHARDWEAVE_NVTX: 'yes'; allowed: 0, 1"):
        runpy.run_module(MODULE)


@pytest.mark.plan
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_nvtx_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(name: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(mark=mark))
    monkeypatch.setenv("SHARDWEAVE_NVTX", "1")
    with pytest.raises(UnsupportedError, match="SHARDWEAVE_NVTX: 1, and this torch has no NVTX; allowed: 0, or"):
        runpy.run_module(MODULE)
