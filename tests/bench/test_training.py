"""The program that trains: losses of real ranks are equal, and unequal ones are noticed."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from warm_python import run_python

from shardweave.bench.baselines import token_layers
from shardweave.bench.suites import training
from shardweave.bench.suites.training import LENGTH, batch, text


@pytest.mark.multi
@pytest.mark.long
def test_both_sides_train_alike() -> None:
    code = "import json; from shardweave.bench.suites import training as p; o = p.run(steps=3)"
    done = run_python([sys.executable, "-c", f"{code}; p.show(o); print(json.dumps(o))"], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    shown, last = done.stdout.rstrip().rsplit("\n", 1)
    outcome = json.loads(last)
    theirs, ours = outcome["losses"]["torch"], outcome["losses"]["shardweave"]
    assert len(theirs) == 6 and theirs == ours and "are equal to the bit" in shown
    assert ours[0] == pytest.approx(math.log(256), rel=0.1) and ours[-1] < 0.8 * ours[0]
    assert list(outcome["calls"]) == ["shared_memory"] and outcome["calls"]["shared_memory"] % 3 == 0
    assert not outcome["delegations"]


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
def test_the_text_and_its_batches() -> None:
    data = text()
    header = bytes(data[:200].tolist()).decode()
    assert len(data) > 10_000 and data.max() < 128 and header.startswith("Source: ") and "public domain" in header
    tokens, following = batch(data, 3, 1, 2)
    assert tokens.shape == following.shape == (4, LENGTH) and tokens[:, 1:].equal(following[:, :-1])
    assert batch(data, 3, 1, 2)[0].equal(tokens) and not batch(data, 3, 0, 2)[0].equal(tokens)


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
def test_too_few_steps_are_one_error_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert training.main(["--steps", "1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and "allowed: 2 or more" in shown.err
