"""Runs every code block of the documentation and compares its output with the page."""

from __future__ import annotations

import os
import re
from pathlib import Path
from random import Random

import pytest
from page_runs import run_commands, run_page
from pages import NOT_RUN, PAGES, ROOT, commands, page_id, parse_page, read_page

LONG = {"benchmarking"}  # pages whose commands take a minute and more
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))  # so many pages are run in a shell, besides the README
SHELL = [path for path in PAGES[1:] if "```bash\n" in path.read_text("utf-8")]


@pytest.mark.multi
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.long if path.stem in LONG else ()) for path in PAGES],
    ids=page_id,
)
def test_blocks_of_a_page(path: Path, tmp_path: Path) -> None:
    faults = run_page(read_page(path), tmp_path)
    assert not faults, "\n\n".join(faults)


@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize("path", [PAGES[0], *Random(0).sample(SHELL, min(PARTS, len(SHELL)))], ids=page_id)
def test_commands_of_a_page_in_a_shell(path: Path, tmp_path: Path) -> None:
    faults = run_page(read_page(path), tmp_path, in_a_shell=True)
    assert not faults, "\n\n".join(faults)


PAGE = """
```python
import shardweave
print(shardweave.plan((2,), (4,), "int8", "S0", "R").exchanges, "exchange")
```
```text
{shown}
```
```python ranks=2
import os, torch.distributed as dist
dist.init_process_group("gloo")
mine = [None, None]
dist.all_gather_object(mine, int(os.environ["RANK"]))
print(mine)
```

```text
{ranks}
```
```bash
{command}
```
"""


@pytest.mark.multi
def test_faults_of_a_page_are_reported(tmp_path: Path) -> None:
    def faults(name: str, **parts: str) -> str:
        given = {"shown": "1 … exchange", "ranks": "[0, 1]", "command": "FOO=1 make test"} | parts
        (tmp_path / name).mkdir()
        return "\n".join(run_page(parse_page("page.md", PAGE.format(**given)), tmp_path / name))

    assert not faults("right", shown="… exchange")
    found = faults("output", shown="2 exchanges", ranks="[0, 2]")
    assert "page.md, line 3: printed\n1 exchange\nthe page shows\n2 exchanges" in found
    assert "line 10: printed\n[0, 1]" in found
    assert "NameError: name 'unknown'" in faults("raises", shown="1 exchange\n```\n```python ranks=2\nunknown")
    assert "status 2" in faults("command", shown="1 exchange", command="python -m shardweave plan --mesh 2")
    assert "no test runs" in faults("other", shown="1 exchange", command="rm -rf /nowhere")
    assert "a fence '```ruby'" in faults("fence", shown="1 exchange\n```\n```ruby")
    assert "a text block with no block before it" in faults("prose", shown="1 exchange\n```\nSo:\n```text\n2")


@pytest.mark.plan
def test_commands_not_run_are_covered_elsewhere(tmp_path: Path) -> None:
    found = {" ".join(c.words[:2]) for path in PAGES for b in read_page(path).blocks if b.language == "bash"
             for c in commands(b)}  # fmt: skip
    assert found >= NOT_RUN.keys()
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert tests >= {name for why in NOT_RUN.values() for name in re.findall(r"test_\w+\.py", why)}
    (block,) = parse_page("page.md", "```bash\nmake demo\nmake tset\n```").blocks
    assert run_commands(block, tmp_path) == ["line 3: make tset: no test runs such a command"]
