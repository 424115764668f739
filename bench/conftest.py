"""`pytest bench/`: the suites, as pytest-benchmark's benchmarks.

Calls are timed where they run: on every rank, in turns with the other contenders. pytest-benchmark gets the rounds as
they were measured: its timer is a clock that advances by them, so that its storage (`--benchmark-json`) and its
comparison (`--benchmark-compare`, `pytest-benchmark compare`) work as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from shardweave.bench.harness.measure import measure, suite
from shardweave.bench.harness.results import Results
from shardweave.bench.suites import SCALES

_PLAIN = str.maketrans({"×": "x", "→": "->", "÷": "/"})  # pytest writes codes for letters that are not ASCII
_CLOCK = [0.0]


def measured_time() -> float:
    """A clock for pytest-benchmark."""
    return _CLOCK[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardweave")
    group.addoption("--scale", choices=SCALES, default="full", help="of the suites (default: %(default)s)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = getattr(metafunc.module, "SUITE", None)
    if name is None or "record" not in metafunc.fixturenames:
        return
    metafunc.parametrize(
        ("case", "contender"),
        [
            pytest.param(
                case, contender, id=f"{case} | {contender}".translate(_PLAIN),
                marks=pytest.mark.benchmark(timer=measured_time, group=f"{name}: {case}"),
            )
            for case, contenders in suite(name).cases(metafunc.config.getoption("scale")).items()
            for contender in contenders
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """The module's suite, measured for the selected cases and all of their contenders."""
    selected: dict[str, None] = dict.fromkeys(
        str(item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
    )
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # it takes minutes, and shows its progress
        return measure({request.module.SUITE: list(selected)}, request.config.getoption("scale"))


@pytest.fixture
def record(request: pytest.FixtureRequest, results: Results, case: str, contender: str) -> Callable[[], None]:
    """Plays the rounds of one contender on one case to pytest-benchmark; fails where its result was wrong."""

    def play() -> None:
        for one in results.absent:
            if one.key[1:] == (case, contender):
                pytest.skip(one.why)
        row = next((row for row in results.rows if row.key[1:] == (case, contender)), None)
        if row is None:
            faults = [one.why for one in results.faults if one.key[1:] in ((case, contender), ("", ""))]
            pytest.fail("; ".join(faults), pytrace=False)
        rounds = iter(row.samples)
        benchmark = request.getfixturevalue("benchmark")  # which warns where it is not used
        benchmark.extra_info.update({name: value for name, value in asdict(row).items() if name != "samples"})
        benchmark.pedantic(
            lambda: _CLOCK.__setitem__(0, next(rounds)), setup=lambda: _CLOCK.__setitem__(0, 0.0),
            rounds=len(row.samples), iterations=1,
        )  # fmt: skip

    return play
