"""Rowwise embeddings, gathers and norms under `install()`: partials with transforms before and after sums."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardweave

pytestmark = pytest.mark.multi
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def embedded(rank: int) -> None:
    """Every layout of a rowwise embedding's result and its weight's gradient, against one process."""
    stats = shardweave.stats()
    for mesh_shape, weight_at in [((4,), (S0,)), ((2, 2), (R, S0)), ((2, 2), (S0, R)), ((1, 4), (S0, R))]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for rows, width, tokens in [(13, 6, (5, 3)), (3, 4, (4, 2)), (16, 8, (2, 8))]:
            torch.manual_seed(rows)
            weight, ids = torch.randn(rows, width), torch.randint(rows, tokens)
            cotangent = torch.randn(*tokens, width)
            plain = weight.clone().requires_grad_()
            want = functional.embedding(ids, plain)
            want.backward(cotangent)
            for target in product((R, S0, S1, S2), repeat=mesh.ndim):
                stats.reset()
                leaf = distribute_tensor(weight, mesh, weight_at, src_data_rank=None).requires_grad_()
                spread = DTensor.from_local(ids, mesh, [R] * mesh.ndim, run_check=False)
                found = functional.embedding(spread, leaf)
                found = found.redistribute(placements=target)
                assert found.placements == target
                assert found.full_tensor().equal(want), (mesh_shape, weight_at, target)
                given = distribute_tensor(cotangent, mesh, target, src_data_rank=None)
                found.backward(given)
                torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad, rtol=1e-6, atol=1e-6)
                assert not stats.delegations, stats.delegations


def test_rowwise_embeddings() -> None:
    run_ranks(embed_installed, 4)


def embed_installed(rank: int) -> None:
    with shardweave.installed():
        embedded(rank)


def gathered(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x, index = torch.randn(7, 9), torch.randint(7, (1, 9))
    with shardweave.installed():
        spread = distribute_tensor(x, mesh, (S0,), src_data_rank=None)
        found = torch.gather(spread, 0, DTensor.from_local(index, mesh, (R,), run_check=False))
        assert isinstance(found.placements[0], _MaskPartial)
        assert found.redistribute(placements=(S1,)).full_tensor().equal(torch.gather(x, 0, index))
    assert not shardweave.stats().delegations


def test_gather_along_the_sharded_dim() -> None:
    run_ranks(gathered, 4)


def norms(rank: int) -> None:
    """Partial norms of a tensor to each layout, against float64."""
    stats = shardweave.stats()
    shardweave.install()
    for mesh_shape in [(4,), (2, 2), (4, 1)]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for p, dtype in product((1, 2, 3.5), (torch.float32, torch.float64)):
            generator = torch.Generator().manual_seed(rank)
            local = torch.rand(6, 5, generator=generator, dtype=dtype)[:, ::2]
            everyone = [torch.rand(6, 5, generator=torch.Generator().manual_seed(r), dtype=dtype) for r in range(4)]
            terms = torch.stack(everyone)[:, :, ::2].double()
            for at in range(mesh.ndim):
                # Along the other mesh dims ranks hold shards or replicas of the sum of their row.
                for source, target in product((R, S0, S1), repeat=2):
                    partial = [_NormPartial(p)] * mesh.ndim
                    expected = [target if m == at else source for m in range(mesh.ndim)]
                    tensor = DTensor.from_local(local, mesh, partial, run_check=False)
                    stats.reset()
                    found = tensor.redistribute(placements=expected)
                    assert not stats.delegations, stats.delegations
                    whole = found.full_tensor()
                    exact = terms.pow(p).sum(0).pow(1 / p)
                    # Powers and roots have an error of a few ulp each, the sum of 4 terms of at most 3.
                    eps = torch.finfo(dtype).eps
                    assert ((whole.double() - exact).abs() <= 16 * eps * exact).all(), (mesh_shape, p, expected)


def test_norms_of_any_power() -> None:
    run_ranks(norms, 4)


def clipped(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(1)
    shapes = [(7, 3), (4, 4), (5,)]
    layouts = [(S0, S1), (S0, R), (R, S0)]
    with shardweave.installed():
        leaves = []
        for shape, placements in zip(shapes, layouts, strict=True):
            leaf = distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None).requires_grad_()
            leaf.grad = distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None)
            leaves.append(leaf)
        want = torch.cat([leaf.grad.full_tensor().flatten() for leaf in leaves]).double().norm()
        shardweave.stats().reset()
        found = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert not shardweave.stats().delegations, shardweave.stats().delegations
    assert abs(found.double() - want) <= 1e-6 * want


def test_gradient_norms() -> None:
    run_ranks(clipped, 4)


def what_is_left(rank: int) -> None:
    """Norms do not commute with the sums of other partials: delegated and counted."""
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.rand(4, 4)
    with shardweave.installed():
        shardweave.stats().reset()
        DTensor.from_local(local, mesh, (Partial(), _NormPartial(2)), run_check=False).redistribute(placements=(R, R))
        assert any("one kind of partial" in reason for reason in shardweave.stats().delegations)
        # The first reduction releases a mask, with and without shardweave.
        weight = distribute_tensor(torch.randn(8, 4), mesh, (R, S0), src_data_rank=None)
        ids = DTensor.from_local(torch.randint(8, (6,)), mesh, (R, R), run_check=False)
        found = functional.embedding(ids, weight)
        found.redistribute(placements=(R, R))
        with pytest.raises(RuntimeError, match="not been materialized"):
            found.redistribute(placements=(R, R))


def test_unsupported_transforms_are_delegated() -> None:
    run_ranks(what_is_left, 4)


def _parallel_net(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = {"0": RowwiseParallel(input_layouts=R), "1": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def _save_collectives(context: object, op: object, *args: object, **options: object) -> CheckpointPolicy:
    saved = "c10d" in str(op) and "wait" not in str(op)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def trained(rank: int) -> list[float]:
    """Losses and gradients of steps with new indices each, in a checkpointed region, and results in inference mode."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    net, contexts = _parallel_net(mesh), partial(create_selective_checkpoint_contexts, _save_collectives)
    for step in range(3):
        torch.manual_seed(step)
        ids = torch.randint(10, (2, 4))
        loss = checkpoint(net, ids, use_reentrant=False, context_fn=contexts).square().sum()
        loss.backward()
        with torch.inference_mode():
            found.append(net(ids.flip(0)).sum().item())
        found += [loss.item(), net[0].weight.grad.full_tensor().sum().item()]
    with torch.no_grad():
        found.append(net(torch.randint(10, (3, 5))).sum().item())
    return found


def trained_as_torch_does(rank: int) -> None:
    stats, want = shardweave.stats(), trained(rank)
    with shardweave.installed():
        assert trained(rank) == want
    assert stats.calls and not stats.delegations, stats


def test_embeddings_in_checkpointed_regions_and_in_inference_mode() -> None:
    """A mask lives from the look-up to the sum: recomputed regions and inference mode release it as well."""
    run_ranks(trained_as_torch_does, 2)
