"""Triton's interpreter, with less to do for each call of a function."""

from __future__ import annotations

import os
from typing import Any


def patch_triton_once() -> None:
    """In a process that interprets kernels, Triton replaces what `triton.language` holds by interpreting functions
    once, instead of before each launch and each call of a jitted function within a kernel. Nothing is compiled in such
    a process, so that nobody needs the originals, and the replacing takes longer than most kernels of tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> Any:
        languages = interpreter.tl, interpreter.tl.core
        found = frozenset(id(value) for value in fn.__globals__.values() if any(value is one for one in languages))
        if found not in patched:
            patch(fn)
            patched.add(found)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once
