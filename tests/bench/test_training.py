"""The example that trains: equal losses on real ranks, and that unequal ones would be noticed."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
from warm_python import run_python

from shardweave.bench.suites.training import LENGTH, TOLERANCE, batch, main, outcome_of, text


@pytest.mark.multi
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        (4, "shared_memory"),
        pytest.param(4, "process_group", marks=pytest.mark.long),
        pytest.param(8, "shared_memory", marks=pytest.mark.long),
    ],
)
def test_both_sides_train_alike(ranks: int, transport: str, tmp_path: Path) -> None:
    report = tmp_path / "training.json"
    done = run_python(
        [sys.executable, "-m", "shardweave.bench.suites.training"]
        + ["--ranks", str(ranks), "--steps", "3", "--json", str(report)],
        env={**os.environ, "SHARDWEAVE_TRANSPORT": transport},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (
        done.stdout.startswith(f"`{found['command']}`, {found['date']}.\n") and found["machine"]["cpu"] in done.stdout
    )
    theirs, ours = found["losses"]["torch"], found["losses"]["shardweave"]
    assert len(theirs) == len(ours) == 6
    if ranks == 4:  # two terms a sum
        assert found["exact"] and theirs == ours and found["parameters_equal"]
    else:
        assert not found["exact"] and found["largest_difference"] <= TOLERANCE
    assert ours[0] == pytest.approx(math.log(256), rel=0.1) and ours[-1] < 0.8 * ours[0]
    assert list(found["calls"]) == [transport] and found["calls"][transport] % 3 == 0
    assert not found["delegations"]


def faults(ours: list[list[float]], theirs: list[list[float]], equal: bool = True) -> list[str]:
    """Of steps of ranks that sent these losses."""
    last = {"parameters_equal": equal, "parameters": 1, "calls": {}, "delegations": {}}
    by_rank = [
        [{"torch": {"loss": a, "seconds": 1.0}, "shardweave": {"loss": b, "seconds": 1.0}} for a, b in steps]
        for steps in (list(zip(x, y, strict=True)) for x, y in zip(zip(*theirs), zip(*ours), strict=True))  # noqa: B905
    ]
    return outcome_of([[*steps, last] for steps in by_rank])["faults"]


@pytest.mark.plan
def test_unequal_losses_are_faults() -> None:
    same = [[5.5, 5.5, 5.25, 5.25], [4.0, 4.0, 3.5, 3.5]]
    assert faults(same, same) == [] and "parameters" in faults(same, same, equal=False)[0]
    for wrong in (math.nextafter(3.5, 4), math.nan):
        other_loss, other_replica = faults([same[0], [4.0, 4.0, 3.5, wrong]], same)
        assert "step 2, rank 3" in other_loss and "ranks 2 and 3" in other_replica
    # Of more than two terms there is a tolerance; ranks along tp, of 2×4, agree all the same.
    close, far = 4 * (1 + TOLERANCE / 2), 4 * (1 + TOLERANCE * 2)
    theirs = [[4.0] * 8] * 2
    assert faults([[close] * 8] * 2, theirs, equal=False) == [] and len(faults([[far] * 8] * 2, theirs)) == 16
    one = [[4.0] * 7 + [close], [4.0] * 8]
    assert faults(one, theirs) == [f"step 1: ranks 4 and 7 have losses 4.0 and {close!r}"]


@pytest.mark.plan
def test_the_text_and_its_batches() -> None:
    data = text()
    header = bytes(data[:200].tolist()).decode()
    assert len(data) > 10_000 and data.max() < 128 and header.startswith("Source: ") and "public domain" in header
    tokens, following = batch(data, 3, 1, 2)
    assert tokens.shape == following.shape == (4, LENGTH) and tokens[:, 1:].equal(following[:, :-1])
    assert batch(data, 3, 1, 2)[0].equal(tokens) and not batch(data, 3, 0, 2)[0].equal(tokens)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--ranks", "6"), "allowed: 2, 4, 8"),
        (("--ranks", "1"), "--ranks: 1"),
        (("--steps", "1"), "allowed: 2 or more"),
        (("--json", "/no/where.json"), "cannot be written"),
    ],
)
def test_a_bad_option_is_one_error_and_status_2(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and text in said.err
