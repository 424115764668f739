"""`install()` in modules that have bound torch's functions by name, before it and after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import shardweave

IMPORTS = """
from torch.distributed.tensor._redistribute import Redistribute as Moved
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._redistribute import redistribute_local_tensor as moved
"""
NAMES = "Moved", "redistribute_local_tensor", "moved"


def loaded(name: str, text: str = IMPORTS) -> Any:
    module = sys.modules[name] = ModuleType(name)
    exec(text, vars(module))
    return module


def bound(module: ModuleType) -> list[Any]:
    return [vars(module)[name] for name in NAMES]


@pytest.fixture
def loaded_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As `loaded`, until the end of the test."""

    def load(name: str, text: str = IMPORTS) -> Any:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        return loaded(name, text)

    return load


def gathered(module: Any, mesh: DeviceMesh, rank: int) -> int:
    """How many redistributions shardweave carries out of one that a module calls by the name that it has bound."""
    x = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
    spec = DTensorSpec(mesh, (Replicate(),), x._spec.tensor_meta)
    before = shardweave.stats().calls.total()
    whole = module.moved(x._local_tensor, x._spec, spec)
    assert whole.equal(torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3))
    return shardweave.stats().calls.total() - before


def bound_by_name(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    early = loaded("bound_before_install")
    torchs = bound(early)
    assert gathered(early, mesh, rank) == 0
    shardweave.install()
    late = loaded("bound_after_install")
    assert gathered(early, mesh, rank) == gathered(late, mesh, rank) == 1
    assert bound(early) == bound(late)
    shardweave.uninstall()
    assert gathered(early, mesh, rank) == gathered(late, mesh, rank) == 0
    assert bound(early) == bound(late) == torchs


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_modules_that_bind_by_name(transport: str) -> None:
    hierarchical = transport == "hierarchical"
    run_ranks(
        bound_by_name,
        4,
        environment={"SHARDWEAVE_NODE_SIZE": "2"} if hierarchical else {"SHARDWEAVE_TRANSPORT": transport},
    )


@pytest.mark.plan
def test_nested_and_repeated_install(loaded_here: Callable[..., Any]) -> None:
    early = loaded_here("bound_before_install")
    torchs = bound(early)
    with shardweave.installed():
        ours = bound(early)
        assert not set(ours) & set(torchs)
        with shardweave.installed(reduction="fast"):
            assert bound(early) == bound(loaded_here("bound_inside")) == ours
        assert bound(early) == ours
        shardweave.install(reduction="fast")
        assert bound(early) == ours
    for module in (early, sys.modules["bound_inside"]):
        assert bound(module) == torchs
    shardweave.uninstall()
    assert bound(early) == torchs


@pytest.mark.plan
def test_recorded_modules_get_torchs_functions_back(loaded_here: Callable[..., Any], tmp_path: Path) -> None:
    early = loaded_here("bound_before_record")
    torchs = bound(early)
    with shardweave.tracing.record(tmp_path / "trace.json"):
        late = loaded_here("bound_while_recording")
        assert bound(early) == bound(late) != torchs
    assert bound(early) == bound(late) == torchs


@pytest.mark.plan
def test_attributes_of_modules_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class ImportsOnUse(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} is read")

    module = ImportsOnUse("imports_on_use")
    monkeypatch.setitem(sys.modules, "imports_on_use", module)
    namespace = ModuleType.__dict__["__dict__"].__get__(module)
    torchs = namespace["moved"] = torch_redistribute.redistribute_local_tensor
    monkeypatch.setitem(sys.modules, "not_a_module", {"moved": torchs})
    with shardweave.installed():
        assert namespace["moved"] is torch_redistribute.redistribute_local_tensor is not torchs
    assert namespace["moved"] is torchs


@pytest.mark.plan
def test_costs_in_modules_that_bind_by_name(loaded_here: Callable[..., Any]) -> None:
    text = "from torch.distributed.tensor._collective_utils import redistribute_cost as cost"
    early = loaded_here("costs_before_install", text)
    torchs = early.cost
    with shardweave.installed(costs=True):
        late = loaded_here("costs_after_install", text)
        assert early.cost is late.cost is not torchs
    assert early.cost is late.cost is torchs
