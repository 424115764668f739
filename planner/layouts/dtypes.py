"""Dtypes by name (numpy has no bfloat16 and no float8): item sizes, supported reductions and their identities."""

from __future__ import annotations

from ...errors import ArgumentError, UnsupportedError, shown

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
    """`dtype`, or ArgumentError if it is not the name of a dtype."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ArgumentError(f"dtype: {shown(dtype)} is not known; allowed: {', '.join(ITEMSIZE)}")
    return dtype


def is_floating(dtype: str) -> bool:
    """Whether a dtype is floating point or complex, so that division is defined."""
    return dtype.startswith(("float", "bfloat", "complex"))


def check_reducible(dtype: str, op: str) -> None:
    """Raise UnsupportedError for averages of integers and bool, and for max, min and prod of complex numbers."""
    if op == "avg" and not is_floating(dtype):
        raise UnsupportedError(
            f"partial op 'avg' of {dtype}: averages of integers are not exact; use P (sum) and divide"
        )
    if op in ("max", "min", "prod") and dtype.startswith("complex"):
        raise UnsupportedError(f"partial op {op!r} of {dtype}: complex tensors allow sum and avg")


def check_computed(dtype: str) -> None:
    """Raise UnsupportedError for dtypes that can be moved but not reduced."""
    if dtype in _MOVED_ONLY:
        allowed = ", ".join(name for name in ITEMSIZE if name not in _MOVED_ONLY)
        raise UnsupportedError(f"dtype: {dtype} can be moved but not reduced; allowed in a reduction: {allowed}")


def identity(dtype: str, op: str) -> float | int | bool:
    """The identity of `op`, held by ranks that contribute nothing.

    Raises:
        UnsupportedError: `op` is not defined for the dtype, or the dtype cannot represent the identity.
    """
    check_reducible(dtype, op)
    if dtype == "float8_e8m0fnu":
        raise UnsupportedError(f"dtype: {dtype} cannot represent the identity of {op!r}; allowed: any other dtype")
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
