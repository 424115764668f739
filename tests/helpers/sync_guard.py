"""A guard that raises on every operation that would make the host wait for the device, for tests without a GPU.

It consists of a function mode and a dispatch mode: the latter does not see `.tolist()`, `.cpu()`, `.numpy()` or a no-op
`.to()`; the former does not see operators that C++ code calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardweave.runtime.dtensor import local
from shardweave.runtime.executor import dispatch_modes

METHODS = frozenset(
    """
    __array__ __bool__ __complex__ __contains__ __float__ __format__ __index__ __int__ __repr__
    allclose argwhere bincount cpu cuda equal histc is_nonzero item masked_select nonzero
    numpy repeat_interleave tolist unique unique_consecutive unique_dim
    """.split()
)
"""Tensor methods and torch functions whose result, or its size, depends on values on the device."""

OPERATORS = frozenset(
    """
    _local_scalar_dense _unique _unique2 allclose argwhere bincount equal is_nonzero item masked_select nonzero
    repeat_interleave unique_consecutive unique_dim
    """.split()
)
"""The same as operators of the dispatcher, without namespace and overload."""

FROM_HOST = frozenset("tensor as_tensor asarray new_tensor scalar_tensor".split())
"""Functions that copy host values into a tensor: on a device, a copy from pageable memory, which waits."""


class SyncRefused(Exception):
    """An operation that would wait for the device. Not a RuntimeError, so that handlers of those do not hide it."""


class _Functions(TorchFunctionMode):
    def __init__(self, refused: Callable[[str], None]) -> None:
        super().__init__()
        self._refused = refused

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in METHODS:
            self._refused(f"{name}()")
        # Copies between devices wait; on the CPU they are recognised by their arguments.
        if name == "to" and (_names_device(args[1:]) or "device" in kwargs or "other" in kwargs):
            self._refused("to(device)")
        if name == "type" and len(args) > 1:
            self._refused("type(dtype), which may name a device")
        # The dispatcher cannot tell these from functions that wrap existing memory.
        if name in FROM_HOST:
            self._refused(f"{name}()")
        if name in ("__getitem__", "__setitem__") and _lists(args[1]):
            self._refused("an index by a list")
        return function(*args, **kwargs)


def _names_device(args: Any) -> bool:
    return any(isinstance(a, torch.device | str | int | torch.Tensor) and not isinstance(a, bool) for a in args[:1])


def _lists(index: Any) -> bool:
    return isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(i, list) for i in index))


class _Operators(TorchDispatchMode):
    def __init__(self, refused: Callable[[str], None], seen: Counter[str]) -> None:
        super().__init__()
        self._refused, self._seen = refused, seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function._schema.name.split("::")[1]
        self._seen[name] += 1
        if name in OPERATORS and (name != "repeat_interleave" or kwargs.get("output_size") is None):
            self._refused(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(map(_is_mask, args[1])):
            # Setting one value by a mask is a fill, which needs no count.
            if name == "index" or args[2].numel() != 1:
                self._refused(f"{name} by a mask")
        if name == "_to_copy" and kwargs.get("device") is not None:
            self._refused("to(device)")
        if name == "copy_" and args[0].device != args[1].device:
            self._refused("copy_ between devices")
        return function(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def seen_inside() -> Iterator[None]:
    """A context in which dispatch modes see the operators of which redistributions and dispatches consist."""
    counts = [(module, module.count_dispatch_modes) for module in (local, dispatch_modes)]
    for module, _ in counts:
        module.count_dispatch_modes = lambda: 0
    try:
        yield
    finally:
        for module, count in counts:
            module.count_dispatch_modes = count


class SyncGuard:
    """A context in which every call that would wait for the device raises `SyncRefused`.

    The first error is raised again at the end, so that no handler can hide it.

    Attributes:
        seen: how often each operator was called, to check that the guard saw any.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._first: SyncRefused | None = None
        self._lifted = False
        self._modes = _Functions(self._refuse), _Operators(self._refuse, self.seen)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A context in which nothing raises, for CPU code that is a kernel on a GPU."""
        before, self._lifted = self._lifted, True
        try:
            yield
        finally:
            self._lifted = before

    def _refuse(self, what: str) -> None:
        if self._lifted:
            return
        error = SyncRefused(what)
        self._first = self._first or error
        raise error

    def __enter__(self) -> SyncGuard:
        # This mode sees the operators of a redistribution or dispatch, not one operator for all of it.
        self._inside = seen_inside()
        self._inside.__enter__()
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
        self._inside.__exit__(None, None, None)
        if self._first is not None and error is None:
            raise self._first


def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exempt `function`, whose arguments are on the host; on a CPU the guard cannot tell."""

    def outside(*args: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return function(*args)

    return outside
