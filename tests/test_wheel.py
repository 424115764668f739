"""The wheel: built from the tracked files, installed into an empty folder, and used from outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.long]

ROOT = Path(__file__).parents[1]
PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardweave

shardweave.install()
x = torch.arange(35.0).view(7, 5)
mesh = init_device_mesh("cpu", (2,))
y = distribute_tensor(x, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
assert y.full_tensor().equal(x) and sum(shardweave.stats().calls.values()) == 2
dist.destroy_process_group()
print("right")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git clone")
    for name in tracked.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)], check=True)
    (wheel,) = wheels.glob("shardweave-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def run(installed: Path, where: Path, *arguments: str) -> str:
    """The output of Python with the installed wheel, started in another folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_runs_the_command_line(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import shardweave; print(shardweave.__file__)")
    assert Path(where.strip()) == installed / "shardweave" / "__init__.py"
    assert run(installed, tmp_path, "-m", "shardweave", "--version").startswith("shardweave ")
    command = "-m shardweave plan --mesh 2,2 --shape 8,6".split()
    assert "S0 S1 → S1 S0" in run(installed, tmp_path, *command, "S0 S1", "S1 S0")


def test_wheel_redistributes(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    assert run(installed, tmp_path, *arguments).split() == ["right", "right"]


def test_wheel_has_all_packages(installed: Path) -> None:
    """Every tracked module outside of tests, examples and docs, and the data files that programs read."""
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.json"], cwd=ROOT, capture_output=True, text=True).stdout
    left_out = ("tests/", "docs/", "examples/", "bench/results/", "bench/conftest.py")
    expected = {name for name in tracked.split() if not name.startswith(left_out)}
    have = {str(p.relative_to(installed / "shardweave")) for p in (installed / "shardweave").rglob("*")}
    assert expected <= have, sorted(expected - have)


def test_wheel_is_typed(installed: Path, tmp_path: Path) -> None:
    """mypy finds the types of the installed package, and checks an example against them."""
    shutil.copyfile(ROOT / "examples" / "dtensor_program.py", tmp_path / "example.py")
    output = run(installed, tmp_path, "-m", "mypy", "--follow-imports=silent", "example.py")
    assert "Success" in output
