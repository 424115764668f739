"""Triton's interpreter with less overhead per call of a function."""

from __future__ import annotations

import os
from typing import Any


def patch_triton_once() -> None:
    """In a process that interprets kernels, make Triton patch `triton.language` with interpreting functions only once,
    instead of before each launch and each call of a jitted function within a kernel. Nothing is compiled in such a
    process, so the originals are not needed, and the patching takes longer than most test kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> Any:
        languages = interpreter.tl, interpreter.tl.core
        key = frozenset(id(value) for value in fn.__globals__.values() if any(value is one for one in languages))
        if key not in patched:
            patch(fn)
            patched.add(key)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once
