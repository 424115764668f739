"""parallelize_module with ExpertParallel, alone and under FSDP, against a dense mixture in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import assert_near, dense, expert, matrices_of, tokens_of
from rank_processes import run_ranks
from test_agreement import environment_of
from test_threads import Turns, in_threads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.runtime.dtensor.fsdp import adapt_fsdp
from shardweave.runtime.integrations.torchtitan import TorchtitanDispatcher
from shardweave.runtime.moe.parallel_style import ExpertParallel
from shardweave.runtime.moe.shard_tokens import gather_tokens, shard_tokens

HIDDEN = 8


class Experts(nn.Module):
    """The reference's experts; NaN in rows without a token, to find code that reads them."""

    def __init__(self, matrices: torch.Tensor) -> None:
        super().__init__()
        self.matrices = nn.Parameter(matrices.clone())

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        matrices = self.matrices.to_local()
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
        assert len(groups) == len(matrices)
        done = [expert(g, m) for g, m in zip(groups, matrices, strict=True)]
        return torch.cat([*done, torch.full_like(rest, float("nan"))])


def style(k: int, **more) -> ExpertParallel:
    return ExpertParallel(
        **with_options(**{"top_k": k, "hidden": HIDDEN, "max_tokens": 9, "dtype": torch.float32, **more})
    )


def passes(experts: nn.Module, t) -> dict[str, torch.Tensor]:
    x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
    y = experts(x, t.ids, weights)
    y.backward(t.gradient)
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad}


def check(results: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str) -> None:
    for name, got in results.items():
        assert_near(got, want[name], torch.float32, f"{name} of {what}")


def two_layers(rank: int, mesh, experts: int, align: int, save: str):
    """One style for two modules, by a pattern; T differs between ranks."""
    matrices = [matrices_of(experts, HIDDEN, torch.float32) * scale for scale in (1.0, -0.7)]
    model = nn.ModuleDict({"layers": nn.ModuleList(Experts(m) for m in matrices)})
    parallelize_module(model, mesh, {"layers.*": style(2, align=align, save=save)})
    counts = [9, 0, 3, 7]
    for layer, (module, whole) in enumerate(zip(model["layers"], matrices, strict=True)):
        tokens = [tokens_of(r, counts[r], 2, experts, HIDDEN, torch.float32, "holes", seed=layer) for r in range(4)]
        check(passes(module, tokens[rank]), dense(tokens[rank], whole), f"layer {layer}")
        total = sum(dense(t, whole)["matrices"] for t in tokens)
        mine = distribute_tensor(total, mesh, [Shard(0)]).to_local()
        gradient = module.matrices.grad
        if len(mine):  # a rank without experts has no gradients
            assert module.matrices.placements == gradient.placements == (Shard(0),)
            assert_near(gradient.to_local(), mine, torch.float32, f"matrices of layer {layer}")
        module.token_dispatcher.check()
    return len(mine)


CASES = [
    (8, 1, "buffer", [2, 2, 2, 2]),
    (10, 4, "copy", [3, 3, 3, 1]),
    (3, 1, "redispatch", [1, 1, 1, 0]),
]


def each_case(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    for experts, align, save, held in CASES:
        assert two_layers(rank, mesh, experts, align, save) == held[rank]


@pytest.mark.multi
def test_expert_parallel():
    run_ranks(each_case, 4)


def on_a_mesh_in_another_order(rank: int) -> None:
    """Experts are placed in order of the process group, as torch scatters and gathers shards."""
    mesh, pair = DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [1, 0])
    assert two_layers(rank, mesh, 8, 1, "buffer") == 2
    matrices = matrices_of(8, HIDDEN, torch.float32)
    module = parallelize_module(Experts(matrices), mesh, style(2))
    assert torch.equal(module.matrices.full_tensor(), matrices)
    assert torch.equal(module.matrices.to_local(), matrices[2 * rank : 2 * rank + 2])
    for experts in (10, 3):
        module = Experts(matrices_of(experts, HIDDEN, torch.float32))
        with pytest.raises(UnsupportedError, match=rf"{experts} experts on ranks \[2, 0, 3, 1\].*a multiple of 4"):
            parallelize_module(module, mesh, style(2))
        assert not isinstance(module.matrices, DTensor)
        seam = TorchtitanDispatcher.Config(num_experts=experts, top_k=1, hidden_dim=8, num_max_tokens_per_rank=4)
        with pytest.raises(UnsupportedError, match=rf"{experts} experts on ranks \[2, 0, 3, 1\]"):
            seam.build().wire_meshes(ep_mesh=mesh)
    if rank < 2:
        with pytest.raises(UnsupportedError, match=r"replicated_over: ranks \[1, 0\] do not ascend"):
            style(2, replicated_over=pair)


