"""SHARDWEAVE_LOGS and what is logged at which level."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError
from shardweave.runtime.environment import requested_logs
from shardweave.runtime.logs import set_up_logs

_NAMES = [
    "shardweave",
    *(f"shardweave.runtime.{n}" for n in ("dtensor", "executor", "install", "moe", "statistics", "transports")),
]


@pytest.fixture
def loggers() -> Iterator[logging.Logger]:
    """The logger of the package; levels and handlers are restored afterwards."""
    found = [logging.getLogger(name) for name in _NAMES]
    before = [(each.level, each.handlers[:], each.propagate) for each in found]
    yield found[0]
    for each, (level, each.handlers[:], each.propagate) in zip(found, before, strict=True):
        each.setLevel(level)


@pytest.mark.plan
def test_levels_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "": {},
        " , ": {},
        "dispatch": {"shardweave.runtime.moe": logging.INFO},
        "+all, -dispatch": {"shardweave": logging.DEBUG, "shardweave.runtime.moe": logging.ERROR},
        "+dtensor,dtensor,": dict.fromkeys(
            ("shardweave.runtime.dtensor", "shardweave.runtime.install", "shardweave.runtime.statistics"), logging.INFO
        ),
        "executor,transports": dict.fromkeys(
            ("shardweave.runtime.executor", "shardweave.runtime.transports"), logging.INFO
        ),
    }
    for text, levels in cases.items():
        monkeypatch.setenv("SHARDWEAVE_LOGS", text)
        assert requested_logs() == levels, text


@pytest.mark.plan
@pytest.mark.parametrize("name", ["dtensors", "+", "++dtensor", "shardweave", "dtensor dispatch", "dtensor;all", "+\n"])
def test_unknown_names_are_refused(name: str, monkeypatch: pytest.MonkeyPatch, loggers: logging.Logger) -> None:
    monkeypatch.setenv("SHARDWEAVE_LOGS", f"transports,{name}")
    allowed = "all, dispatch, dtensor, executor, flight_recorder, transports"
    with pytest.raises(ArgumentError, match=f"SHARDWEAVE_LOGS: {re.escape(repr(name.strip()))}; allowed: {allowed}"):
        set_up_logs()
    assert not loggers.handlers and logging.getLogger("shardweave.runtime.transports").level == logging.NOTSET


@pytest.mark.plan
def test_no_handler_without_the_variable(monkeypatch: pytest.MonkeyPatch, loggers: logging.Logger) -> None:
    monkeypatch.delenv("SHARDWEAVE_LOGS", raising=False)
    set_up_logs()
    assert not loggers.handlers and loggers.propagate and loggers.level == logging.NOTSET
    root = logging.getLogger("shardweave")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("shardweave.")]:
        each = logging.getLogger(name)
        assert not each.handlers and each.level == logging.NOTSET and each.propagate, name
        assert name.startswith(f"{root.name}.")


@pytest.mark.plan
def test_one_handler_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, loggers: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDWEAVE_LOGS", "+dtensor,-dispatch")
    monkeypatch.setenv("RANK", "5")
    set_up_logs()
    set_up_logs()
    logging.getLogger("shardweave.runtime.install").debug("a debug message")
    logging.getLogger("shardweave.runtime.transports.select").info("too low")
    logging.getLogger("shardweave.runtime.transports.select").warning("a warning")
    logging.getLogger("shardweave.runtime.moe.dispatcher").warning("too low")
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d:.]{12}", "TIME", line) for line in lines] == [
        "[rank5] D TIME shardweave.runtime.install: a debug message",
        "[rank5] W TIME shardweave.runtime.transports.select: a warning",
    ]


def messages(rank: int) -> list[tuple[str, str, str]]:
    """Level, logger and text of what a short program logs."""
    seen: list[tuple[str, str, str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.levelname, record.name.removeprefix("shardweave.runtime."), record.getMessage()))

    logger = logging.getLogger("shardweave")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Kept())
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    with shardweave.installed(min_bytes=8):
        for _ in range(2):
            x.redistribute(placements=[Replicate()])
            distribute_tensor(torch.ones(1), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    dispatcher = shardweave.TokenDispatcher(num_experts=2, top_k=1, hidden=4, max_tokens=3, dtype=torch.float32)
    del dispatcher
    return seen


@pytest.mark.multi
def test_events_and_their_levels() -> None:
    first, second = run_ranks(messages, 2)
    expected = [
        ("INFO", "install", r"installed: .* \(topology=None, .*min_bytes=8.*; torch 2.*, triton 3.*\)"),
        ("INFO", "transports.select", r"ranks \(0, 1\) exchange by \w+: .*"),
        ("DEBUG", "executor.call", r"bound S0 → R   float32\[5\] on .*: receives 8 bytes by \w+"),
        ("INFO", "statistics", r"left to torch: smaller than install\(min_bytes=\) .*Further ones are counted.*"),
        ("DEBUG", "statistics", r"left to torch: smaller than install\(min_bytes=\) .*\)"),
        ("INFO", "install", "uninstalled: .* run on torch"),
        ("DEBUG", "moe.dispatcher", r"made token dispatcher 1 of these ranks: 2 experts.*: \w+, .*"),
    ]  # fmt: skip
    assert len(first) == len(expected), first
    for (level, name, text), found in zip(expected, first, strict=True):
        assert found[:2] == (level, name) and re.fullmatch(text, found[2]), (found, text)
    # The second rank repeats what the first has said, at debug level.
    assert [name for _, name, _ in second] == [name for _, name, _ in first]
    assert {level for level, _, _ in second} == {"DEBUG"}


@pytest.mark.long
@pytest.mark.multi
def test_the_variable_is_read_at_import() -> None:
    def imported(value: str) -> subprocess.CompletedProcess[str]:
        code = "import logging, shardweave; print(logging.getLogger('shardweave').handlers)"
        environment = os.environ | {"SHARDWEAVE_LOGS": value}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )

    done = imported("transport")
    assert done.returncode and "ArgumentError: SHARDWEAVE_LOGS: 'transport'; allowed: all, " in done.stderr
    assert "_Handler" in imported("transports").stdout and imported("").stdout == "[]\n"
