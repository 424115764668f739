"""A context that pretends that a CUDA graph is captured, and raises where a capture would fail or go stale.

Refused are: memory made on the host for the device or copied to it, kernels compiled or loaded, windows allocated, and
reads of device values (`SyncGuard`). For tests with interpreted kernels on CPU tensors, which take the place of a GPU.

The interpreter compiles nothing, so kernels count as compiled where `launch.loaded` returns them. A launch through
Triton's own binder, which compiles what it does not find, is refused as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from sync_guard import SyncGuard
from triton.runtime import interpreter

from shardweave.kernels import launch as launch_module
from shardweave.kernels.addresses import AddressTables
from shardweave.kernels.channel import Failure
from shardweave.runtime.moe import overflow
from shardweave.runtime.moe.transfer import window
from shardweave.runtime.transports import buffer_pool
from shardweave.runtime.transports.symmetric_memory.memory import SharedSegments

FACTORIES = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided")


class Keys:
    """The launches of a process. Make it before anything is bound."""

    def __init__(self) -> None:
        self.launches = self.prepared = 0  # launches by the binder, and of kernels that were loaded before
        self.refuse: Callable[[str], None] | None = None
        self._direct = 0  # launches of the latter that are under way
        call = interpreter.GridExecutor.__call__

        def launched(executor: Any, *arguments: Any, **named: Any) -> Any:
            if not self._direct:
                self.launches += 1
                if self.refuse is not None:
                    self.refuse(f"Triton's binder launches a kernel: {executor.fn.__qualname__}")
            return call(executor, *arguments, **named)

        interpreter.GridExecutor.__call__ = launched
        loaded = launch_module.loaded

        def loading(kernel: Any, *arguments: Any, **options: Any) -> _Loaded:
            if self.refuse is not None:
                self.refuse(f"a kernel is compiled and loaded: {kernel}")
            return _Loaded(self, loaded(kernel, *arguments, **options))

        launch_module.loaded = loading


class _Loaded:
    """A kernel that is launched without the binder."""

    def __init__(self, keys: Keys, kernel: Any) -> None:
        self._keys, self._kernel = keys, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def direct(*values: Any) -> None:
            self._keys._direct += 1
            self._keys.prepared += 1
            try:
                self._kernel[grid](*values)
            finally:
                self._keys._direct -= 1

        return direct


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
        for module in (overflow, buffer_pool, window):
            enter(patch.object(module, "capturing", lambda device: True))
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
