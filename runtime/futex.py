"""Sleeping until another process says that a word in shared memory has changed: Linux futexes."""

from __future__ import annotations

import ctypes
import platform

_X86_64 = 202
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


if platform.system() == "Linux":
    _syscall = ctypes.CDLL(None).syscall
    _syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Timespec)]


def sleep_on(address: int, value: int, seconds: float) -> None:
    """Sleep until `wake`, `seconds` at most; not at all unless the 32-bit word at `address` is `value` modulo 2**32."""
    whole, rest = divmod(seconds, 1)
    _syscall(_X86_64, address, _WAIT, value & 0xFFFFFFFF, _Timespec(int(whole), int(rest * 1e9)))


def wake(address: int) -> None:
    """End the sleep of all processes that sleep on the word at `address`."""
    _syscall(_X86_64, address, _WAKE, _EVERYONE, None)
