"""Compiles LLVM IR for this machine's CPU by the LLVM inside Triton, and loads the machine code: no C compiler is
needed.

A function of `llvm_ir` calls nothing and has no constants in memory, so that its code needs no linker: it is copied
from the object file into executable memory as it is.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from .llvm_ir import Function

_log = logging.getLogger(__name__)

_PARALLEL = 1 << 20  # bytes that are worth another thread


class NotCompiledError(Exception):
    """Nothing can be compiled for this machine, or run; the message says why."""


class Loop:
    """A compiled function whose first parameters are `first` and `end`: it does iterations `first` to `end`
    (exclusive) of its outer loop, which do not depend on one another.

    Attributes:
        name: of the function.

    Raises:
        NotCompiledError: it cannot be compiled for this machine, or loaded.
    """

    def __init__(self, function: Function) -> None:
        self.name = function.name
        try:
            code, start = machine_code(object_file(function.ir()), function.name)
            self._memory = executable(code)
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise NotCompiledError(f"{function.name}: {error}") from error
        # The code runs without Python's lock.
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._memory.ctypes.data + start)
        self._parameters = ctypes.c_int64 * len(function.parameters)

    def __call__(self, number: int, nbytes: int, *parameters: int) -> None:
        """Do `number` iterations, on torch's number of threads if they read and write so many bytes.

        Args:
            parameters: those after `first` and `end`.
        """
        threads = min(torch.get_num_threads(), nbytes // _PARALLEL, number)
        if threads <= 1:
            self._call(self._parameters(0, number, *parameters))
            return
        bounds = [number * i // threads for i in range(threads + 1)]
        list(_threads(os.getpid()).map(self._range, bounds, bounds[1:], [parameters] * threads))

    def _range(self, first: int, end: int, parameters: tuple[int, ...]) -> None:
        self._call(self._parameters(first, end, *parameters))


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Those of a process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(torch.get_num_threads(), "shardweave-rows")


def compiled(function: Function) -> Loop | None:
    """Return the loop, or None if it cannot be compiled: then torch operations take its place."""
    try:
        return Loop(function)
    except NotCompiledError as error:
        _log.warning("torch operations take the place of a compiled loop over rows, which is faster: %s", error)
        return None


def why_not_compiled() -> str:
    """Why no loop is compiled in this process; empty: they are."""
    try:
        Loop(Function("nothing", ["first", "end"]))(0, 0)
    except NotCompiledError as error:
        return str(error)
    return ""


def target() -> tuple[str, str]:
    """The triple and the processor that code is compiled for.

    Raises:
        ValueError: this machine is not one of those.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in ("x86_64", "aarch64"):
        raise ValueError(f"this is {platform.system()} {machine}; allowed: Linux on x86_64 or aarch64")
    if machine == "aarch64":
        return "aarch64-unknown-linux-gnu", "generic"
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return "x86_64-unknown-linux-gnu", "x86-64-v3" if has_avx2 else "x86-64"


def object_file(ir: str) -> bytes:
    """Compile for this machine. Products and sums are not fused."""
    from triton._C.libtriton import llvm

    llvm.init_targets()
    return bytes(llvm.translate_to_asm(ir, *target(), "", [], False, True))


def machine_code(elf: bytes, name: str) -> tuple[bytes, int]:
    """Return the code in an ELF object file of 64 bits, and where in it a function begins.

    Raises:
        ValueError: the code refers to other memory, or calls something; or the function is not there.
    """
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, number = struct.unpack_from("<HH", elf, 0x3A)
    # name, type, flags, address, offset, size, link, info
    sections = [struct.unpack_from("<IIQQQQII", elf, table + i * size) for i in range(number)]
    executable_flag, relocations, symbols = 4, (4, 9), 2
    (text,) = [i for i, section in enumerate(sections) if section[2] & executable_flag and section[5]]
    if any(kind in relocations and info == text for _, kind, *_, info in sections):
        raise ValueError("the code refers to other memory")
    code = elf[sections[text][4] :][: sections[text][5]]
    for _, kind, _, _, offset, nbytes, names, _ in sections:
        if kind == symbols:
            for at in range(offset, offset + nbytes, 24):
                of_name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf, at)
                given = elf[sections[names][4] + of_name :]
                if section == text and given.startswith(name.encode() + b"\0"):
                    return code, value
    raise ValueError(f"the code has no function {name}")


def executable(code: bytes) -> npt.NDArray[np.uint8]:
    """Return memory with the code, which can be run and not be written.

    Raises:
        OSError: this process may have no such memory.
    """
    fd = os.memfd_create("shardweave-code")
    try:
        os.write(fd, code)
        return np.frombuffer(mmap.mmap(fd, len(code), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC), np.uint8)
    finally:
        os.close(fd)
