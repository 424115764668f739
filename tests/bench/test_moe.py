"""The example with experts: losses of real ranks equal to one process's, and that unequal ones would be noticed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import run_python

from shardweave.bench.baselines import torchtitan_dispatch
from shardweave.bench.suites import moe
from shardweave.bench.workloads.moe_model import Experts, ExpertSizes, MixtureOfExperts


def _run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    report = tmp_path / "moe.json"
    done = run_python(
        [sys.executable, "-m", "shardweave.bench.suites.moe", *arguments, "--json", str(report)],
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert done.stdout.startswith(f"`python -m shardweave.bench.suites.moe {' '.join(arguments)}")
    assert found["date"] in done.stdout and found["machine"]["commit"][:12] in done.stdout
    return found, done.stdout


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [4, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_train_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    """Three ranks have three, three and two of eight experts, as torch.chunk gives them."""
    found, shown = _run(tmp_path, "--ranks", str(ranks), "--steps", "3")
    ours, alone = found["losses"]["ranks"], found["losses"]["one process"]
    assert len(ours) == len(alone) == 3 and not found["faults"]
    # So few steps carry nothing on yet: what is left are the float32 roundings of a step.
    assert ours == pytest.approx(alone, rel=2e-6)
    assert ours[0] == pytest.approx(math.log(256), rel=0.1) and ours[-1] < 0.95 * ours[0]
    assert "shared_memory: 8 experts as" in shown


@pytest.mark.multi
def test_experts_under_fsdp_train_as_one_process_does(tmp_path: Path) -> None:
    found, shown = _run(tmp_path, "--fsdp", "2", "--steps", "3")
    assert found["losses"]["ranks"] == pytest.approx(found["losses"]["one process"], rel=2e-6) and not found["faults"]
    assert "fsdp2 ep2" in shown and found["placements"].startswith("(_StridedShard(dim=0, sf=2), Shard(dim=0))")
    assert found["delegations"] == {} and set(found["calls"]) == {"shared_memory"}


@pytest.mark.plan
def test_one_process_is_the_mixture_in_float64() -> None:
    """The reference of the comparison, against every expert applied to every token."""
    torch.manual_seed(3)
    mixture = MixtureOfExperts(16, ExpertSizes(experts=5, top_k=3, hidden=12))
    x = torch.randn(2, 7, 16)
    got = mixture(x)
    wide, w = x.double().flatten(0, 1), {n: p.detach().double() for n, p in mixture.experts.named_parameters()}
    scores, ids = mixture.router(x).flatten(0, 1).double().topk(3, dim=-1)
    weights = scores.softmax(-1)
    want = torch.zeros_like(wide)
    for e in range(5):
        done = (torch.nn.functional.silu(wide @ w["w1"][e].T) * (wide @ w["w3"][e].T)) @ w["w2"][e].T
        want += (weights * (ids == e)).sum(1, keepdim=True) * done
    assert torch.allclose(got.flatten(0, 1).double(), want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.plan
def test_experts_read_their_groups_and_nothing_else() -> None:
    torch.manual_seed(4)
    experts = Experts(8, ExpertSizes(experts=3, top_k=1, hidden=8))
    x = torch.randn(9, 8)
    x[6:] = float("nan")
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    got = experts(x, offsets)
    assert got.shape == x.shape and got[:6].isfinite().all()
    only = experts(torch.cat((x[2:6], x[:2])), torch.tensor([0, 0, 4], dtype=torch.int32))
    assert torch.equal(only[:4], got[2:6])


@pytest.mark.plan
@pytest.mark.parametrize("loss", [5.002, math.nan])
def test_a_loss_that_differs_is_a_fault(loss: float) -> None:
    steps = [[{"loss": 5.0, "alone": 5.0}, {"loss": 4.0, "alone": loss}], [{"loss": 5.0}, {"loss": 6.0}]]
    by_rank = [[*own, dict.fromkeys(("explain", "parameters", "placements", "calls", "delegations"))] for own in steps]
    found = moe.outcome_of(by_rank, 1)
    assert found["losses"]["ranks"] == [5.0, 5.0] and len(found["faults"]) == 1
    by_rank[0][1]["alone"] = 5.0001
    assert not moe.outcome_of(by_rank, 1)["faults"]


@pytest.mark.plan
def test_a_layer_that_is_wrong_is_a_fault() -> None:
    """On one process, where dispatch is nothing: the oracle of the comparison finds what is off and only that."""
    g = torch.Generator().manual_seed(1)
    t, k, h = 6, torchtitan_dispatch.TOP_K, 8
    x = torch.randn(t, h, generator=g).requires_grad_()
    ids = torch.randint(0, torchtitan_dispatch.EXPERTS, (t, k), generator=g)
    weights = torch.rand(t, k, generator=g).requires_grad_()
    gradient = torch.randn(t, h, generator=g)

    def layer(shift: int, x, ids, weights, scale):
        return x * (weights * torchtitan_dispatch._factor(ids + shift).float()).sum(1, keepdim=True)

    given = (lambda rows, counts: rows), x, ids, weights, gradient
    assert not torchtitan_dispatch.faults_of(lambda *a: layer(0, *a), *given)
    assert [f.split()[0] for f in torchtitan_dispatch.faults_of(lambda *a: layer(1, *a), *given)] == [
        "y",
        "dx",
        "dweights",
    ]


@pytest.mark.plan
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks: 1; allowed"),
        (["--steps", "0"], "--steps: 0; allowed"),
        (["--json", "/nowhere/at/all.json"], "--json: '/nowhere/at/all.json' cannot be written"),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moe.main(arguments) == 2
    assert text in capsys.readouterr().err
