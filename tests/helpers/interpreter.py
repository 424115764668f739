"""Triton's interpreter with less overhead per operation, and with the checks of `hint_checks` and `bounds_checks`."""

from __future__ import annotations

import builtins
import dataclasses
import os
from typing import Any

from bounds_checks import check_bounds_once
from hint_checks import check_hints_once


def patch_triton_once() -> None:
    """Speed up the interpreter of this process, if it has TRITON_INTERPRET=1, and check kernels' hints
    and accesses. Results stay the same.

    Most of an interpreted kernel's time is spent on Triton's types, not on numbers. Nothing is compiled in such a
    process, so the originals are not needed again.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    check_hints_once()
    check_bounds_once()
    _replace_language_once()
    _keep_types()


def _replace_language_once() -> None:
    """Replace the contents of `triton.language` by interpreting functions once, instead of before each launch and each
    call of a jitted function within a kernel."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()
    seen: dict[int, Any] = {}  # functions by identity, kept alive

    def patch_once(fn: Any) -> Any:
        if id(fn) not in seen:
            seen[id(fn)] = fn
            languages = interpreter.tl, interpreter.tl.core
            found = frozenset(id(value) for value in fn.__globals__.values() if any(value is one for one in languages))
            if found not in patched:
                patch(fn)
                patched.add(found)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once


def _keep_types() -> None:
    """Make NumPy dtypes, block shapes and their names once for each type, and compute no overflow condition: the
    interpreter asserts it only with `debug`, which it does not set."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes: dict[str, Any] = {}
    make_dtype = interpreter._get_np_dtype

    def np_dtype(tt_dtype: Any) -> Any:
        found = dtypes.get(tt_dtype.name)
        if found is None:
            found = dtypes[tt_dtype.name] = make_dtype(tt_dtype)
        return found

    interpreter._get_np_dtype = np_dtype
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)

    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    blocks: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    shapes: dict[int, tuple[Any, Any]] = {}  # by the identity of a kept block shape; 0: of scalars

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = builtins.tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        kept = blocks.get((element_ty.name, sizes))
        if kept is None:
            make_block(self, element_ty, shape)
            blocks[element_ty.name, sizes] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = kept

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        block = type.is_block()
        known = shapes.get(id(type.shape) if block else 0)
        if known is None:
            make_tensor(self, handle, type)
            if not block:
                shapes[0] = self.shape, self.numel
            elif any(type.shape is shape for shape, *_ in blocks.values()):
                shapes[id(type.shape)] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor
