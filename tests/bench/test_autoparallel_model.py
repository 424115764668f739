"""The program with autoparallel says what it needs, and counts what a rank receives."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from rank_processes import run_ranks

from shardweave.bench.baselines import autoparallel_model
from shardweave.bench.baselines.autoparallel_model import Collectives

_c10d = torch.ops._c10d_functional


@pytest.mark.skipif(find_spec("autoparallel") is not None, reason="autoparallel is installed")
def test_without_autoparallel(capsys: pytest.CaptureFixture[str]) -> None:
    assert autoparallel_model.main([]) == 2
    assert "autoparallel is not installed; allowed: pip install" in capsys.readouterr().err


def received(rank: int) -> None:
    x, name = torch.ones(6, 2), torch.distributed.group.WORLD.group_name
    with Collectives() as counted:
        for collective in (
            _c10d.all_gather_into_tensor(x, 2, name),  # 48 bytes of the other rank
            _c10d.reduce_scatter_tensor(x, "sum", 2, name),  # 24
            _c10d.all_reduce(x, "sum", name),  # 24 + 24
            _c10d.all_to_all_single(x, [2, 2] if rank == 0 else [4, 4], [2, 4], name),  # 2 or 4 rows of the other
        ):
            _c10d.wait_tensor(collective)
    assert counted.calls == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1, "all_to_all_single": 1}
    assert counted.bytes_received == 48 + 24 + 48 + (16 if rank == 0 else 32)


@pytest.mark.multi
def test_bytes_that_are_counted() -> None:
    run_ranks(received, 2)
