"""The programs that train: losses of real ranks are equal, and unequal ones are noticed."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from warm_python import run_python

from shardweave.bench.baselines import token_layers
from shardweave.bench.suites import moe, training
from shardweave.bench.suites.moe import ExpertSizes, MixtureOfExperts
from shardweave.bench.suites.training import LENGTH, batch, text


def train(program: str, **options: int) -> tuple[dict[str, Any], str]:
    """The outcome, and what is shown, of three steps."""
    code = f"import json; from shardweave.bench.suites import {program} as p; o = p.run(**{ {'steps': 3, **options} })"
    done = run_python([sys.executable, "-c", f"{code}; p.show(o); print(json.dumps(o))"], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    shown, outcome = done.stdout.rstrip().rsplit("\n", 1)
    return json.loads(outcome), shown


@pytest.mark.multi
@pytest.mark.long
def test_both_sides_train_alike() -> None:
    outcome, shown = train("training")
    theirs, ours = outcome["losses"]["torch"], outcome["losses"]["shardweave"]
    assert len(theirs) == 6 and theirs == ours and "are equal to the bit" in shown
    assert ours[0] == pytest.approx(math.log(256), rel=0.1) and ours[-1] < 0.8 * ours[0]
    assert list(outcome["calls"]) == ["shared_memory"] and outcome["calls"]["shared_memory"] % 3 == 0
    assert not outcome["delegations"]


@pytest.mark.multi
@pytest.mark.long
def test_experts_train_as_on_one_process() -> None:
    outcome, shown = train("moe", fsdp=1)
    ours, alone = outcome["losses"]["ranks"], outcome["losses"]["one process"]
    assert len(ours) == len(alone) == 3 and not outcome["faults"]
    # So few steps carry nothing on yet: what is left are the float32 roundings of a step.
    assert ours == pytest.approx(alone, rel=2e-6)
    assert ours[0] == pytest.approx(math.log(256), rel=0.1) and ours[-1] < 0.95 * ours[0]
    assert "shared_memory: 8 experts as" in shown


@pytest.mark.multi
def test_experts_under_fsdp_train_as_on_one_process() -> None:
    outcome, shown = train("moe", fsdp=2)
    assert outcome["losses"]["ranks"] == pytest.approx(outcome["losses"]["one process"], rel=2e-6)
    assert not outcome["faults"] and "fsdp2 ep2" in shown
    assert outcome["placements"].startswith("(_StridedShard(dim=0, sf=2), Shard(dim=0))")
    assert outcome["delegations"] == {} and set(outcome["calls"]) == {"shared_memory"}


@pytest.mark.plan
@pytest.mark.parametrize("wrong", [math.nextafter(3.5, 4), math.nan])
def test_unequal_losses_are_faults(wrong: float) -> None:
    def outcome(loss: float, equal: bool = True) -> list[str]:
        last = {"parameters_equal": equal, "parameters": 1, "calls": {}, "delegations": {}}
        steps = [{side: {"loss": 3.5, "seconds": 1.0} for side in training.SIDES} for _ in range(4)]
        other = [*steps[:3], {**steps[3], "shardweave": {"loss": loss, "seconds": 1.0}}]
        return training.outcome_of([[*steps, last]] * 3 + [[*other, last]])["faults"]

    assert outcome(3.5) == [] and outcome(3.5, equal=False) == ["the parameters after the last step differ"]
    assert outcome(wrong) == [f"step 4, rank 3: loss {wrong!r}, torch's is 3.5"]


@pytest.mark.plan
@pytest.mark.parametrize("loss", [5.002, math.nan])
def test_unequal_losses_of_experts_are_faults(loss: float) -> None:
    steps = [[{"loss": 5.0, "alone": 5.0}, {"loss": 4.0, "alone": loss}], [{"loss": 5.0}, {"loss": 6.0}]]
    by_rank = [[*own, dict.fromkeys(("explain", "parameters", "placements", "calls", "delegations"))] for own in steps]
    outcome = moe.outcome_of(by_rank, 1)
    assert outcome["losses"]["ranks"] == [5.0, 5.0] and len(outcome["faults"]) == 1
    by_rank[0][1]["alone"] = 5.0001
    assert not moe.outcome_of(by_rank, 1)["faults"]


@pytest.mark.plan
def test_the_text_and_its_batches() -> None:
    data = text()
    header = bytes(data[:200].tolist()).decode()
    assert len(data) > 10_000 and data.max() < 128 and header.startswith("Source: ") and "public domain" in header
    tokens, following = batch(data, 3, 1, 2)
    assert tokens.shape == following.shape == (4, LENGTH) and tokens[:, 1:].equal(following[:, :-1])
    assert batch(data, 3, 1, 2)[0].equal(tokens) and not batch(data, 3, 0, 2)[0].equal(tokens)


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
def test_wrong_layer_is_a_fault() -> None:
    """On one process, where dispatch is nothing: the oracle of the comparison finds what is off and only that."""
    g = torch.Generator().manual_seed(1)
    t, k, h = 6, token_layers.TOP_K, 8
    x = torch.randn(t, h, generator=g).requires_grad_()
    ids = torch.randint(0, token_layers.EXPERTS, (t, k), generator=g)
    weights = torch.rand(t, k, generator=g).requires_grad_()
    gradient = torch.randn(t, h, generator=g)
    for shift, wrong in ((0, []), (1, ["y", "dx", "dweights"])):

        def layer(x, ids, weights, scale, shift=shift):
            return x * (weights * token_layers.factor(ids + shift).float()).sum(1, keepdim=True)

        found = token_layers.faults_of(layer, lambda rows, counts: rows, x, ids, weights, gradient)
        assert [fault.split()[0] for fault in found] == wrong


@pytest.mark.plan
@pytest.mark.parametrize(
    ("program", "options", "text"),
    [
        (training, ("--steps", "1"), "allowed: 2 or more"),
        (moe, ("--steps", "0"), "--steps: 0; allowed"),
        (moe, ("--fsdp", "3"), "--fsdp: 3; allowed: divisors of 4"),
    ],
)
def test_a_bad_option_is_one_error_and_status_2(
    program: Any, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(options) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and text in shown.err
