"""The distributions: built from the tracked files, installed, and used from outside of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("build", reason="build is not installed; it comes with shardweave[dev]")
pytestmark = [pytest.mark.multi, pytest.mark.long]

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
UNTYPED = "tokenizers", "torchtitan", "transformers"  # that examples use, and that need not be installed
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
WRONG_TYPES = """
import shardweave

program: int = shardweave.plan((2, 2), (8, 6), "float32", "S0 S1", "S1 S0")
"""
FROM_SOURCE = "test_version.py planner/test_layout.py runtime/dtensor/test_partials.py docs/test_generated.py".split()


class Installed(NamedTuple):
    """An environment with the wheel, and the files that it was built from.

    Attributes:
        python: the interpreter of the environment.
        package: the folder of the installed package.
        sources: the source distribution, unpacked.
        tracked: the names of the repository's files.
    """

    python: Path
    package: Path
    sources: Path
    tracked: frozenset[str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`python -m build` makes a source distribution and from it a wheel; pip installs the wheel.

    The environment has what this one has, shardweave excepted. pip may download nothing, so that a requirement that
    pyproject.toml names and no test environment has is an error.
    """
    clone, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("clone", "built", "unpacked"))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone")
    tracked = frozenset(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(built), str(clone)], check=True)
    with tarfile.open(next(built.glob("shardweave-*.tar.gz"))) as archive:
        archive.extractall(unpacked)
    (sources,) = unpacked.iterdir()
    python, packages = environment(tmp_path_factory.mktemp("environment"))
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-index", *map(str, built.glob("*.whl"))], check=True, cwd=built)
    return Installed(python, packages / "shardweave", sources, tracked)


def environment(folder: Path) -> tuple[Path, Path]:
    """A virtual environment with the packages of this one except shardweave: its interpreter and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for path in sys.path:
        if Path(path).name == "site-packages":
            for entry in Path(path).iterdir():
                ours = "shardweave" in entry.name or entry.suffix == ".pth" or entry.name == "__pycache__"
                if not ours and not (packages / entry.name).exists():
                    (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python", packages


def run(where: Path, *command: object) -> str:
    """The output of a command that is started in that folder."""
    done = subprocess.run([*map(str, command)], cwd=where, env=clean(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean() -> dict[str, str]:
    """The environment's variables without those that name folders of Python's modules."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def test_wheel_runs_the_command_line(installed: Installed, tmp_path: Path) -> None:
    where = run(tmp_path, installed.python, "-c", "import shardweave; print(shardweave.__file__)")
    assert Path(where.strip()) == installed.package / "__init__.py"
    assert run(tmp_path, installed.python, "-m", "shardweave", "--version").startswith("shardweave ")
    command = "plan --mesh 2,2 --shape 8,6".split()
    output = run(tmp_path, installed.python.with_name("shardweave"), *command, "S0 S1", "S1 S0")
    assert "S0 S1 → S1 S0" in output


def test_wheel_redistributes(installed: Installed, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    assert run(tmp_path, installed.python, *arguments).count("right") == 2  # a line of each rank; they may interleave


def test_wheel_has_all_packages(installed: Installed) -> None:
    """Every tracked module outside of tests, examples and docs, and the data files that programs read."""
    left_out = ("tests/", "docs/", "examples/", "bench/results/", "bench/conftest.py")
    tracked = [name for name in installed.tracked if name.endswith((".py", ".json")) and not name.startswith(left_out)]
    missing = [name for name in tracked if not (installed.package / name).is_file()]
    assert tracked and not missing


def test_wheel_is_typed(installed: Installed, tmp_path: Path) -> None:
    """mypy finds the types of the installed package, and checks examples against them."""
    for name in EXAMPLES:
        shutil.copyfile(ROOT / "examples" / name, tmp_path / name)
    (tmp_path / "mypy.ini").write_text("".join(f"[mypy-{name}.*]\nignore_missing_imports = True\n" for name in UNTYPED))
    mypy = [installed.python, "-m", "mypy", "--follow-imports=silent"]
    assert "Success" in run(tmp_path, *mypy, *EXAMPLES)
    check_types_are_found(installed.python, tmp_path)


def check_types_are_found(python: Path, folder: Path) -> None:
    (folder / "wrong.py").write_text(WRONG_TYPES)
    mypy = [python, "-m", "mypy", "--follow-imports=silent", "wrong.py"]
    done = subprocess.run(mypy, cwd=folder, env=clean(), capture_output=True, text=True)
    assert done.returncode == 1 and 'expression has type "Program"' in done.stdout, done.stdout


def test_editable_install_is_typed(installed: Installed, tmp_path: Path) -> None:
    """As CONTRIBUTING.md says how to make one."""
    (command,) = re.findall(r"^pip (install -e .*)$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    python, _ = environment(tmp_path / "environment")
    run(installed.sources, python, "-m", "pip", "--quiet", *shlex.split(command), "--no-deps")
    where = Path(run(tmp_path, python, "-c", "import shardweave; print(shardweave.__file__)").strip())
    assert where.samefile(installed.sources / "__init__.py") or where.is_relative_to(installed.sources)
    check_types_are_found(python, tmp_path)


def test_source_distribution_runs_tests_against_the_wheel(installed: Installed) -> None:
    """The source distribution has every tracked file; its tests use the installed package."""
    missing = [name for name in installed.tracked if not (installed.sources / name).is_file()]
    assert installed.tracked and not missing
    files = [installed.sources / "tests" / name for name in FROM_SOURCE]
    assert " passed" in run(installed.sources, installed.python, "-m", "pytest", "-q", "-m", "not long", *files)
