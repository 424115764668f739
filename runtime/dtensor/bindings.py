"""The names that modules bind to functions of torch's which shardweave replaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_globals_of = vars(ModuleType)["__dict__"].__get__
"""The globals of a module, without its own attribute access, by which some modules import others."""


class Bindings:
    """Replaces objects of torch's, such as functions, in the globals of every loaded module but shardweave's own.

    `from torch… import name` copies a binding, so the objects are found by identity, under any name. A module that is
    imported while an object is replaced copies the replacement, and is found by that.

    Args:
        versions: for each object, itself and all that may take its place. Code that is to keep a replacement must have
            bound another object.
    """

    def __init__(self, *versions: tuple[Any, ...]) -> None:
        self._versions = versions
        self._changed: dict[int, dict[str, Any]] = {}
        """By id: modules may be removed from `sys.modules`, and still be in use."""

    def bind(self, *wanted: Any) -> None:
        """Bind one version of each object."""
        by_id = {id(version): one for one, of in zip(wanted, self._versions, strict=True) for version in of}
        others = {version for version, one in by_id.items() if version != id(one)}
        for namespace in [*self._changed.values(), *_loaded()]:
            if others.isdisjoint(map(id, list(namespace.values()))):  # almost all of them
                continue
            self._changed[id(namespace)] = namespace
            for name, value in list(namespace.items()):
                if id(value) in others:
                    namespace[name] = by_id[id(value)]
        if all(one is of[0] for one, of in zip(wanted, self._versions, strict=True)):
            self._changed.clear()


def _loaded() -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != _PACKAGE:
            yield _globals_of(module)