@pytest.mark.multi
def test_expert_parallel_on_descending_ranks():
    run_ranks(on_a_mesh_in_another_order, 4)


class Interrupted(Experts):
    """Does something else between dispatch and combine."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        y = super().forward(x, offsets)
        self.meanwhile()
        return y


def forward_that_raises(rank: int) -> None:
    """The next call is right, and so are tensors that other code saves for its backward."""
    mesh, matrices = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), matrices_of(4, HIDDEN, torch.float32)
    module = parallelize_module(Interrupted(matrices), mesh, style(2, save="redispatch"))

    def fail() -> None:
        raise ValueError("no experts today")

    module.meanwhile = fail
    t = tokens_of(rank, 5, 2, 4, HIDDEN, torch.float32, "uniform")
    with pytest.raises(ValueError, match="no experts today"):
        passes(module, t)
    x = t.x.clone().requires_grad_()
    x.square().sum().backward()
    assert torch.equal(x.grad, 2 * t.x)
    del module.meanwhile
    check(passes(module, t), dense(t, matrices), "the next call")


@pytest.mark.multi
def test_forward_that_raises():
    run_ranks(forward_that_raises, 2)


def microbatches_of_threads(rank: int, transport: str) -> None:
    """dispatch, dispatch, combine, combine of two threads, then backward of both, among ranks of which pairs share
    tokens or none do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    matrices, number = matrices_of(6, HIDDEN, torch.float32), 3
    for over, save in ((None, "buffer"), (None, "redispatch"), (mesh["tp"], "copy")):
        options = {"save": save, "replicated_over": over, "transport": transport}
        module = parallelize_module(Interrupted(matrices), mesh["ep"], style(2, **options))
        source = rank if over is None else rank // 2
        tokens = [tokens_of(source, 9 - 4 * i, 2, 6, HIDDEN, torch.float32, "holes", i) for i in range(number)]
        turns, thread = Turns(), threading.local()

        def yield_turn(turns: Turns = turns, thread: threading.local = thread) -> None:
            turns.end()
            turns.begin(number + thread.number)

        module.meanwhile = yield_turn

        def microbatch(i: int, module=module, tokens=tokens, turns=turns, thread=thread) -> dict[str, torch.Tensor]:
            thread.number, t = i, tokens[i]
            x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
            turns.begin(i)
            y = module(x, t.ids, weights)
            turns.end()
            turns.run(2 * number + i, lambda: y.backward(t.gradient))
            return {"y": y.detach(), "x": x.grad, "weights": weights.grad}

        each = in_threads(*[lambda i=i: microbatch(i) for i in range(number)])
        for i, (t, results) in enumerate(zip(tokens, each, strict=True)):
            check(results, dense(t, matrices), f"microbatch {i}, {options}")


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_threads_in_one_module(transport: str):
    run_ranks(microbatches_of_threads, 4, transport, environment=environment_of(transport))


def recomputed_in_between(rank: int) -> None:
    """The backward of a checkpointed call runs the module again while another call of it computes."""
    mesh, matrices = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), matrices_of(4, HIDDEN, torch.float32)
    module = parallelize_module(Interrupted(matrices), mesh, style(2))
    first, second = (tokens_of(rank, n + rank, 2, 4, HIDDEN, torch.float32, "uniform", n) for n in (3, 5))
    x = first.x.clone().requires_grad_()
    y = checkpoint(module, x, first.ids, first.weights, use_reentrant=False)

    def backward() -> None:
        del module.meanwhile
        y.backward(first.gradient)

    module.meanwhile = backward
    check(passes(module, second), dense(second, matrices), "the interrupted call")
    check({"y": y.detach(), "x": x.grad}, dense(first, matrices), "the checkpointed call")


@pytest.mark.multi
def test_recomputation_within_a_call():
    run_ranks(recomputed_in_between, 2)


