"""Names in the documentation exist: linked files and headings, paths, modules, variables, exceptions."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, page_id

import shardweave
import shardweave.checkpoint
import shardweave.integrations
from shardweave import errors

pytestmark = pytest.mark.plan
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:bench|docs|examples|kernels|planner|runtime|tests)/[\w./*-]*)`")


def prose(path: Path) -> str:
    """The page without its code blocks and comments."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_id)
def test_names_and_links_of_a_page_exist(path: Path) -> None:
    text, dead = prose(path), []
    for link in _LINK.findall(text):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    dead += [found for found in _PATH.findall(text) if not any(ROOT.glob(found.rstrip("/")))]
    modules = set(re.findall(r"python -m (shardweave[\w.]*)", text))
    dead += [name for name in modules if importlib.util.find_spec(name) is None]
    names = set(re.findall(r"`shardweave\.(\w+)", text)) - {"bench", "TokenSwitch"}  # before torch 2.15
    dead += [f"shardweave.{name}" for name in names if not hasattr(shardweave, name)]
    assert not dead, f"{path.name} names what does not exist: {dead}"


def test_readme_links_every_page() -> None:
    linked = set(_LINK.findall(prose(ROOT / "README.md")))
    pages = {f"docs/{page.name}" for page in PAGES if page.parent == ROOT / "docs"} | {"docs/api/index.md"}
    assert pages <= {link.partition("#")[0] for link in linked}


def test_files_in_architecture_exist() -> None:
    """Diagrams and tables name files without the folder that their heading says."""
    names = set(re.findall(r"[\w/]+\.py\b", (ROOT / "docs/architecture.md").read_text(encoding="utf-8")))
    rooms = ("planner", "kernels", "runtime", "cli", "bench", "docs", "tests")
    files = [*ROOT.glob("*.py"), *(file for room in rooms for file in (ROOT / room).rglob("*.py"))]
    tree = {file.relative_to(ROOT).as_posix() for file in files}
    missing = [name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in tree)]
    assert names and not missing, f"docs/architecture.md names files that do not exist: {sorted(missing)}"


def test_variables_and_exceptions_are_documented() -> None:
    rooms = (ROOT / room for room in ("planner", "kernels", "runtime"))
    package = [*ROOT.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))]
    read = set(re.findall(r"SHARDWEAVE_[A-Z_]+", "".join(file.read_text(encoding="utf-8") for file in package)))
    documented = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(SHARDWEAVE_[A-Z_]+)` \|", documented, re.M))
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and name[0] != "_"}
    assert kinds == set(re.findall(r"^\| `(\w+Error)` \|", documented, re.M))
