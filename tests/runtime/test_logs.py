"""What is logged at which level."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardweave


@pytest.mark.plan
def test_no_handler_is_installed() -> None:
    for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "shardweave"]:
        each = logging.getLogger(name)
        assert not each.handlers and each.level == logging.NOTSET and each.propagate, name


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
    left_out = distribute_tensor(torch.ones(1), init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])
    with shardweave.installed(only=mesh):
        for _ in range(2):
            x.redistribute(placements=[Replicate()])
            left_out.redistribute(placements=[Replicate(), Replicate()])
    dispatcher = shardweave.TokenDispatcher(num_experts=2, top_k=1, hidden=4, max_tokens=3, dtype=torch.float32)
    del dispatcher
    return seen


@pytest.mark.multi
def test_events_and_their_levels() -> None:
    first, second = run_ranks(messages, 2)
    expected = [
        ("INFO", "install", r"installed: .* \(topology=None, .*only=.*; torch 2.*, triton 3.*\)"),
        ("INFO", "transports.select", r"ranks \(0, 1\) exchange by \w+: .*"),
        ("DEBUG", "executor.call", r"bound S0 → R   float32\[5\] on .*: receives 8 bytes by \w+"),
        ("INFO", "statistics", r"left to torch: a mesh that install\(only=\) leaves out .*Further ones are counted.*"),
        ("DEBUG", "statistics", r"left to torch: a mesh that install\(only=\) leaves out .*\)"),
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
def test_torch_logs_takes_names_of_modules() -> None:
    code = "import shardweave, logging; logging.getLogger('shardweave.runtime.transports.select').debug('a message')"
    for value, written in (("+shardweave.runtime.transports", True), ("+shardweave.runtime.dtensor", False)):
        environment = os.environ | {"TORCH_LOGS": value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        assert ("a message" in done.stderr) is written, done.stderr
