"""What kernels load and store in Triton's interpreter, by where it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter


class Counts:
    """Bytes of loads and stores of the calls in its body.

    Attributes:
        found: by ("load" or "store", whether in one of `windows`).
    """

    def __init__(self, windows: Sequence[torch.Tensor]) -> None:
        self.found: Counter[Any] = Counter()
        self._ranges = [(w.data_ptr(), w.data_ptr() + w.numel()) for w in windows]
        self._patches = ExitStack()

    def __enter__(self) -> Counts:
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def loaded(self_: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._count("load", pointers, mask)
            return load(self_, pointers, mask, *rest)

        def stored(self_: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._count("store", pointers, mask)
            return store(self_, pointers, value, mask, *rest)

        enter = self._patches.enter_context
        enter(mock.patch.object(builder, "create_masked_load", loaded))
        enter(mock.patch.object(builder, "create_masked_store", stored))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()

    def _count(self, kind: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data.astype(bool)].astype(np.int64)
        width = max(pointers.dtype.element_ty.primitive_bitwidth // 8, 1)
        in_window = np.zeros(addresses.shape, bool)
        for first, end in self._ranges:
            in_window |= (addresses >= first) & (addresses < end)
        windows = int(in_window.sum())
        self.found[kind, True] += windows * width
        self.found[kind, False] += (addresses.size - windows) * width
