"""`pytest bench/`: the suites, as pytest-benchmark's benchmarks.

What is timed is timed where it runs: by every rank, in turns with the others' ways, of which a round is the slowest
rank's. From here, through a pipe to the ranks, a call of 20 µs could not be seen. pytest-benchmark is given the rounds
as they were measured: its timer is one that goes on by what the ranks measured, and all that it does with times
(tables, `--benchmark-json`, `--benchmark-compare`) is of those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardweave.bench.measuring import Found, measured, suite
from shardweave.bench.run import written
from shardweave.bench.suites import SCALES

_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_PLAIN = str.maketrans({"×": "x", "→": "->", "÷": "/"})  # pytest writes codes for letters that are not ASCII
_PLAYED = [0.0]
_FOUND = pytest.StashKey[dict[str, Found]]()


def measured_time() -> float:
    """A clock for pytest-benchmark."""
    return _PLAYED[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardweave")
    group.addoption("--scale", choices=SCALES, default="full", help="of the suites (default: %(default)s)")
    group.addoption("--quick", action="store_const", const="quick", dest="scale", help="the same as --scale quick")
    group.addoption("--match", default="", metavar="TEXT", help="only the cases with this in their name")
    group.addoption("--cases", type=Path, metavar="FILE", help="only these: JSON, the names of cases of each suite")
    group.addoption("--results", type=Path, metavar="FILE", help="what was measured, in the form that compare reads")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOUND] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = getattr(metafunc.module, "SUITE", None)
    if name is None or "record" not in metafunc.fixturenames:
        return
    config = metafunc.config
    path = config.getoption("cases")
    wanted = None if path is None else json.loads(path.read_text(encoding="utf-8")).get(name, [])
    metafunc.parametrize(
        ("case", "contender"),
        [
            pytest.param(
                case, contender, id=f"{case} | {contender}".translate(_PLAIN),
                marks=pytest.mark.benchmark(timer=measured_time, group=f"{name}: {case}"),
            )
            for case, contenders in suite(name).cases(config.getoption("scale")).items()
            if config.getoption("match") in case and (wanted is None or case in wanted)
            for contender in contenders
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """The module's suite, measured for the cases that were selected, all of their contenders."""
    name = request.module.SUITE
    wanted: dict[str, None] = dict.fromkeys(
        str(item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
    )
    config = request.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # it takes minutes, and says where it is
        of_suite = measured(name, list(wanted), config.getoption("scale"))
    config.stash[_FOUND][name] = of_suite
    return of_suite


@pytest.fixture
def record(request: pytest.FixtureRequest, found: Found, case: str, contender: str) -> Iterator[Callable[[], None]]:
    """Plays what one contender took on one case to pytest-benchmark; fails where its result was wrong."""

    def play() -> None:
        key = case, contender
        if key in found.faults:
            pytest.fail(found.faults[key], pytrace=False)
        if key in found.absent:
            pytest.skip(found.absent[key])
        if key not in found.rows:
            if found.failed is None:
                found.faults[key] = "nothing was measured"
            pytest.fail(found.failed or found.faults[key], pytrace=False)
        row = found.rows[key]
        if row.unit not in _SECONDS:
            return  # counted, not timed
        left = iter(row.samples)

        def go_on() -> None:
            _PLAYED[0] += next(left) * _SECONDS[row.unit]

        benchmark = request.getfixturevalue("benchmark")
        benchmark.extra_info.update({k: v for k, v in row.to_dict().items() if k not in ("samples", "case", "suite")})
        benchmark.pedantic(go_on, rounds=len(row.samples), iterations=1)

    yield play


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, of_suites = session.config.getoption("results", default=None), session.config.stash.get(_FOUND, {})
    if path is not None and of_suites:
        command, option = " ".join(["pytest", *session.config.invocation_params.args]), session.config.getoption
        match = option("match") or option("keyword")
        written(of_suites, option("scale"), command, match).write(path, "--results")
