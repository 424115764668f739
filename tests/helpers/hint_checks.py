"""Checks that Triton's interpreter leaves out: hints are true, and the accesses that they widen are vectors.

The compiler believes `tl.multiple_of`, `tl.max_contiguous` and `tl.max_constancy`; a GPU faults on a false one, or
stores beyond a mask. The interpreter ignores them. Here each hint is compared with the value that it is given for. And
each load and store through a pointer with a hint is checked as the vector that its kernel wants: in every group of so
many lanes either no lane is active, or all are, at consecutive addresses of which the first is a multiple of the
group's size.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

checked: Counter[str] = Counter()
"""How many hints and vectors have held in this process."""

_ALIGNED = "aligned"  # attribute of pointers: the bytes of a hint, kept where an offset is added
_VECTORS = {"load": ("VS", "VEC"), "store": ("VD", "VEC")}  # kernel constants, in words: those of boxes, those of rows
_constants: dict[str, Any] = {}  # of the kernel that runs
_installed = False


class FalseHint(AssertionError):
    """A kernel promised the compiler what does not hold."""


def check_hints_once() -> None:
    """Check the kernels that this process interprets from here on. A false hint raises within the kernel."""
    global _installed
    if _installed:
        return
    _installed = True
    from triton.runtime import interpreter

    _check_hints(interpreter)
    _check_accesses(interpreter)


def _check_hints(interpreter: Any) -> None:
    patch = interpreter._patch_lang_core

    def patch_and_check(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        for name, holds in (("multiple_of", _divides), ("max_contiguous", _runs_on), ("max_constancy", _is_constant)):
            scope.set_attr(lang, name, checking(name, getattr(lang, name), holds))

    def checking(name: str, hint: Any, holds: Any) -> Any:
        def checked_hint(input: Any, values: Any) -> Any:
            output = hint(input, values)
            listed = values if isinstance(values, list | tuple) else [values]
            sizes = [int(getattr(value, "value", value)) for value in listed]
            handle = getattr(input, "handle", None)  # none: a number of Python's, such as a loop variable
            data, step = np.asarray(input if handle is None else handle.data), _step(handle)
            if not holds(data, sizes, step):
                raise FalseHint(f"tl.{name}({data.ravel()[:4].tolist()}…, {sizes}) of shape {data.shape} does not hold")
            if name == "multiple_of" and handle is not None and _is_pointer(handle):
                handle.attr[_ALIGNED] = sizes
            checked[name] += 1
            return output

        return checked_hint

    interpreter._patch_lang_core = patch_and_check


def _is_pointer(handle: Any) -> bool:
    return hasattr(handle.dtype.scalar, "element_ty")


def _word(handle: Any) -> int:
    """Bytes of what a pointer points to."""
    return max(1, handle.get_element_ty().primitive_bitwidth // 8)


def _step(handle: Any) -> int:
    """The difference of adjacent values: 1, or the bytes of a word."""
    return _word(handle) if handle is not None and _is_pointer(handle) else 1


def _divides(data: np.ndarray, sizes: list[int], step: int) -> bool:
    """Whether the sizes divide the value; of a block, the first of each run of adjacent values along an axis."""
    signed = data.astype(np.int64)
    for axis, size in enumerate(sizes):
        first = np.ones(signed.shape, bool)
        if signed.ndim:
            rest = (slice(None),) * axis + (slice(1, None),)
            first[rest] = np.diff(signed, axis=axis) != step
        if (signed[first] % size).any():
            return False
    return True


def _in_groups(data: np.ndarray, axis: int, size: int) -> np.ndarray | None:
    """The values with the axis last, cut into groups of `size`; None: it cannot be cut."""
    if data.shape[axis] % size:
        return None
    moved = np.moveaxis(data, axis, -1)
    return moved.reshape(*moved.shape[:-1], -1, size)


def _runs_on(data: np.ndarray, sizes: list[int], step: int) -> bool:
    """Whether groups of these sizes along the axes are consecutive values."""
    groups = [_in_groups(data.astype(np.int64), axis, size) for axis, size in enumerate(sizes[: data.ndim])]
    return all(group is not None and bool((np.diff(group) == step).all()) for group in groups)


def _is_constant(data: np.ndarray, sizes: list[int], step: int) -> bool:
    """Whether groups of these sizes along the axes are equal values."""
    groups = [_in_groups(data, axis, size) for axis, size in enumerate(sizes[: data.ndim])]
    return all(group is not None and bool((group == group[..., :1]).all()) for group in groups)


def _check_accesses(interpreter: Any) -> None:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store

    def launch(self: Any, *arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(self.arg_names, arguments, strict=False)), **named}
        _constants.clear()
        _constants.update({name: given.get(name) for name in self.constexprs})
        return call(self, *arguments, **named)

    # The arguments after these differ between Triton's versions.
    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check_vectors("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_vectors("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    executor.__call__, builder.create_masked_load, builder.create_masked_store = launch, checked_load, checked_store
    for name, at in (("create_addptr", 0), ("create_expand_dims", 0), ("create_broadcast", 0), ("create_splat", 1)):
        setattr(builder, name, _kept(getattr(builder, name), at))


def _kept(function: Any, at: int) -> Any:
    """A function of the builder that hands the hint of its argument `at` on."""

    def keeping(self: Any, *arguments: Any, **named: Any) -> Any:
        output = function(self, *arguments, **named)
        hint = arguments[at].attr.get(_ALIGNED)
        if hint is not None:
            output.attr[_ALIGNED] = hint
        return output

    return keeping


def _check_vectors(kind: str, pointers: Any, mask: Any) -> None:
    hint, word = pointers.attr.get(_ALIGNED), _word(pointers)
    if hint is None or not pointers.data.ndim:
        return
    wanted = [_constants[name] for name in _VECTORS[kind] if _constants.get(name) is not None]
    # The kernel's words may be others than these: no vector is wider than the hint.
    lanes = min(int(size) for size in (*wanted[:1], max(hint) // word))
    if lanes < 2:
        return
    axes = range(pointers.data.ndim)
    if not any(_is_vector(pointers.data, mask.data, axis, lanes, word) for axis in axes):
        raise FalseHint(
            f"a {kind} of shape {pointers.data.shape} is not one of vectors of {lanes} words of {word} bytes: "
            f"addresses {pointers.data.ravel()[:9].tolist()}, mask {np.asarray(mask.data).ravel()[:9].tolist()}"
        )
    checked[f"{kind}s"] += 1


def _is_vector(addresses: np.ndarray, mask: np.ndarray, axis: int, lanes: int, word: int) -> bool:
    groups = _in_groups(addresses.astype(np.int64), axis, lanes)
    active = _in_groups(np.broadcast_to(mask, addresses.shape).astype(bool), axis, lanes)
    if groups is None or active is None or not _is_constant(active, [1] * (active.ndim - 1) + [lanes], 1):
        return False
    groups = groups[active[..., 0]]
    return not (groups[..., 0] % (lanes * word)).any() and bool((np.diff(groups) == word).all())
