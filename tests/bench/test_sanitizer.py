"""compute-sanitizer over the first case of every test of kernels: accesses out of bounds, races in shared memory.

Its racecheck sees shared memory only; the order of signals in global memory has the tests of the memory model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardweave.bench.gpu import outcomes

ROOT = Path(__file__).parents[2]
FOUND = 9  # exit status where the tool has found something
BEYOND = """
import torch, triton, triton.language as tl

@triton.jit
def fill(out, number):
    i = tl.arange(0, 128)
    tl.store(out + i, i, mask=i < number)

out = torch.zeros(100, dtype=torch.int32, device="cuda")
fill[(1,)](out, {number})
torch.cuda.synchronize()
"""


def sanitizer() -> str:
    """The program; skips the test where it or a GPU is absent."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    paths = [os.environ.get("PATH", ""), *(os.path.join(folder, "bin") for folder in folders if folder)]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(paths))
    if found is None:
        pytest.skip("compute-sanitizer is not in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    return found


def sanitized(tool: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python under a tool. Each tensor is an allocation of its own, so that its bounds are known."""
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    given = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **environment}
    given.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [*command, sys.executable, *arguments], cwd=ROOT, env=given, capture_output=True, text=True, timeout=600
    )


@pytest.mark.gpu
def test_memcheck_finds_an_access_out_of_bounds(tmp_path: Path) -> None:
    file = tmp_path / "beyond.py"
    for number, status in ((100, 0), (101, FOUND)):
        file.write_text(BEYOND.format(number=number))
        done = sanitized("memcheck", str(file))
        assert done.returncode == status, (number, done.returncode, done.stdout[-4000:], done.stderr[-2000:])


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = "-m pytest -q -p no:cacheprovider -p shardweave.bench.gpu.outcomes -m gpu tests/kernels".split()
    first = {outcomes.FILE: str(rows), outcomes.FIRST: "1", outcomes.SECTION: tool, outcomes.SHARD: "0/1"}
    done = sanitized(tool, *options, **first)
    passed = [row["test"] for row in outcomes.read(rows) if row.get("outcome") == "passed"]
    assert done.returncode == 0, (done.returncode, done.stdout[-8000:], done.stderr[-2000:])
    assert passed, "no kernel ran"
