"""Checks that interpreted kernels access only the tensors whose addresses they were given.

Each lane of a load, a store or an atomic operation that is not masked off must be within the tensor to which its base
pointer belongs, and that tensor's memory must not have been freed. The base is the address of a tensor argument, or the
number that a kernel makes a pointer of; offsets that are added to it do not change which tensor it belongs to. So an
access that misses its tensor is found even where it hits another one: every tensor, views of one memory included, has
unlimited guard bands around it.

The tensors are those whose `data_ptr` was ever taken in this process.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

accessed: Counter[str] = Counter()
"""How many loads, stores and atomic operations have been checked in this process."""

_WITHIN = "within"  # attribute of pointers: the bounds of the tensor of each, two numbers or two arrays
_NOTHING = (1, 0)
Bounds = tuple[Any, Any]


class OutOfBounds(AssertionError):
    """A kernel accesses memory outside of the tensor that it was given, or that has been freed."""


class KnownTensors:
    """The addresses of tensors whose memory is alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents: dict[int, tuple[StorageWeakRef, dict[int, int]]] = {}  # by the address of the storage's record
        self._starts = self._ends = np.zeros(0, np.int64)
        self._found: dict[int, tuple[int, int]] = {}  # bounds by base
        self._changed = False

    def add(self, tensor: torch.Tensor, address: int) -> None:
        storage = tensor.untyped_storage()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = address + (last + 1) * tensor.element_size()
        with self._lock:
            known = self._extents.get(storage._cdata)
            if known is None or known[0].expired():
                known = self._extents[storage._cdata] = StorageWeakRef(storage), {}
            if known[1].get(address, 0) < end:
                known[1][address], self._changed = end, True

    def forget_the_dead(self) -> None:
        with self._lock:
            dead = [key for key, (storage, _) in self._extents.items() if storage.expired()]
            for key in dead:
                del self._extents[key]
            self._changed = self._changed or bool(dead)

    def bounds(self, base: int) -> tuple[int, int]:
        """The first address and the end of the largest tensor that begins at `base`; else of those that contain it."""
        with self._lock:
            if self._changed:
                extents = [one for _, of_storage in self._extents.values() for one in of_storage.items()]
                table = np.array(extents, np.int64).reshape(-1, 2)
                self._starts, self._ends, self._changed = table[:, 0], table[:, 1], False
                self._found.clear()
            found = self._found.get(base)
            if found is None:
                for among in (self._starts == base, (self._starts <= base) & (base < self._ends)):
                    if among.any():
                        found = int(self._starts[among].min()), int(self._ends[among].max())
                        break
                self._found[base] = found = found or _NOTHING
            return found


known_tensors = KnownTensors()
_installed = False


def check_bounds_once() -> None:
    """Check the kernels that this process interprets from here on. A wrong access raises within the kernel."""
    global _installed
    if _installed:
        return
    _installed = True
    from triton.runtime import interpreter

    _note_addresses()
    _check_accesses(interpreter)


def _note_addresses() -> None:
    address_of = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        address = address_of(self)
        if address:
            with torch._C.DisableTorchFunction():
                known_tensors.add(self, address)
        return address

    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]


def _check_accesses(interpreter: Any) -> None:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    launch, offset = executor.__call__, builder.create_addptr

    def checked_launch(self: Any, *arguments: Any, **named: Any) -> Any:
        known_tensors.forget_the_dead()
        return launch(self, *arguments, **named)

    def checked_offset(self: Any, pointers: Any, offsets: Any) -> Any:
        output = offset(self, pointers, offsets)
        output.attr[_WITHIN] = _bounds_of(pointers)
        return output

    executor.__call__, builder.create_addptr = checked_launch, checked_offset
    for name, pointers_at, mask_at in (
        ("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_cas", 0, None),
        ("create_atomic_rmw", 1, 3),
    ):  # fmt: skip
        setattr(builder, name, _checked(getattr(builder, name), name.split("_", 1)[1], pointers_at, mask_at))
    for name, at in (("expand_dims", 0), ("broadcast", 0), ("splat", 1), ("reshape", 0), ("trans", 0)):
        setattr(builder, f"create_{name}", _kept(getattr(builder, f"create_{name}"), at, interpreter.TensorHandle))


def _bounds_of(pointers: Any) -> Bounds:
    """The bounds of each pointer: those of its base, or of what it is itself."""
    found = pointers.attr.get(_WITHIN)
    if found is None:
        bases, where = np.unique(pointers.data.astype(np.int64), return_inverse=True)
        by_base = [known_tensors.bounds(base) for base in bases.tolist()]
        if len(by_base) == 1:
            found = by_base[0]
        else:
            table = np.array(by_base, np.int64)[where].reshape(*pointers.data.shape, 2)
            found = table[..., 0], table[..., 1]
        pointers.attr[_WITHIN] = found
    return found


def _checked(access: Any, kind: str, pointers_at: int, mask_at: int | None) -> Any:
    def checked_access(self: Any, *arguments: Any) -> Any:
        pointers = arguments[pointers_at]
        mask = True if mask_at is None else arguments[mask_at].data
        low, high = _bounds_of(pointers)
        first = pointers.data.astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        wrong = ((first < low) | (first + size > high)) & mask
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            low, high = (int(np.broadcast_to(edge, wrong.shape).ravel()[lane]) for edge in (low, high))
            tensor = f"the tensor at [{low}, {high})" if low < high else "no tensor that is alive"
            at = int(np.broadcast_to(first, wrong.shape).ravel()[lane])
            lanes = f"{int(wrong.sum())} of {wrong.size} lanes, first lane {lane}"
            raise OutOfBounds(f"{kind}: {lanes}: bytes [{at}, {at + size}) of {tensor}")
        accessed[kind] += 1
        return access(self, *arguments)

    return checked_access


def _kept(function: Any, at: int, handle: Any) -> Any:
    """A function of the builder that hands the bounds of its argument `at` on."""

    def keeping(self: Any, *arguments: Any, **named: Any) -> Any:
        output = function(self, *arguments, **named)
        bounds = arguments[at].attr.get(_WITHIN)
        if bounds is not None:
            if isinstance(bounds[0], np.ndarray):
                dtype = arguments[at].dtype.scalar
                moved = [list(arguments) for _ in bounds]
                for new, edge in zip(moved, bounds, strict=True):
                    new[at] = handle(edge.astype(np.uint64), dtype)
                bounds = tuple(function(self, *new, **named).data.astype(np.int64) for new in moved)
            output.attr[_WITHIN] = bounds
        return output

    return keeping
