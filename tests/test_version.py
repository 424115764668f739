"""One version, in all places that name it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardweave
from shardweave.__main__ import main

pytestmark = pytest.mark.plan
ROOT = Path(__file__).parents[1]
_RELEASE = re.compile(r"## (\d+\.\d+\.\d+) - (unreleased|\d{4}-\d\d-\d\d)")


def test_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    printed = re.match(r"shardweave (\S+), torch ", capsys.readouterr().out)
    assert declared and printed
    assert declared[1] == printed[1] == shardweave.__version__ == releases()[0][0]


def test_changelog_has_versions_in_descending_order() -> None:
    """Only the first may be unreleased."""
    numbers = [tuple(map(int, version.split("."))) for version, _ in releases()]
    assert numbers == sorted(set(numbers), reverse=True)
    assert "unreleased" not in [date for _, date in releases()[1:]]


def releases() -> list[tuple[str, str]]:
    """Version and date of each heading of the changelog."""
    headings = re.findall("^## .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    found = [_RELEASE.fullmatch(heading) for heading in headings]
    assert all(found), [heading for heading, match in zip(headings, found, strict=True) if not match]
    return [(match[1], match[2]) for match in found if match]
