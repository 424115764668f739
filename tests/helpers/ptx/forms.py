"""What each instruction between registers computes: a closed table by the instruction's form.

Values are arrays with an element for each lane: bool, or unsigned integers of a register's width, whose bits an
instruction takes as its type has them. A form that is not here is an error of whoever looks it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
_CANONICAL_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FF8000000000000}


class Form(NamedTuple):
    """`types`: of the destination, then of each source."""

    types: tuple[str, ...]
    compute: Callable[..., np.ndarray]


FORMS: dict[str, Form] = {}


def bits_of(kind: str) -> int:
    """The width of a type; 1 for a predicate. Pairs such as f16x2 have that of their register."""
    if kind == "pred":
        return 1
    if kind.endswith("x2"):
        return 2 * bits_of(kind[:-2])
    return {"bf16": 16, "e4m3": 8}.get(kind) or int(kind.lstrip("subf"))


def typed(bits: np.ndarray, kind: str) -> np.ndarray:
    """The values that the low bits of registers are, as a type has them."""
    if kind == "pred":
        return bits
    width = bits_of(kind)
    if kind.startswith("bf"):
        return (bits.astype(np.uint32) << 16).view(np.float32)
    bits = bits.astype(UNSIGNED[width], copy=False)
    return bits.view({"s": _SIGNED, "f": _FLOATS}.get(kind[0], UNSIGNED)[width])


def untyped(values: np.ndarray, kind: str) -> np.ndarray:
    """The bits of values of a type."""
    return values if kind == "pred" else values.view(UNSIGNED[values.dtype.itemsize * 8])


def _define(form: str, compute: Callable[..., np.ndarray], target: str, *sources: str) -> None:
    """A form on values of types; what it returns is of the target's type, or already bits where that is "bN"."""

    def on_bits(*bits: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            result = compute(*(typed(b, kind) for b, kind in zip(bits, sources, strict=True)))
        return untyped(np.asarray(result), target)

    assert form not in FORMS, form
    FORMS[form] = Form((target, *sources), on_bits)


def _halves(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A function of 16-bit registers, on both halves of 32-bit registers."""

    def both(*bits: np.ndarray) -> np.ndarray:
        low = function(*(b.astype(np.uint16) for b in bits))
        high = function(*((b >> 16).astype(np.uint16) for b in bits))
        return high.astype(np.uint32) << 16 | low

    return both


def _on_halfs(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A function of float16 numbers, on their bits."""
    return lambda *bits: np.asarray(function(*(b.view(np.float16) for b in bits))).view(np.uint16)


# Integers.


def _shift_left(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    width = 8 * a.itemsize
    shifted = a << np.minimum(amount, width - 1).astype(a.dtype)
    return np.where(amount >= width, a.dtype.type(0), shifted)


def _shift_right(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """A shift by more than the width leaves 0, or the sign."""
    width = 8 * a.itemsize
    shifted = a >> np.minimum(amount, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(amount >= width, a.dtype.type(0), shifted)


def _wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    to = {2: np.int32, 4: np.int64} if a.dtype.kind == "i" else {2: np.uint32, 4: np.uint64}
    return a.astype(to[a.itemsize]) * b.astype(to[a.itemsize])


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.itemsize < 8:
        return (_wide(a, b) >> 8 * a.itemsize).astype(a.dtype)
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, np.broadcast_to(b, a.shape), strict=True)], a.dtype)


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero; what a division by zero is, is not defined."""
    assert b.all(), "a division by zero"
    quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _field(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe, for fields inside the register; signed ones are extended from their last bit."""
    start, length = (np.broadcast_to(n & 0xFF, a.shape).astype(np.int64) for n in (start, length))
    width = 8 * a.itemsize
    assert ((length > 0) & (start + length <= width)).all(), "a field of no bits, or beyond the register"
    up = a.view(UNSIGNED[width]) << (width - start - length).astype(UNSIGNED[width])
    return up.view(a.dtype) >> (width - length).astype(a.dtype)


def _inserted(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    assert (start + length <= 32).all() and (length > 0).all(), "a field of no bits, or beyond the register"
    mask = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)).astype(np.uint32) << start
    return b & ~mask | (a << start) & mask


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: each byte of the result is one of the eight of (b, a), or its sign repeated."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(a.shape, np.uint32)
    for i in range(4):
        which = selector >> np.uint32(4 * i) & np.uint32(0xF)
        byte = (both >> ((which & np.uint32(7)) * np.uint32(8)).astype(np.uint64) & np.uint64(0xFF)).astype(np.uint32)
        byte = np.where(which & np.uint32(8), np.where(byte & np.uint32(0x80), 0xFF, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * i)
    return result


for _kind in ("s16", "s32", "s64"):
    _define(f"add.{_kind}", np.add, _kind, _kind, _kind)
    _define(f"sub.{_kind}", np.subtract, _kind, _kind, _kind)
    _define(f"mul.lo.{_kind}", np.multiply, _kind, _kind, _kind)
for _kind in ("s32", "s64"):
    _define(f"mad.lo.{_kind}", lambda a, b, c: a * b + c, _kind, _kind, _kind, _kind)
for _kind in ("s32", "u32"):
    _wider = f"{_kind[0]}64"
    _define(f"mul.wide.{_kind}", _wide, _wider, _kind, _kind)
    _define(f"mad.wide.{_kind}", lambda a, b, c: _wide(a, b) + c, _wider, _kind, _kind, _wider)
for _kind in ("u16", "s32", "u32", "s64", "u64"):
    _define(f"mul.hi.{_kind}", _high, _kind, _kind, _kind)
for _kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
    _define(f"max.{_kind}", np.maximum, _kind, _kind, _kind)
    _define(f"min.{_kind}", np.minimum, _kind, _kind, _kind)
_define("max.relu.s32", lambda a, b: np.maximum(np.maximum(a, b), 0), "s32", "s32", "s32")
_define("max.u16x2", _halves(np.maximum), "b32", "b32", "b32")
_define("neg.s32", np.negative, "s32", "s32")
_define("div.s32", _divided, "s32", "s32", "s32")
_define("rem.s32", lambda a, b: a - _divided(a, b) * b, "s32", "s32", "s32")
_define("popc.b32", lambda a: np.array([int(x).bit_count() for x in a], np.uint32), "b32", "b32")
for _kind in ("b16", "b32", "b64", "pred"):
    _define(f"and.{_kind}", np.bitwise_and, _kind, _kind, _kind)
    _define(f"or.{_kind}", np.bitwise_or, _kind, _kind, _kind)
    _define(f"xor.{_kind}", np.bitwise_xor, _kind, _kind, _kind)
for _kind in ("b32", "pred"):
    _define(f"not.{_kind}", np.invert, _kind, _kind)
for _kind in ("b16", "b32", "b64"):
    _define(f"shl.{_kind}", _shift_left, _kind, _kind, "u32")
    _define(f"selp.{_kind}", lambda a, b, c: np.where(c, a, b), _kind, _kind, _kind, "pred")
for _kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
    _define(f"shr.{_kind}", _shift_right, _kind, _kind, "u32")
for _kind in ("s32", "u32", "s64"):
    _define(f"bfe.{_kind}", _field, _kind, _kind, "u32", "u32")
_define("bfi.b32", _inserted, "b32", "b32", "b32", "u32", "u32")
_define("prmt.b32", _permuted, "b32", "b32", "b32", "b32")
for _kind in ("b16", "b32", "b64", "u16", "u32", "u64", "pred"):
    _define(f"mov.{_kind}", lambda a: a, _kind, _kind)

# Comparisons.

for _name, _compared, _kinds in (
    ("eq", np.equal, "b16 b32 u32 b64 f64"), ("ne", np.not_equal, "b16 b32 s32 b64"),
    ("lt", np.less, "s32 u32 s64 u64 f32"),
    ("le", np.less_equal, "s32 s64"), ("gt", np.greater, "s32 u32 s64"), ("ge", np.greater_equal, "s32 s64"),
):  # fmt: skip
    for _kind in _kinds.split():
        _define(f"setp.{_name}.{_kind}", _compared, "pred", _kind, _kind)
_define("setp.nan.f64", lambda a, b: np.isnan(a) | np.isnan(b), "pred", "f64", "f64")

# Floats: rounded to nearest even, subnormal numbers kept.


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once: the product is exact in float64, and the sum there is rounded to odd."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (error != 0) & even, odd, total).astype(np.float32)


def _no_nan(pick: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The larger or smaller number; a NaN gives way to a number."""
    return lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, pick(a, b)))


def _extreme(pick: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The larger or smaller number, +0 above -0."""

    def picked(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        sign = np.signbit(a) & np.signbit(b) if pick is np.maximum else np.signbit(a) | np.signbit(b)
        zeros = np.where(sign, a.dtype.type(-0.0), a.dtype.type(0.0))
        return np.where((a == 0) & (b == 0), zeros, pick(a, b))

    return picked


def _with_nan(pick: Callable[..., np.ndarray], kind: str) -> Callable[..., np.ndarray]:
    """As `.NaN` has it: a NaN wins, as the canonical one."""
    width = bits_of(kind)

    def picked(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        bits = _extreme(pick)(a, b).view(UNSIGNED[width])
        return np.where(np.isnan(a) | np.isnan(b), UNSIGNED[width](_CANONICAL_NAN[width]), bits)

    return picked


def to_bfloat16(a: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers rounded to bfloat16."""
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), 0x7FFF, rounded).astype(np.uint16)


def to_float16(a: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(a), np.uint16(0x7FFF), a.astype(np.float16).view(np.uint16))


def _pair(convert: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """The first source becomes the upper half."""
    return lambda a, b: convert(a).astype(np.uint32) << 16 | convert(b)


def _float8_values() -> np.ndarray:
    """float16's bits of each float8_e4m3fn."""
    bits = np.arange(256)
    sign, exponent, mantissa = np.where(bits & 0x80, -1.0, 1.0), bits >> 3 & 0xF, bits & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    halves = (sign * values).astype(np.float16).view(np.uint16)
    return np.where(bits & 0x7F == 0x7F, np.uint16(0x7FFF), halves)


_FLOAT8 = _float8_values()

_define("add.f32", np.add, "f32", "f32", "f32")
_define("add.rn.f32", np.add, "f32", "f32", "f32")
_define("add.rn.f16", np.add, "f16", "f16", "f16")
for _name, _function in (("add", np.add), ("add.rn", np.add), ("mul", np.multiply)):
    _define(f"{_name}.f16x2", _halves(_on_halfs(_function)), "b32", "b32", "b32")
for _kind in ("f64", "f16"):
    _define(f"add.{_kind}", np.add, _kind, _kind, _kind)
    _define(f"mul.{_kind}", np.multiply, _kind, _kind, _kind)
_define("sub.f32", np.subtract, "f32", "f32", "f32")
_define("mul.f32", np.multiply, "f32", "f32", "f32")
_define("mul.rn.f32", np.multiply, "f32", "f32", "f32")
for _kind, _names in (("f32", ("rn", "full")), ("f64", ("rn",))):
    for _name in _names:
        _define(f"div.{_name}.{_kind}", np.divide, _kind, _kind, _kind)
_define("fma.rn.f32", _fma, "f32", "f32", "f32", "f32")
_define("ex2.approx.f32", np.exp2, "f32", "f32")
_define("abs.f32", np.abs, "f32", "f32")
_define("abs.f16x2", lambda a: a & np.uint32(0x7FFF7FFF), "b32", "b32")
for _name, _pick in (("max", np.maximum), ("min", np.minimum)):
    _define(f"{_name}.f64", _no_nan(_extreme(_pick)), "f64", "f64", "f64")
    for _kind in ("f32", "f16"):
        _define(f"{_name}.NaN.{_kind}", _with_nan(_pick, _kind), f"b{_kind[1:]}", _kind, _kind)
    _define(f"{_name}.NaN.f16x2", _halves(_on_halfs(_with_nan(_pick, "f16"))), "b32", "b32", "b32")
for _kind in ("f32", "f64"):
    _define(
        f"selp.{_kind}", lambda a, b, c: np.where(c, a, b), f"b{_kind[1:]}", f"b{_kind[1:]}", f"b{_kind[1:]}", "pred"
    )

# Conversions.


def _rounded_to_odd(a: np.ndarray) -> np.ndarray:
    """float32 from which a rounding to fewer bits gives what it would from the float64 or integer."""
    wide = a.astype(np.float64)
    narrow = wide.astype(np.float32)
    even = (narrow.view(np.uint32) & np.uint32(1)) == 0
    towards = np.where(wide > narrow, np.float32(np.inf), np.float32(-np.inf))
    return np.where((narrow != wide) & even & np.isfinite(narrow), np.nextafter(narrow, towards), narrow)


_INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


def _converts_to(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    dtype = typed(np.zeros(1, np.uint64), kind).dtype
    return lambda a: a.astype(dtype)


for _from in _INTEGERS:
    for _to in _INTEGERS:
        _define(f"cvt.{_to}.{_from}", _converts_to(_to), _to, _from)
    for _to in ("f32", "f64"):
        _define(f"cvt.rn.{_to}.{_from}", _converts_to(_to), _to, _from)
    _define(f"cvt.rn.f16.{_from}", lambda a: to_float16(a.astype(np.float64)), "b16", _from)
    _define(f"cvt.rn.bf16.{_from}", lambda a: to_bfloat16(_rounded_to_odd(a)), "b16", _from)
for _to, _from in (("f32", "f16"), ("f64", "f16"), ("f64", "f32"), ("f32", "bf16")):
    _define(f"cvt.{_to}.{_from}", _converts_to(_to), _to, _from)
_define("cvt.rn.f32.f64", lambda a: a.astype(np.float32), "f32", "f64")
_define("cvt.rn.f16.f32", to_float16, "b16", "f32")
_define("cvt.rn.f16.f64", to_float16, "b16", "f64")
_define("cvt.rn.bf16.f32", to_bfloat16, "b16", "f32")
_define("cvt.rn.bf16.f64", lambda a: to_bfloat16(_rounded_to_odd(a)), "b16", "f64")
_define("cvt.rn.bf16x2.f32", _pair(to_bfloat16), "b32", "f32", "f32")
_define("cvt.rn.f16x2.f32", _pair(to_float16), "b32", "f32", "f32")
_define("cvt.rn.f16x2.e4m3x2", lambda a: _FLOAT8[a >> 8].astype(np.uint32) << 16 | _FLOAT8[a & 0xFF], "b32", "b16")


def immediate(text: str, kind: str) -> Any:
    """A constant's bits, in the width of a type."""
    if kind == "pred":
        return np.bool_(int(text, 0) != 0)
    width = bits_of(kind)
    if text.startswith(("0f", "0d")):
        return UNSIGNED[width](int(text[2:], 16))
    return UNSIGNED[width](int(text.rstrip("U"), 0) & (1 << width) - 1)
