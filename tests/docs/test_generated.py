"""Generated pages and pictures are up to date."""

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


def test_api_reference_is_up_to_date() -> None:
    module = script("api_reference")
    pages = module.reference()
    assert {file.name for file in module.FOLDER.iterdir()} == set(pages)
    old = [name for name, text in pages.items() if (module.FOLDER / name).read_text(encoding="utf-8") != text]
    assert not old, f"run make docs; these pages differ: {old}"
    for name in set(shardweave.__all__) - {"fsdp", "memory", "moe", "tracing"}:
        assert sum(f"\n### `{name}`\n" in text for text in pages.values()) == 1


def test_pictures_are_up_to_date() -> None:
    module = script("pictures")
    drawn = module.pictures()
    measured = {"overlap.svg"}  # by docs/overlap.py
    assert {file.name for file in module.FOLDER.iterdir()} == set(drawn) | measured
    old = [name for name, text in drawn.items() if (module.FOLDER / name).read_text(encoding="utf-8") != text]
    assert not old, f"run make docs; these pictures differ: {old}"
