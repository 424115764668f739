"""A model that autoparallel shards, with torch's redistributions in its graph and with shardweave's.

`python -m shardweave.bench.baselines.autoparallel_model` has autoparallel's solver place its own Llama 3, with few
parameters, on a 2×2 mesh of CPU ranks, and applies the solution once for each side. Each side then takes one step,
forward and backward, from the same parameters. It fails where a loss or a gradient differs from torch's by more than
another order of sums explains.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend

import shardweave
from shardweave.integrations.autoparallel import ordered_redistribute_local_tensor

from ...errors import ArgumentError
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines, table
from ..harness.measure import INSTALL
from ..harness.ranks import RanksFailed, Send, messages_of
from ..harness.writable import check_writable
from .graph_collectives import in_graphs

SHAPE = (2, 2)
SEQUENCES, LENGTH, VOCABULARY = 8, 64, 256
SIZES = {"dim": 128, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY, "max_seq_len": LENGTH}
SLOWER = 1000  # than an H100 is what the solver computes with; on a faster GPU a small model is not worth sharding
TOLERANCE = 1e-5  # of the largest element of a gradient, and of the loss; float32
SIDES: dict[str, dict[str, Any] | None] = {
    "torch": None,
    "install()": {},
    'install(reduction="fast")': {"reduction": "fast"},
    "install(), ordered_redistribute_local_tensor": {},
}
"""The arguments of `install`; None: it is not called."""
_LOCAL = ": no collective, "
_REPLACED = "ordered_redistribute_local_tensor"


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank: sends a message for each side."""
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("dp", "tp"))
    models = import_module("autoparallel._testing.models.llama3")
    # The attention of CPUs that is one operator has no strategy but to replicate everything.
    models.ScaledDotProductAttention.backends = [SDPBackend.MATH]
    limits: Any = import_module("autoparallel.cost_models.compute_estimation")
    (gpu,) = (limit for limit in limits.DEVICE_LIMITS if limit.name == "H100")
    slow = replace(
        gpu,
        gmem_bandwidth=gpu.gmem_bandwidth / SLOWER,
        gemm_tflops={dtype: tflops / SLOWER for dtype, tflops in gpu.gemm_tflops.items()},
    )
    limits._get_device_limit = lambda: slow  # the solver asks for the GPU of this machine
    arguments = models.TransformerModelArgs(**SIZES, multiple_of=SIZES["dim"])
    torch.manual_seed(0)
    whole = models.Transformer(arguments)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH))  # inputs, and what follows them
    expected = _loss(whole, tokens)
    expected.backward()
    with torch.device("meta"):
        model = models.Transformer(arguments)

    def sample() -> torch.Tensor:
        return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), device=mesh.device_type)

    with import_module("autoparallel.api").AutoParallel(model, sample, mesh) as solver:
        solver.add_parameter_memory_constraint()
        solver.add_input_constraints([(Shard(0), Replicate())])
        solver.add_output_constraints([(Shard(0), Replicate())])
        if rank == 0:  # it takes a gigabyte
            solver.optimize_placement()
            solver.sharding_optimizer.save_placements(config["solution"])
        with unset_fake_temporarily():  # the solver's context is a fake tensor mode
            dist.barrier()
        solution = solver.sharding_optimizer.load_placements(config["solution"])
        applied = [_applied(solver, solution, side) for side in SIDES]
    torchs: dict[str, torch.Tensor] = {}
    for parallel, counted in applied:
        parallel.zero_grad()  # the modules of all sides share their parts
        parallel.to_empty(device=mesh.device_type)
        with torch.no_grad():
            for name, value in parallel.state_dict().items():
                value.copy_(_sharded(whole.state_dict()[name], value, mesh))
        results = _step(parallel, tokens.chunk(SHAPE[0], 1)[mesh.get_local_rank("dp")], mesh)
        torchs = torchs or results
        model_alone = {"loss": expected.detach()}
        for name, p in whole.named_parameters():
            model_alone[name] = _sharded(p.grad, parallel.get_parameter(name), mesh).to_local()
        send(
            {
                "loss": results["loss"].item(),
                "equal": sum(torch.equal(results[name], value) for name, value in torchs.items()),
                "results": len(torchs),
                "to torch": _difference(results, torchs),
                "to the model alone": _difference(results, model_alone),
                **counted,
            }
        )


