"""Dtypes as names (numpy has no bfloat16 and no float8), with item sizes and the identities of reductions."""

from __future__ import annotations

from ..errors import ArgumentError, UnsupportedError, shown

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")
_MOVED_ONLY = ("uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32")


def check_dtype(dtype: str) -> str:
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ArgumentError(f"dtype: {shown(dtype)} is not known; allowed: {', '.join(ITEMSIZE)}")
    return dtype


def is_floating(dtype: str) -> bool:
    """Floating or complex: a division makes sense."""
    return dtype.startswith(("float", "bfloat", "complex"))


def check_reducible(dtype: str, op: str) -> None:
    """Refuse what has no meaning: integer and bool averages, an order of complex numbers, products of them."""
    if op == "avg" and not is_floating(dtype):
        raise UnsupportedError(f"partial op 'avg' of {dtype}: an integer average is not exact; use P (sum) and divide")
    if op in ("max", "min", "prod") and dtype.startswith("complex"):
        raise UnsupportedError(f"partial op {op!r} of {dtype}: complex tensors allow sum and avg")


def check_computed(dtype: str) -> None:
    """Refuse dtypes that are moved, and not computed with."""
    if dtype in _MOVED_ONLY:
        allowed = ", ".join(name for name in ITEMSIZE if name not in _MOVED_ONLY)
        raise UnsupportedError(f"dtype: {dtype} is moved, not reduced; allowed in a reduction: {allowed}")


def identity(dtype: str, op: str) -> float | int | bool:
    """The value that changes nothing under `op`: what ranks hold that contribute nothing."""
    check_reducible(dtype, op)
    if dtype == "float8_e8m0fnu":
        raise UnsupportedError(f"dtype: {dtype} has no identity of {op!r}; allowed: any other")
    if op in ("sum", "avg"):
        return False if dtype == "bool" else 0
    if op == "prod":
        return True if dtype == "bool" else 1
    if dtype == "bool":
        return op == "min"
    if is_floating(dtype):
        lowest = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0}.get(dtype, float("inf"))
        return lowest if op == "min" else -lowest
    bits = 8 * ITEMSIZE[dtype]
    if dtype.startswith("uint"):
        return 2**bits - 1 if op == "min" else 0
    return 2 ** (bits - 1) - 1 if op == "min" else -(2 ** (bits - 1))
