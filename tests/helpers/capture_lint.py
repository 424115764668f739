"""A context that pretends that a CUDA graph is captured, and raises where a capture would fail or go stale.

Refused are: memory made on the host for the device or copied to it, kernels compiled or loaded, windows allocated, and
reads of device values (`SyncGuard`). For tests with interpreted kernels on CPU tensors, which take the place of a GPU.

The interpreter compiles nothing. So each launch through Triton's binder gets the key that the binder of the installed
version gives it: constants, types of arguments, and which are 1 or multiples of 16. A key that is new in a capture is a
kernel that a GPU would compile there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from sync_guard import SyncGuard
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter, jit

from shardweave.kernels import launch as launch_module
from shardweave.kernels.addresses import AddressTables
from shardweave.kernels.channel import Failure
from shardweave.runtime.moe import overflow
from shardweave.runtime.transports.symmetric_memory.memory import SharedSegments

FACTORIES = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided")


class Keys:
    """The keys of the launches of a process through Triton's binder. Make it before anything is bound."""

    def __init__(self) -> None:
        self.known: set[tuple[Any, ...]] = set()
        self.launches = self.prepared = 0  # launches by the binder, and of prepared kernels
        self.refuse: Callable[[str], None] | None = None
        self._binders: dict[Any, Callable[..., Any]] = {}
        self._direct = 0  # launches of prepared kernels that are under way: they bypass the binder
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        call = interpreter.GridExecutor.__call__

        def launched(executor: Any, *arguments: Any, **named: Any) -> Any:
            if not self._direct:
                self._note(executor.fn, arguments, named)
            return call(executor, *arguments, **named)

        interpreter.GridExecutor.__call__ = launched
        prepared = launch_module.prepared

        def preparing(*arguments: Any) -> Callable[..., None]:
            if self.refuse is not None:
                self.refuse("a kernel is compiled and loaded")
            start = prepared(*arguments)

            def direct(*values: Any) -> None:
                self._direct += 1
                self.prepared += 1
                try:
                    start(*values)
                finally:
                    self._direct -= 1

            return direct

        for name, module in list(sys.modules.items()):
            if name.startswith("shardweave.kernels.") and getattr(module, "prepared", None) is prepared:
                module.prepared = preparing  # type: ignore[attr-defined]

    def _note(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        binder = self._binders.get(function)
        if binder is None:
            kernel = self._kernel_of(function)
            binder = jit.create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[function] = binder
        bound, specialization, options = binder(*arguments, **named)
        key = function.__qualname__, str(specialization), str(options), str(_constants(specialization, bound))
        self.launches += 1
        if key not in self.known and self.refuse is not None:
            self.refuse(f"a kernel is compiled: {key}")
        self.known.add(key)

    @staticmethod
    def _kernel_of(function: Any) -> Any:
        """The function as it is decorated where kernels are compiled."""
        decorated = getattr(sys.modules[function.__module__], function.__name__)
        accepted = inspect.signature(jit.JITFunction.__init__).parameters
        return jit.JITFunction(function, **{k: v for k, v in decorated.kwargs.items() if k in accepted})


def _constants(specialization: Any, bound: dict[str, Any]) -> dict[str, Any]:
    kinds = zip(bound.items(), specialization, strict=False)
    return {name: value for (name, value), kind in kinds if kind[0] == "constexpr"}


class PretendedCapture(SyncGuard):
    """A capture of the calls in its body. `keys`: those of the calls before it."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys, self._patches = keys, ExitStack()

    def _refused_call(self, what: str) -> Callable[..., None]:
        return lambda *_, **__: self._refuse(what)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A factory of tensors that pins nothing."""

        def watched(*arguments: Any, **named: Any) -> Any:
            if named.get("pin_memory"):
                self._refuse(f"{function.__name__}(pin_memory=True)")
            return function(*arguments, **named)

        return watched

    def __enter__(self) -> PretendedCapture:
        enter = self._patches.enter_context
        enter(patch.object(torch.cuda, "is_current_stream_capturing", lambda: True))
        enter(patch.object(overflow, "capturing", lambda device: True))
        enter(patch.object(AddressTables, "_upload", self._refused_call("addresses are uploaded")))
        enter(patch.object(Failure, "__init__", self._refused_call("a word of the host is pinned")))
        for name in ("make", "join"):
            enter(patch.object(SharedSegments, name, self._refused_call("memory of a window is allocated")))
        uploaded = launch_module.uploaded
        for name, module in list(sys.modules.items()):
            if name.startswith("shardweave.") and getattr(module, "uploaded", None) is uploaded:
                enter(patch.object(module, "uploaded", self._refused_call("a table is uploaded")))
        enter(patch.object(torch.Tensor, "pin_memory", self._refused_call("pin_memory()")))
        for name in FACTORIES:
            enter(patch.object(torch, name, self._watched(getattr(torch, name))))
        self._keys.refuse = self._refuse
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._keys.refuse = None
        try:
            super().__exit__(*raised)
        finally:
            self._patches.close()
