"""Runs every example on the number of ranks that its docstring names, if the packages that it names are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from page_runs import _main, started
from pages import ROOT

PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))  # so many examples are run by torchrun itself
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_COMMAND = re.compile(r"^    torchrun --standalone --nproc-per-node (\d+) examples/(\w+\.py)", re.M)


_NEEDS = re.compile(r"^Needs `pip install ([\w ]+)`", re.M)


def command(path: Path) -> int:
    """The number of ranks in the example's docstring. Skips the test if a package of the docstring is absent."""
    source = path.read_text(encoding="utf-8")
    (found,) = _COMMAND.findall(source)
    assert found[1] == path.name
    for package in " ".join(_NEEDS.findall(source)).split():
        pytest.importorskip(package, reason=f"{package} is not installed (pip install {package})")
    return int(found[0])


@pytest.mark.multi
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path, tmp_path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert "\ndef main() -> None:" in source and source.endswith('if __name__ == "__main__":\n    main()\n')
    printed, error = started(_main, command(path), tmp_path, [str(path)], {})
    assert error is None, error
    assert printed.strip()


@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize("path", Random(0).sample(EXAMPLES, min(PARTS, len(EXAMPLES))), ids=lambda path: path.stem)
def test_examples_by_torchrun(path: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(command(path))]
    done = subprocess.run(
        [*torchrun, str(path)], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
