"""TorchtitanDispatcher alone, and in torchtitan's MoE module if that is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from moe_reference import Tokens, assert_near, matrices_of, tokens_of
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shardweave.errors import ArgumentError
from shardweave.runtime.integrations.torchtitan import TorchtitanDispatcher

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed (pip install torchtitan==0.3.0)"
)


def config_of(experts: int, k: int, hidden: int, tokens: int, **more) -> TorchtitanDispatcher.Config:
    return TorchtitanDispatcher.Config(
        num_experts=experts, top_k=k, hidden_dim=hidden, num_max_tokens_per_rank=tokens, dtype=torch.float32, **more
    )


def by_the_seam(
    dispatcher: TorchtitanDispatcher, t: Tokens, matrices: torch.Tensor, checkpointed: bool = False
) -> dict[str, torch.Tensor]:
    """Call as RoutedExperts does, with experts that multiply by one matrix, and NaN in unused rows."""
    x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
    m = matrices.clone().requires_grad_()

    def layer(x: torch.Tensor, weights: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        rows, counts, metadata = dispatcher.dispatch(x, weights, t.ids, torch.full((1,), -99))
        assert counts.dtype is torch.int64 and len(counts) == len(matrices)
        ends = counts.cumsum(0).tolist()
        parts = [rows[a:b] @ w for a, b, w in zip([0, *ends], ends, m, strict=False)]
        parts.append(rows.new_full((len(rows) - sum(counts.tolist()), rows.shape[1]), float("nan")))
        return dispatcher.combine(torch.cat(parts), metadata, x)

    y = checkpoint(layer, x, weights, m, use_reentrant=False) if checkpointed else layer(x, weights, m)
    y.backward(t.gradient)
    of_matrices = torch.zeros_like(m) if m.grad is None else m.grad  # a rank without experts
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": of_matrices}


def linear_experts(t: Tokens, matrices: torch.Tensor) -> dict[str, torch.Tensor]:
    x, weights = t.x.double().requires_grad_(), t.weights.double().requires_grad_()
    m = matrices.double().requires_grad_()
    y = x * 0
    for e in range(len(m)):
        y = y + (weights * (t.ids == e)).sum(1, keepdim=True) * (x @ m[e])
    y.backward(t.gradient.double())
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": m.grad}


def ragged_ranks(rank: int, mesh, experts: int, pad_multiple: int, more: dict):
    dispatcher = config_of(experts, 2, 8, 9, pad_multiple=pad_multiple, **more).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    matrices = matrices_of(experts, 8, torch.float32)
    counts = [9, 0, 4, 7]
    tokens = [tokens_of(r, counts[r], 2, experts, 8, torch.float32, "holes") for r in range(len(mesh.mesh))]
    mine = distribute_tensor(matrices, mesh, [Shard(0)]).to_local()
    want = linear_experts(tokens[rank], matrices)
    for checkpointed in (False, True):
        got = by_the_seam(dispatcher, tokens[rank], mine, checkpointed)
        for name in ("y", "x", "weights"):
            assert_near(got[name], want[name], torch.float32, name)
    total = sum(linear_experts(t, matrices)["matrices"] for t in tokens)
    shard = distribute_tensor(total, mesh, [Shard(0)]).to_local()
    assert_near(got["matrices"], shard, torch.float32, "matrices")
    dispatcher.dispatcher.check()
    return len(mine)


@pytest.mark.plan
def test_config_holds_plain_values():
    """torchtitan prints configs (`--debug.print_config`) and writes them beside checkpoints."""
    given = config_of(8, 2, 16, 9, device=torch.device("cpu"), options={"capacity": 1.25})
    values = json.loads(json.dumps(asdict(given)))
    assert (values["dtype"], values["device"], values["options"]["capacity"]) == ("float32", "cpu", 1.25)
    assert TorchtitanDispatcher.Config(**values) == given == replace(given)
    default = TorchtitanDispatcher.Config(num_experts=8, top_k=2, hidden_dim=16, num_max_tokens_per_rank=9)
    named = replace(default, dtype=torch.bfloat16)
    assert json.loads(json.dumps(asdict(named)))["dtype"] == "bfloat16"
    for config in (given, TorchtitanDispatcher.Config(**values), named):
        built = config.build()
        built.wire_meshes(ep_mesh=None)
        assert built.dispatcher.config.dtype is getattr(torch, config.dtype)
    for changes, text in (
        ({"dtype": "float64"}, "dtype: 'float64'; allowed: float32, bfloat16, float16"),
        ({"dtype": torch.int8}, "dtype: 'int8'; allowed"),
        ({"device": "nowhere"}, "device: 'nowhere'; allowed: a device such as"),
        ({"device": 1.5}, "device: 1.5; allowed: a device such as"),
    ):
        with pytest.raises(ArgumentError, match=text):
            replace(default, **changes).build().wire_meshes(ep_mesh=None)
    with pytest.raises(ArgumentError, match="ep_mesh: 'ep'; allowed: a 1-D DeviceMesh, or None"):
        default.build().wire_meshes(ep_mesh="ep")


CASES = [
    (10, 1, {}, [3, 3, 3, 1]),
    (3, 4, {"transport": "process_group"}, [1, 1, 1, 0]),
    (8, 16, {"options": {"save": "copy", "expert_capacity": 40}}, [2, 2, 2, 2]),
]


def each_case(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for experts, pad, more, held in CASES:
        assert ragged_ranks(rank, mesh, experts, pad, more) == held[rank]


@pytest.mark.multi
def test_uneven_tokens_and_experts():
    run_ranks(each_case, 4)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)
def test_without_mesh(device):
    dispatcher = TorchtitanDispatcher(config_of(6, 3, 8, 11, device=torch.device(device)))
    dispatcher.wire_meshes(ep_mesh=None)
    t, matrices = tokens_of(0, 11, 3, 6, 8, torch.float32, "zipf"), matrices_of(6, 8, torch.float32)
    there = Tokens(*(part.to(device) for part in (t.x, t.ids, t.weights, t.gradient)))
    got, want = by_the_seam(dispatcher, there, matrices.to(device)), linear_experts(t, matrices)
    for name in want:
        assert_near(got[name].cpu(), want[name], torch.float32, name)
    assert "over 1 rank, in process:" in dispatcher.dispatcher.explain()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"save": "redispatch"}, 'save: "redispatch"; allowed here: "buffer", "copy"'),
        ({"align": 16}, "align: 16; allowed here: 1, since torchtitan's layers take rows .* aligned to pad_multiple"),
        ({"layout": "batched"}, "layout: 'batched'; allowed here: 'grouped'"),
        ({"capacity": -1}, "capacity: -1; allowed: a whole number"),
    ],
)
def test_config_refuses_options(options, text):
    with pytest.raises(ArgumentError, match=text):
        config_of(4, 1, 8, 2, options=options).build().wire_meshes(ep_mesh=None)


def test_dispatch_before_wire_meshes_raises():
    dispatcher = config_of(4, 1, 8, 2).build()
    with pytest.raises(ArgumentError, match="wire_meshes"):
        dispatcher.dispatch(torch.zeros(2, 8), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(4))


# In torchtitan's MoE module.

EXPERTS, TOP_K, WIDTH, INNER = 8, 3, 32, 48


def titan_moe(dispatcher: object) -> nn.Module:
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter

    moe = MoE.Config(
        num_experts=EXPERTS,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=WIDTH, hidden_dim=INNER, num_experts=EXPERTS),
            token_dispatcher=dispatcher,
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS, gate=Linear.Config(in_features=WIDTH, out_features=EXPERTS), top_k=TOP_K
        ),
    ).build()
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
    return moe


def step(moe: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 5 + rank, WIDTH, generator=g).requires_grad_()
    y = moe(x)
    y.backward(torch.randn(y.shape, generator=g))
    results = {"y": y.detach(), "x": x.grad}
    for name, parameter in moe.named_parameters():
        gradient = parameter.grad
        results[name] = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return results


def in_titans_moe(rank: int, backend: str):
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    size = {"num_experts": EXPERTS, "top_k": TOP_K}
    results = {}
    for name, config in (
        ("ours", config_of(EXPERTS, TOP_K, WIDTH, 16)),
        ("theirs", AllToAllTokenDispatcher.Config(**size)),
        ("alone", LocalTokenDispatcher.Config(**size)),
        ("ours alone", config_of(EXPERTS, TOP_K, WIDTH, 16)),
    ):
        # Theirs passes uneven splits to a collective that gloo lacks, if the back end is spmd_types.
        on = backend if "ours" in name else "full_dtensor"
        set_spmd_backend(on)
        moe = titan_moe(config)
        experts = moe.routed_experts.inner_experts
        if "alone" not in name:
            for key, whole in list(experts.named_parameters()):
                setattr(experts, key, nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)])))
        moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=None if "alone" in name else mesh)
        with set_current_spmd_mesh(mesh) if on == "spmd_types" else contextlib.nullcontext():
            results[name] = step(moe, rank)
    assert isinstance(moe.routed_experts.token_dispatcher, TorchtitanDispatcher)

    def near(got: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
        assert got.shape == want.shape, what
        wrong, scale = (got - want).abs().max().item(), want.abs().max().item()
        assert scale > 0 and wrong <= bound * scale, f"{what}: off by {wrong:.3g} where the largest is {scale:.3g}"

    # Experts compute in bfloat16 on equal rows; only the order of float32 sums of top_k rows differs.
    for name, want in results["theirs"].items():
        near(results["ours"][name], want, 1e-5, f"{name} of ranks")
    for name, want in results["alone"].items():
        near(results["ours alone"][name], want, 1e-5, f"{name} of one rank")
    for name in ("y", "x"):
        near(results["ours"][name], results["alone"][name], 1e-5, f"{name} of ranks and of one rank")
    # Experts' gradients are over all ranks' tokens, rounded to bfloat16 once here and once per rank there.
    for name, alone in results["alone"].items():
        if "inner_experts" in name:
            whole = alone.clone()
            dist.all_reduce(whole)
            near(results["ours"][name], whole.chunk(4)[rank], 2**-7, f"{name} of all ranks' tokens")
    return True


@needs_torchtitan
@pytest.mark.multi
@pytest.mark.parametrize("backend", ["spmd_types", "full_dtensor"])
def test_in_torchtitan_moe(backend):
    assert run_ranks(in_titans_moe, 4, backend) == [True] * 4
