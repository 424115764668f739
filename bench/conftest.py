"""`pytest bench/`: the suites, as pytest-benchmark's benchmarks.

Calls are timed where they run: by every rank, in turns with the other contenders; a round is the slowest rank's.
Through a pipe from this process to the ranks, a call of 20 µs could not be timed. pytest-benchmark gets the rounds as
they were measured: its timer is a clock that advances by them, and its tables, storage and `--benchmark-compare` work
as usual. The machine, and what was not measured, are added to its JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardweave.bench.harness.machine import machine, now
from shardweave.bench.harness.measure import Found, measured, suite
from shardweave.bench.harness.result_file import Missing, Results
from shardweave.bench.suites import SCALES

_PLAIN = str.maketrans({"×": "x", "→": "->", "÷": "/"})  # pytest writes codes for letters that are not ASCII
_CLOCK = [0.0]
_FOUND = pytest.StashKey[dict[str, Found]]()


def measured_time() -> float:
    """A clock for pytest-benchmark."""
    return _CLOCK[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardweave")
    group.addoption("--scale", choices=SCALES, default="full", help="of the suites (default: %(default)s)")
    group.addoption("--quick", action="store_const", const="quick", dest="scale", help="the same as --scale quick")
    group.addoption("--match", default="", metavar="TEXT", help="only the cases with this in their name")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOUND] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = getattr(metafunc.module, "SUITE", None)
    if name is None or "record" not in metafunc.fixturenames:
        return
    config = metafunc.config
    metafunc.parametrize(
        ("case", "contender"),
        [
            pytest.param(
                case, contender, id=f"{case} | {contender}".translate(_PLAIN),
                marks=pytest.mark.benchmark(timer=measured_time, group=f"{name}: {case}"),
            )
            for case, contenders in suite(name).cases(config.getoption("scale")).items()
            if config.getoption("match") in case
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
def record(request: pytest.FixtureRequest, found: Found, case: str, contender: str) -> Callable[[], None]:
    """Plays what one contender took on one case to pytest-benchmark; fails where its result was wrong."""

    def play() -> None:
        key = case, contender
        if key in found.absent:
            pytest.skip(found.absent[key])
        if key not in found.rows:
            pytest.fail(found.faults.get(key) or found.failed or "", pytrace=False)
        left = iter(found.rows[key].seconds)
        benchmark = request.getfixturevalue("benchmark")  # which warns where it is not used
        benchmark.extra_info.update(found.rows[key].extra_info)

        def begin() -> None:
            _CLOCK[0] = 0.0

        def go_on() -> None:
            _CLOCK[0] = next(left)

        benchmark.pedantic(go_on, setup=begin, rounds=len(found.rows[key].samples), iterations=1)

    return play


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """What results have besides rows."""
    del benchmarks
    of_suites, option = config.stash[_FOUND], config.getoption
    absent = (Missing(s, *key, why) for s, found in of_suites.items() for key, why in found.absent.items())
    faults = (Missing(s, *key, why) for s, found in of_suites.items() for key, why in found.all_faults().items())
    command = " ".join(["pytest", *map(str, config.invocation_params.args)])
    match = option("match") or option("keyword")
    output_json |= Results(now(), command, option("scale"), machine(), (), (*absent,), (*faults,), match).head()
