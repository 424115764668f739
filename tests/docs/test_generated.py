"""What scripts make for the documentation is as they would make it now."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from pages import ROOT

import shardweave

pytestmark = pytest.mark.plan


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date() -> None:
    module = script("api_reference")
    said = module.reference()
    assert module.FILE.read_text(encoding="utf-8") == said, "to be made again: make docs"
    for name in shardweave.__all__:
        assert f"\n### `{name}`\n" in said


def test_what_says_nothing_of_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("api_reference")
    monkeypatch.setattr(shardweave, "plan", lambda: None)
    with pytest.raises(ValueError, match="plan says nothing of itself"):
        module.reference()
    monkeypatch.setattr(shardweave, "__all__", [*shardweave.__all__, "stowaway"])
    with pytest.raises(ValueError, match="stowaway"):
        module.reference()


def test_the_pictures_are_up_to_date() -> None:
    module = script("pictures")
    drawn = module.pictures()
    assert {file.name for file in module.FOLDER.iterdir()} == set(drawn)
    old = [name for name, text in drawn.items() if (module.FOLDER / name).read_text(encoding="utf-8") != text]
    assert not old, f"to be made again: make docs; differ: {old}"
