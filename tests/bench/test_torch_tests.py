"""The runner of torch's own tests, on a folder with a few tests of ours in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.bench.baselines.torch_tests import main

pytestmark = pytest.mark.multi

SMALL = """
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._redistribute import redistribute_local_tensor  # a name that is bound early


def rank_main(rank, port, results):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x = torch.arange(15.0).view(5, 3)
    d = distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)])
    results.put(torch.equal(d.redistribute(placements=[Shard(1)]).full_tensor(), x))
    dist.barrier()
    dist.destroy_process_group()


class Small(unittest.TestCase):
    def test_passes_on_both(self):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        results = context.Queue()
        ranks = [context.Process(target=rank_main, args=(rank, server.port, results)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100)
        self.assertEqual([rank.exitcode for rank in ranks], [0, 0])
        self.assertTrue(results.get() and results.get())

    def test_of_stock_alone(self):
        self.assertNotIn("shardweave", redistribute_local_tensor.__module__)

    def test_fails_on_both(self):
        self.fail("as it always does")

    @unittest.skip("for the table")
    def test_skipped(self):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tests" / "deeper"
    path.mkdir(parents=True)
    (path / "test_small.py").write_text(SMALL)
    return path.parent


@pytest.mark.long
def test_both_columns(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.md"
    status = main([str(folder), "--timeout", "300", "--out", str(page)])
    out = capfd.readouterr().out
    assert status == 1 and page.read_text() == out
    row = next(line for line in out.splitlines() if "test_small.py " in line)
    # tests, passed installed and with stock, of the two that stock passes one is lost
    assert [cell.strip() for cell in row.split("|")][2:6] == ["4", "1", "2", "1"]
    assert "lost: deeper/test_small.py::Small::test_of_stock_alone: failed" in out and out.count("lost: ") == 1
    assert "| all | 4 | 1 | 2 | 1 |" in out
    assert "; commit " in out
    # Both ranks redistribute and gather, and nobody else does. The server that they start from may not have ended yet.
    assert "shardweave, in 3 processes" in out or "shardweave, in 4 processes" in out
    assert "| carried out on shared_memory | 4 |" in out


@pytest.mark.long
def test_run_without_calls_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "-k", "skipped"]) == 1
    assert "nothing is proven" in capfd.readouterr().out


def test_bad_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for options, text in (
        ((), "has no test_*.py"),
        (("--jobs", "0"), "--jobs, --timeout: 0"),
        (("--out", "/no/where.md"), "--out: '/no/where.md' cannot be written"),
    ):
        assert main([str(tmp_path), *options]) == 2 and text in capfd.readouterr().err
        (tmp_path / "test_none.py").touch()
