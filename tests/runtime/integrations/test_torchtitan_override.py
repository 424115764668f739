"""TorchtitanDispatcher.Config in torchtitan's config tree: `traverse`, overrides, and the places that do not know it.

torchtitan is a stand-in with the same rules where it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_reference import matrices_of, tokens_of
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from shardweave.errors import ArgumentError, DisagreementError
from shardweave.integrations.torchtitan import TorchtitanDispatcher

MODULE = "shardweave.runtime.integrations.torchtitan"
OVERRIDE = "shardweave.integrations.torchtitan.token_dispatcher"
absent = importlib.util.find_spec("torchtitan") is None
needs_torchtitan = pytest.mark.skipif(absent, reason="torchtitan is not installed (pip install torchtitan==0.3.0)")


def stand_in() -> dict[str, ModuleType]:
    """Modules with the rules of torchtitan 0.3.0 for configs and overrides."""

    class Configurable:
        @dataclass(kw_only=True, slots=True)
        class Config:
            def traverse(self, kind: type) -> Iterator[tuple[Any, Any]]:
                if isinstance(self, kind):
                    yield self, None
                for f in fields(self):
                    value = getattr(self, f.name)
                    if isinstance(value, kind):
                        yield value, (self, f.name)
                    for i, item in enumerate(value if isinstance(value, list) else ()):
                        yield from ((found, parent or (value, i)) for found, parent in item.traverse(kind))

            def build(self) -> Any:
                return self._owner(config=replace(self))

        def __init_subclass__(cls) -> None:
            assert "__slots__" in cls.Config.__dict__ and all(f.kw_only for f in fields(cls.Config))
            cls.Config._owner = cls

    class LocalTokenDispatcher(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            num_experts: int
            top_k: int

    class BaseEPTokenDispatcher(LocalTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(LocalTokenDispatcher.Config):
            pass

    class AllToAllTokenDispatcher(BaseEPTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseEPTokenDispatcher.Config):
            pass

    class HybridEPTokenDispatcher(BaseEPTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseEPTokenDispatcher.Config):
            non_blocking_capacity_factor: float | None = None
            pad_multiple: int | None = None
            hidden_dim: int | None = None
            num_max_tokens_per_rank: int | None = None

    registry: dict[str, Any] = {}

    def override(*, target: type, description: str) -> Callable:
        assert issubclass(target, Configurable.Config) and description

        def register(function: Callable) -> Callable:
            key = f"{function.__module__}.{function.__name__}"
            assert key not in registry
            registry[key] = SimpleNamespace(target_cls=target, factory=function)
            return function

        return register

    names = ("torchtitan", "torchtitan.config", "torchtitan.config.override", "torchtitan.models")
    names += ("torchtitan.models.common", "torchtitan.models.common.token_dispatcher")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["torchtitan.config"]).update(Configurable=Configurable, override=override)
    vars(modules["torchtitan.config.override"]).update(_REGISTRY=registry)
    for kind in (LocalTokenDispatcher, AllToAllTokenDispatcher, BaseEPTokenDispatcher, HybridEPTokenDispatcher):
        setattr(modules[names[-1]], kind.__name__, kind)
    return modules


def import_again(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType | None]) -> ModuleType:
    """Import our module for these modules of torchtitan; None: absent."""
    monkeypatch.setattr(
        importlib.import_module("shardweave.runtime.integrations"), "torchtitan", importlib.import_module(MODULE)
    )
    monkeypatch.delitem(sys.modules, MODULE)  # put back after the test, as the attribute of its package is
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module(MODULE)


@pytest.fixture(params=["stand-in", pytest.param("installed", marks=needs_torchtitan)])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_again(monkeypatch, stand_in()) if request.param == "stand-in" else importlib.import_module(MODULE)


def theirs() -> ModuleType:
    return sys.modules["torchtitan.models.common.token_dispatcher"]


def test_config_is_found_and_built(ours: ModuleType) -> None:
    configurable = sys.modules["torchtitan.config"].Configurable
    ours_config = ours.TorchtitanDispatcher.Config(num_experts=8, top_k=2, dtype=torch.bfloat16, device="cpu")

    @dataclass(kw_only=True, slots=True)
    class Layer(configurable.Config):
        token_dispatcher: theirs().LocalTokenDispatcher.Config

    @dataclass(kw_only=True, slots=True)
    class Model(configurable.Config):
        layers: list = field(default_factory=list)

    model = Model(layers=[Layer(token_dispatcher=ours_config)])
    for kind in (theirs().LocalTokenDispatcher, theirs().BaseEPTokenDispatcher):
        assert [found[1 if len(found) == 4 else 0] for found in model.traverse(kind.Config)] == [ours_config]
    assert list(model.traverse(theirs().AllToAllTokenDispatcher.Config)) == []
    built = ours_config.build()
    assert type(built) is ours.TorchtitanDispatcher and isinstance(built, theirs().LocalTokenDispatcher)
    assert built.config == ours_config and built.config is not ours_config
    assert json.loads(json.dumps(asdict(ours_config)))["dtype"] == "bfloat16"


def test_override_takes_settings_of_each_dispatcher(ours: ModuleType) -> None:
    module = theirs()
    registered = sys.modules["torchtitan.config.override"]._REGISTRY[OVERRIDE]
    assert registered.target_cls is module.LocalTokenDispatcher.Config
    expected = ours.TorchtitanDispatcher.Config(num_experts=8, top_k=2)
    for kind in (module.LocalTokenDispatcher, module.AllToAllTokenDispatcher, module.HybridEPTokenDispatcher):
        assert registered.factory(kind.Config(num_experts=8, top_k=2)) == expected
    hybrid = module.HybridEPTokenDispatcher.Config(
        num_experts=8, top_k=2, hidden_dim=64, num_max_tokens_per_rank=9, pad_multiple=32
    )
    sizes = {"hidden_dim": 64, "num_max_tokens_per_rank": 9, "pad_multiple": 32}
    assert registered.factory(hybrid) == replace(expected, **sizes)
    with_capacity = registered.factory(hybrid, options={"capacity": 1.25}, hidden_dim=32)
    assert with_capacity == replace(expected, **sizes | {"options": {"capacity": 1.25}, "hidden_dim": 32})
    assert registered.factory(with_capacity) == with_capacity
    with pytest.raises(TypeError, match="no_setting"):
        registered.factory(hybrid, no_setting=1)


def test_without_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a torchtitan that has no token dispatchers; but not with one that fails to import."""
    whole = stand_in()
    for modules in (dict.fromkeys(whole), {**whole, "torchtitan.models.common.token_dispatcher": None}):
        kind = import_again(monkeypatch, modules).TorchtitanDispatcher
        built = kind.Config(num_experts=4, top_k=1).build()
        assert type(built) is kind and built.config == kind.Config(num_experts=4, top_k=1)
    with pytest.raises(ModuleNotFoundError, match="spmd_types"):
        import_again(monkeypatch, stand_in() | {"torchtitan.models.common.token_dispatcher": Broken("broken")})


