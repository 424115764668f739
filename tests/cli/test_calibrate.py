"""`calibrate`: the fit, the ranks, the errors, and plans on the measured topology."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import run_python

import shardweave
from shardweave import Layout, Link, Mesh, Topology
from shardweave.__main__ import main
from shardweave.cli.calibrate import predicted_us
from shardweave.cli.link_fit import Local, Sample, fit_link
from shardweave.cli.link_times import sizes_up_to
from shardweave.planner.cost.step_cost import step_price
from shardweave.planner.exchange.layout_change import LayoutChange

SHARDWEAVE = [sys.executable, "-m", "shardweave"]
SIZES = sizes_up_to(1 << 20)


LOCAL = Local(35.0, 900.0)


def samples(link: Link, local: Local, peers: tuple[int, ...]) -> list[Sample]:
    """Simulated times of a link, on ranks with the given local costs."""
    topology = Topology("exact", None, link, link, local.memory_gigabytes_per_s, local.call_us)
    found = []
    for count in peers:
        for size in SIZES:
            sample = Sample(count, size, size // count + (0 if link.one_sided else 2 * size), 0.0)
            found.append(Sample(count, size, sample.copied, predicted_us(topology, "node", sample)))
    return found


def figures(link: Link) -> list[float]:
    return [link.latency_us, link.gigabytes_per_s, link.message_us]


LINKS = [
    Link(20.0, 25.0, False, 3.5),
    Link(150.0, 0.3, False, 40.0),
    Link(5.0, 450.0, True),
    Link(0.5, 2.25, True),
    Link(40.0, 1.5, True, 120.0),  # more ranks than cores
]


@pytest.mark.plan
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_fit_recovers_exact_parameters(link: Link) -> None:
    fit = fit_link(samples(link, LOCAL, (1, 3, 7)), link.one_sided, LOCAL)
    assert figures(fit.link) == pytest.approx(figures(link), rel=1e-3)
    assert fit.link.one_sided == link.one_sided and not fit.notes


@pytest.mark.plan
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("node_size", [None, 1])
def test_predicted_times_equal_planner_costs(ranks: int, node_size: int | None) -> None:
    """The planner's cost of the measured exchange, [2, 2 n, n k] float32 from S1 to S2, is the fitted time."""
    topology = Topology("any", node_size, Link(5.0, 3.0, True), Link(40.0, 0.5, False, 7.0), 9.0, 11.0)
    k = 24
    shape = 2, 2 * ranks, ranks * k
    swap = LayoutChange(Mesh((ranks,)), "float32", Layout.parse("S1"), Layout.parse("S2"), node_size)
    moved, kept = 16 * k * (ranks - 1), 16 * k
    kind, copied = ("node", kept) if node_size is None else ("network", kept + 2 * moved)
    expected = predicted_us(topology, kind, Sample(ranks - 1, moved, copied, 0.0))
    assert topology.call_us + step_price(swap, shape, topology).us == pytest.approx(expected)


def checked(text: str) -> Topology:
    """The topology in the output of a command, after a round trip through JSON and a plan."""
    topology = Topology.from_json(text)
    assert Topology.from_json(topology.to_json()) == topology
    assert topology.memory_gigabytes_per_s > 0 and topology.call_us > 0
    for link in (topology.node, topology.network):
        assert (
            link.gigabytes_per_s > 0 and min(link.latency_us, link.message_us) >= 0
        )  # 0: bytes explain all of the time
    program = shardweave.plan((2, 2), (64, 64), "float32", "S0 S1", "R R", topology=topology)
    assert program.cost_us is not None and program.cost_us > 0
    return topology


@pytest.mark.multi
@pytest.mark.parametrize(
    ("arguments", "node_size", "one_sided", "text"),
    [
        (["--ranks", "4", "--node-size", "2"], 2, True, "network: process_group transport, every pair of ranks"),
        pytest.param(
            ["--ranks", "2", "--name", "two of mine"],
            None,
            True,
            "No network was measured: all ranks share one node.",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--ranks", "4", "--transport", "process_group"],
            None,
            False,
            "`network` has the figures as inside the node",
            marks=pytest.mark.long,
        ),
    ],
)
def test_plan_on_measured_topology(
    arguments: list[str], node_size: int | None, one_sided: bool, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "topology.json"
    done = run_python(
        [*SHARDWEAVE, "calibrate", "--largest", "4096", "--out", str(file), *arguments],
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    topology = checked(done.stdout)
    assert topology == checked(file.read_text())
    assert topology.node_size == node_size and topology.node.one_sided == one_sided
    assert not topology.network.one_sided
    assert topology.name == "two of mine" or "rank" in topology.name
    assert text in " ".join(done.stderr.split())
    plan = [*SHARDWEAVE, "plan", "--mesh", "2,2", "--shape", "64,64", "--topology", str(file), "S0 S1", "R R", "--json"]
    planned = run_python(plan, timeout=100)
    assert planned.returncode == 0 and json.loads(planned.stdout)["steps"], planned.stderr


@pytest.mark.multi
@pytest.mark.long
def test_calibrate_in_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shardweave", "calibrate", "--largest", "4096", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert checked(done.stdout) == checked(file.read_text())


@pytest.mark.plan
@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (["--ranks", "1"], {}, "--ranks: 1; allowed: 2 or more"),
        (["--ranks", "4", "--node-size", "3"], {}, "--node-size: 3; allowed: a divisor of 4"),
        (["--largest", "100"], {}, "--largest: 100; allowed: 4096 bytes or more"),
        (["--out", "/nowhere/at/all.json"], {}, "--out: '/nowhere/at/all.json' cannot be written"),
        (["--transport", "carrier pigeon"], {}, "invalid choice"),
        ([], {"SHARDWEAVE_TRANSPORT": "pigeon"}, "--transport: 'pigeon' is not known; allowed: shared_memory, "),
        ([], {"SHARDWEAVE_TIMEOUT": "soon"}, "SHARDWEAVE_TIMEOUT: 'soon'"),
        (["--ranks", "3"], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "inside torchrun with 2"),
        ([], {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, "--ranks: 1; allowed: 2 or more"),
    ],
)  # fmt: skip
def test_invalid_arguments_exit_with_2(
    arguments: list[str],
    environment: dict[str, str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardweave.bench.harness.ranks._Rank", None)  # starts no rank
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        status: object = main(["calibrate", *arguments])
    except SystemExit as end:  # raised by argparse
        status = end.code
    shown = capsys.readouterr()
    assert status == 2 and shown.out == "" and text in shown.err