def _applied(solver: Any, solution: Any, side: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The solver's model with one side's redistributions, the collectives in its graphs, and what shardweave counts."""
    applied = import_module("autoparallel.apply_sharding")
    before, stats = getattr(applied, _REPLACED), shardweave.stats()
    traced, delegations = Counter(stats.traced), Counter(stats.delegations)
    state = solver.joint_with_descriptors._aot_state
    before_compiling = state.fw_metadata
    state.fw_metadata = copy.copy(before_compiling)  # torch changes it when it compiles
    options = SIDES[side]
    if side.endswith(_REPLACED):
        setattr(applied, _REPLACED, ordered_redistribute_local_tensor)
    graphs: list[GraphModule] = []
    compiler = solver.compiler_fn

    def keep(graph: GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return compiler(graph, inputs, **options)

    solver.compiler_fn = keep
    with contextlib.nullcontext() if options is None else shardweave.installed(**options):
        parallel = solver.apply_placement(solution)
    solver.compiler_fn, state.fw_metadata = compiler, before_compiling
    setattr(applied, _REPLACED, before)
    forward, backward = map(in_graphs, ([graph] for graph in graphs[:2]))  # the third is forward without gradients
    return parallel, {
        "forward": str(forward),
        "backward": str(backward),
        "bytes": forward.received + backward.received,
        "traced": dict(stats.traced - traced),
        "delegations": dict(stats.delegations - delegations),
    }


def _sharded(whole: torch.Tensor, like: Any, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank has, placed like another. Nothing is communicated."""
    replicated = DTensor.from_local(whole, mesh, (Replicate(),) * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """What these sequences add to the mean over all of them."""
    entropy = F.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten(), reduction="sum")
    return entropy / (SEQUENCES * LENGTH)


def _step(model: torch.nn.Module, tokens: torch.Tensor, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Forward and backward: the loss, and this rank's shard of each gradient."""
    loss = _loss(model, tokens)
    loss.backward()
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    results = {name: gradient.to_local() for name, gradient in gradients.items()}
    results["loss"] = loss.detach().clone()
    dist.all_reduce(results["loss"], group=mesh.get_group("dp"))
    return results


def _difference(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any result, as a share of its largest expected element; NaN if there is a NaN."""
    shares = [(results[name] - value).abs().max() / value.abs().max() for name, value in expected.items()]
    return torch.stack(shares).max().item()


def page(by_rank: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[str], list[str]]:
    """The lines of the page, and the sides that are wrong."""
    heads = ("redistributions by", "loss", "equal to torch's", "difference to torch's", "to the model alone",
             "collectives, forward", "backward", "KiB received")  # fmt: skip
    rows, wrong, details = [], [], []
    for side, messages in zip(SIDES, zip(*by_rank, strict=True), strict=True):
        first = messages[0]
        far = [max(message[key] for message in messages) for key in ("to torch", "to the model alone")]
        if not all(message[key] <= TOLERANCE for message in messages for key in ("to torch", "to the model alone")):
            wrong.append(side)
        rows.append(
            [
                f"`{side}`" if "(" in side else side,
                f"{first['loss']:.7f}",
                f"{min(message['equal'] for message in messages)} of {first['results']}",
                *(f"{share:.1e}" for share in far),
                first["forward"],
                first["backward"],
                f"{max(message['bytes'] for message in messages) / 1024:.1f}",
            ]
        )
        if SIDES[side] is not None:
            details += ["", f"## `{side}`", ""]
            local = sum(n for text, n in first["traced"].items() if _LOCAL in text)
            counts = [(text, n) for text, n in sorted(first["traced"].items()) if _LOCAL not in text]
            counts += [("without a collective, those of the graph's inputs among them", local)]
            counts += [(f"left to torch: {text}", n) for text, n in sorted(first["delegations"].items())]
            details += table(("redistributions on rank 0", "count"), counts)
    return [*table(heads, rows), *details], wrong


def compare(out: Path | None = None) -> int:
    """Take a step by every side and print the page; 1 where one is wrong.

    Args:
        out: the page is also written there.

    Raises:
        ArgumentError: autoparallel is not installed, or `out` cannot be written.
        RanksFailed: a rank failed.
    """
    if find_spec("autoparallel") is None:
        raise ArgumentError(f"autoparallel is not installed; allowed: {INSTALL['autoparallel']}")
    check_writable("--out", out)
    import_module("autoparallel.api")  # once for all ranks
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        lines, wrong = page(messages_of(rank_main, SHAPE[0] * SHAPE[1], {"solution": file.name}))
    lines = ["# A model that autoparallel shards", "", *provenance_lines(provenance()), "", *_ABOUT, "", *lines]
    lines += ["", f"**wrong: {', '.join(wrong)}**"] if wrong else []
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return int(bool(wrong))


_ABOUT = f"""\
autoparallel, written for commit a54c252, places its own Llama 3 on a {SHAPE[0]}×{SHAPE[1]} mesh of CPU ranks with gloo:
{SIZES["n_layers"]} layer of width {SIZES["dim"]}, {SIZES["n_heads"]} heads, vocabulary {VOCABULARY}, float32,
{SEQUENCES} sequences of {LENGTH} tokens. Every parameter is in {SHAPE[0] * SHAPE[1]} shards, the output is sharded by
sequences. The solver computes with a GPU {SLOWER} times slower than an H100. Rank 0 solves; others load its solution.

Each side applies the solution with its own redistributions, and runs one step of the forward and backward graph that
torch makes of it. Bytes are those that a rank receives in both, the most of any rank.
Differences are the largest of the loss and of any gradient, as a share of its largest element. The model alone is the
same one in eager mode, unsharded. `ordered_redistribute_local_tensor`: shardweave's takes the place of autoparallel's
function of that name, which makes one dim of the mesh where all placements are equal.""".splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the page there")
    try:
        return compare(**vars(parser.parse_args(arguments)))
    except (shardweave.ShardweaveError, RanksFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
