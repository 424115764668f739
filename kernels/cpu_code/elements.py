"""Elements of rows in compiled loops: loaded as float32, and stored as their dtype, rounded to nearest even."""

from __future__ import annotations

import torch

from .llvm_ir import Function, Value

# bfloat16 is handled as its bits, which not every processor converts.
_KINDS = {torch.float32: "float", torch.bfloat16: "i16", torch.float16: "half"}


class Elements:
    """n adjacent elements of float32, bfloat16 or float16."""

    def __init__(self, f: Function, dtype: torch.dtype, n: int) -> None:
        self.n, self.float = n, f"<{n} x float>"
        self._f, self._dtype, self._kind = f, dtype, f"<{n} x {_KINDS[dtype]}>"

    def load(self, pointer: Value) -> Value:
        return self._widened(self._f.load(self._kind, pointer))

    def store(self, value: Value, pointer: Value) -> None:
        self._f.store(self._narrowed(value), pointer)

    def rounded(self, value: Value) -> Value:
        """float32 values, rounded to the dtype."""
        return value if self._dtype is torch.float32 else self._widened(self._narrowed(value))

    def _widened(self, value: Value) -> Value:
        if self._dtype is torch.bfloat16:
            return (value.to("i32") << 16).bits("float")
        return value if self._dtype is torch.float32 else value.to("float")

    def _narrowed(self, value: Value) -> Value:
        if self._dtype is torch.bfloat16:
            bits = value.bits("i32")
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            nan = self._f.constant(rounded.kind, 0x7FC0)
            return value.is_nan().where(nan, rounded).to("i16")
        return value if self._dtype is torch.float32 else value.to("half")