def under_fsdp(rank: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    matrices = matrices_of(8, HIDDEN, torch.float32)
    module = parallelize_module(Experts(matrices), mesh["ep"], style(3))
    fully_shard(module, mesh=mesh["fsdp"])
    adapt_fsdp(module)
    spelt = str(module.matrices.placements)
    tokens = [tokens_of(r, 5 + r, 3, 8, HIDDEN, torch.float32, "zipf") for r in range(4)]
    check(passes(module, tokens[rank]), dense(tokens[rank], matrices), "this rank")
    # FSDP averages over its mesh dim; over ep gradients are sums already.
    total = sum(dense(t, matrices)["matrices"] for t in tokens) / 2
    gradient = module.matrices.grad
    assert isinstance(gradient, DTensor)
    assert_near(gradient.full_tensor(), total, torch.float32, "matrices")
    assert module.matrices.to_local().shape[0] == 2
    return spelt


@pytest.mark.multi
def test_expert_parallel_with_fully_shard():
    (spelt,) = set(run_ranks(under_fsdp, 4))
    assert "_StridedShard" in spelt and spelt.endswith("Shard(dim=0))"), spelt


def beside_tensor_parallelism(rank: int) -> list[int]:
    """Two ranks each hold equal tokens: an odd number, one, or none; each token is dispatched once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    matrices, sent = matrices_of(6, HIDDEN, torch.float32), []
    for over in (everyone, mesh["ep"]):
        for counts in ((7, 4), (1, 0), (0, 0)):
            module = parallelize_module(
                Experts(matrices), over, style(2, replicated_over=mesh["tp"], chunk_capacity=1.0, overflow="raise")
            )
            tokens = [tokens_of(r, n, 2, 6, HIDDEN, torch.float32, "uniform") for r, n in enumerate(counts)]
            mine = tokens[rank // 2]
            check(passes(module, mine), dense(mine, matrices), f"{counts} tokens")
            total = sum(dense(t, matrices)["matrices"] for t in tokens)
            gradient = module.matrices.grad
            # The last ranks' experts may have no tokens.
            local = torch.zeros_like(module.matrices.to_local()) if gradient is None else gradient.to_local()
            if over is not everyone:
                dist.all_reduce(local, group=mesh.get_group("tp"))
            assert_near(local, distribute_tensor(total, over, [Shard(0)]).to_local(), torch.float32, "matrices")
            seen = module.token_dispatcher.dispatch(*[
                shard_tokens(x, mesh["tp"]) for x in (mine.x, mine.ids, mine.weights)
            ])  # fmt: skip
            sent.append(int(seen.load().per_physical_expert.sum()))
            module.token_dispatcher.check()
    with pytest.raises(ArgumentError, match=r"y: 9 rows; allowed: [32], this rank's share of 5 tokens"):
        gather_tokens(torch.zeros(9, 1), mesh["tp"], 5)
    with pytest.raises(ArgumentError, match="mesh: 2 dims; allowed: 1"):
        shard_tokens(torch.zeros(9, 1), mesh)
    with pytest.raises(ArgumentError, match="replicated_over: 3; allowed: a 1-D DeviceMesh, or None"):
        style(2, replicated_over=3)
    return sent


@pytest.mark.multi
def test_replicated_over_dispatches_shares():
    for rank, sent in enumerate(run_ranks(beside_tensor_parallelism, 4)):
        # Over all ranks, all (token, k) pairs; over the ranks of one tp coordinate, those of their shares.
        assert sent[:3] == [2 * 11, 2, 0]
        assert sent[3:] == [2 * (4 + 2) if rank % 2 == 0 else 2 * (3 + 2), 2 if rank % 2 == 0 else 0, 0]


def refused(rank: int):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    uneven = nn.Linear(4, 3)
    uneven.bias = nn.Parameter(torch.zeros(5))
    texts = []
    for module in (uneven, nn.Identity()):
        with pytest.raises(ArgumentError) as raised:
            parallelize_module(module, mesh, style(1))
        texts.append(str(raised.value))
    experts = parallelize_module(Experts(matrices_of(4, HIDDEN, torch.float32)), mesh, style(1))
    x = torch.zeros(2, HIDDEN)
    for given in ((x,), (distribute_tensor(x, mesh, [Shard(0)]), torch.zeros(2, 1), torch.zeros(2, 1))):
        with pytest.raises(ArgumentError) as raised:
            experts(*given)
        texts.append(str(raised.value))
    dist.barrier()
    return texts


@pytest.mark.multi
def test_expert_parallel_refuses_arguments():
    for texts in run_ranks(refused, 2):
        assert "{'weight': 3, 'bias': 5} experts" in texts[0] and "{} experts" in texts[1]
        assert "inputs: (Tensor); allowed" in texts[2] and "inputs: (DTensor, Tensor, Tensor)" in texts[3]
