"""No file of the package imports itself by way of others, also not inside of functions or for type checkers alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp", reason="grimp is not installed; it comes with import-linter")
pytestmark = pytest.mark.plan


def cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """The modules that import each other, by way of others or not: strongly connected components, by Tarjan."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        path.append(module)
        for other in sorted(graph.find_modules_directly_imported_by(module)):
            if other not in index:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == index[module]:
            at = path.index(module)
            if len(path) > at + 1:
                found.append(sorted(path[at:]))
            del path[at:]

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return found


def test_cycles_of_a_graph_that_has_some() -> None:
    graph = grimp.ImportGraph()
    edges = ["ab", "bc", "ca", "cd", "de", "ed", "ef", "gf"]
    for importer, imported in edges:
        graph.add_module(importer)
        graph.add_module(imported)
        graph.add_import(importer=importer, imported=imported)
    assert sorted(cycles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("shardweave", cache_dir=None)
    assert cycles(graph) == []


def test_the_runtime_imports_the_planner_and_the_kernels_by_their_faces() -> None:
    root = Path(__file__).parents[1]
    files = list((root / "runtime").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == len(file.relative_to(root).parts):
                assert not (node.module or "").startswith(("planner.", "kernels.")), f"{file}: line {node.lineno}"