class Broken(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.endswith("Dispatcher"):
            raise ModuleNotFoundError("No module named 'spmd_types'", name="spmd_types")
        raise AttributeError(name)


@pytest.mark.long
def test_importing_shardweave_does_not_import_torchtitan() -> None:
    code = f"""import sys, shardweave
assert {MODULE!r} not in sys.modules and "torchtitan" not in sys.modules
assert ("torchtitan" in sys.modules) is {not absent}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# Sizes of the first dispatch.


def exchange(dispatcher: Any, rank: int, tokens: int, hidden: int = 8) -> list[torch.Tensor]:
    t = tokens_of(rank, tokens, 2, 6, hidden, torch.float32, "zipf")
    x = t.x.clone().requires_grad_()
    rows, counts, metadata = dispatcher.dispatch(x, t.weights, t.ids, torch.empty(0))
    experts = matrices_of(1, hidden, torch.float32)[0]
    y = dispatcher.combine(torch.nan_to_num(rows) @ experts, metadata, x)
    y.sum().backward()
    return [counts, y.detach(), x.grad]


def sizes_of_first_dispatch(rank: int, with_mesh: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if with_mesh else None
    given = TorchtitanDispatcher.Config(
        num_experts=6, top_k=2, hidden_dim=8, num_max_tokens_per_rank=5, dtype="float32"
    )
    left = replace(given, hidden_dim=None, num_max_tokens_per_rank=None, dtype=None)
    results = []
    for config in (given, left):
        dispatcher = config.build()
        dispatcher.wire_meshes(ep_mesh=mesh)
        assert (dispatcher.dispatcher is None) is (config is left)
        results.append(exchange(dispatcher, rank, 5) + exchange(dispatcher, rank, 4 - rank))
        settings = dispatcher.dispatcher.config
        assert (settings.hidden, settings.max_tokens, settings.dtype) == (8, 5, torch.float32)
        with pytest.raises(ArgumentError, match="T up to max_tokens, 5"):
            exchange(dispatcher, rank, 6)
    for ours, explicit in zip(*results, strict=True):
        assert torch.equal(ours, explicit)


def test_sizes_of_first_dispatch_without_mesh() -> None:
    sizes_of_first_dispatch(0, False)
    dispatcher = TorchtitanDispatcher.Config(num_experts=6, top_k=2).build()
    dispatcher.wire_meshes(ep_mesh=None)
    with pytest.raises(ArgumentError, match="metadata: nothing has been dispatched"):
        dispatcher.combine(torch.zeros(2, 8), None, None)
    with pytest.raises(ArgumentError, match="dtype: 'float64'; allowed: float32, bfloat16, float16, or None"):
        dispatcher.dispatch(torch.zeros(2, 8, dtype=torch.float64), None, None, None)
    with pytest.raises(ArgumentError, match=r"x_TD: .*allowed: a tensor \[T, D\]"):
        dispatcher.dispatch(torch.zeros(8), None, None, None)
    assert dispatcher.dispatcher is None
    exchange(dispatcher, 0, 3, hidden=4)  # errors leave no sizes behind
    assert dispatcher.dispatcher.config.hidden == 4


def test_sizes_are_required_under_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = TorchtitanDispatcher.Config(num_experts=6, top_k=2, hidden_dim=8).build()
    dispatcher.wire_meshes(ep_mesh=None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ArgumentError, match="num_max_tokens_per_rank, dtype: None; allowed under torch.compile"):
        dispatcher.dispatch(torch.zeros(2, 8), None, None, None)


def sizes_that_differ(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    dispatcher = TorchtitanDispatcher.Config(num_experts=6, top_k=2).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    with pytest.raises(
        DisagreementError, match=rf"rank {rank} .* at most {5 + rank} tokens, .* at most {6 - rank} tokens"
    ):
        exchange(dispatcher, rank, 5 + rank)


@pytest.mark.multi
def test_sizes_of_first_dispatch() -> None:
    run_ranks(sizes_of_first_dispatch, 2, True)


@pytest.mark.multi
def test_sizes_of_first_dispatch_that_differ_between_ranks() -> None:
    run_ranks(sizes_that_differ, 2)


# torchtitan's own model, and the places that know its dispatchers alone.


@needs_torchtitan
def test_override_of_the_debug_model() -> None:
    from torchtitan.components.quantization.utils import swap_token_dispatcher
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher, TorchAOTokenDispatcher
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    config = deepseek_v3_debugmodel()
    dispatchers = [found for _, found, *_ in config.traverse(LocalTokenDispatcher.Config)]
    experts = [layer.moe.routed_experts for layer in config.model_spec.model.layers if layer.moe is not None]
    assert len(dispatchers) == len(experts) > 1
    swap_token_dispatcher(experts[0], 32)  # before overrides, as quantization does
    assert isinstance(experts[0].token_dispatcher, TorchAOTokenDispatcher.Config)
    config.override = OverrideConfig(imports=[(OVERRIDE, {"options": {"capacity": 2.0}})])
    config.parallelism.expert_parallel_degree = 2
    config.model_spec.model.update_from_config(config=config)
    assert len(apply_overrides(config.override, config)) == len(experts)
    ours = [found for _, found, *_ in config.traverse(TorchtitanDispatcher.Config)]
    assert [(o.num_experts, o.top_k) for o in ours] == [(d.num_experts, d.top_k) for d in dispatchers]
    assert [(o.pad_multiple, o.options.capacity) for o in ours] == [(32, 2.0)] + [(1, 2.0)] * (len(ours) - 1)
    assert json.dumps(
        config.to_dict()["model_spec"]["model"]["layers"][-1]["moe"]["routed_experts"]["token_dispatcher"]
    )

    # What the documentation says is lost.
    assert all(o.hidden_dim is o.num_max_tokens_per_rank is None for o in ours)
    config.model_spec.model.update_from_config(config=config)
    assert all(o.hidden_dim is o.num_max_tokens_per_rank is None for o in ours)
    with pytest.raises(ValueError, match="requires a token dispatcher that supports padding.*, got Config"):
        swap_token_dispatcher(experts[0], 32)
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match=r"Unsupported token dispatcher: TorchtitanDispatcher\.Config"):
        config._validate_cuda_graphs()
    config.training.disable_cuda_graphs = True
    config._validate_cuda_graphs()
