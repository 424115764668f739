"""Compiles LLVM IR for this machine's CPU by the LLVM inside Triton, and loads the machine code: no C compiler is
needed.

A function of `llvm_ir` calls nothing, so that its code needs no linker: it is copied from the object file into
executable memory, with its constants.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import platform
import struct
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from ...errors import ArgumentError
from .llvm_ir import Function

_log = logging.getLogger(__name__)

# By machine: LLVM's name of the target, and the processor with the least.
_TARGETS = {"x86_64": ("X86", "x86-64"), "aarch64": ("AArch64", "generic")}
# Of ELF: kinds of sections, the machine, and relocations by 32-bit distances (R_X86_64_PC32 and _PLT32).
_SYMBOLS, _RELOCATIONS, _X86_64, _DISTANCES = 2, (4, 9), 62, (2, 4)
_PARALLEL = 1 << 20  # bytes that are worth another thread


class NotCompiledError(Exception):
    """Nothing can be compiled for this machine, or run; the message says why."""


class Loop:
    """A compiled function whose first parameters are `first` and `end`: it does iterations `first` to `end`
    (exclusive) of its outer loop.

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
        except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
            raise NotCompiledError(str(error)) from error
        # The code runs without Python's lock.
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._memory.ctypes.data + start)
        self._parameters = ctypes.c_int64 * len(function.parameters)

    def __call__(self, number: int, nbytes: int, *parameters: torch.Tensor | int | None) -> None:
        """Do `number` iterations.

        Args:
            nbytes: that they read and write. From 2 MiB on torch's number of threads share the iterations, which then
                must not depend on one another. 0: one thread does them, in order.
            parameters: those after `first` and `end`; of tensors their addresses, of None 0.

        Raises:
            ArgumentError: a tensor has elements and no memory.
        """
        given = [x if isinstance(x, int) else 0 if x is None else memory_address(x) for x in parameters]
        threads = min(torch.get_num_threads(), nbytes // _PARALLEL, number)
        if threads > 1:
            self._in_threads([number * i // threads for i in range(threads + 1)], given)
        else:
            self._call(self._parameters(0, number, *given))

    def _in_threads(self, bounds: list[int], parameters: list[int]) -> None:
        pool, futures = _threads(os.getpid()), []
        try:
            for first, end in itertools.pairwise(bounds[1:]):
                try:
                    futures.append(pool.submit(self._call, self._parameters(first, end, *parameters)))
                except RuntimeError:  # there are no more threads, as when the interpreter ends
                    self._call(self._parameters(first, end, *parameters))
            self._call(self._parameters(bounds[0], bounds[1], *parameters))
        finally:
            _wait_for(futures)


def _wait_for(futures: list[Future[None]]) -> None:
    """Wait for the threads, also if a signal's handler raises: until then they use the caller's memory."""
    interrupt: BaseException | None = None
    for future in futures:
        while not future.done():
            try:
                wait([future])
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Those of a process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(torch.get_num_threads(), "shardweave-rows")


def memory_address(x: torch.Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has none.

    Raises:
        ArgumentError: it has elements and no memory.
    """
    address = x.data_ptr()
    if not address and x.numel():
        kind = type(x).__name__
        raise ArgumentError(f"a {kind} of shape {tuple(x.shape)} without memory; allowed: a tensor with memory")
    return address


_warned: set[str] = set()


def compiled(function: Function) -> Loop | None:
    """Return the loop, or None if it cannot be compiled: then torch operations take its place."""
    try:
        return Loop(function)
    except NotCompiledError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            _log.warning(
                f"torch operations dispatch and combine tokens on CPUs, many times as slow as loops that Triton's LLVM "
                f"compiles, which it cannot here: {error}"
            )
        return None


def cpu_target() -> tuple[str, str]:
    """The machine and the features of its CPU that code is compiled for.

    Raises:
        ValueError: nothing is compiled for this machine.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _TARGETS:
        raise ValueError(f"this is {platform.system()} {machine}; allowed: Linux on {' or '.join(_TARGETS)}")
    # As torch's own code for such CPUs.
    return machine, "+avx2,+f16c" if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else ""


def object_file(ir: str) -> bytes:
    """Compile for this machine. Products and sums are not fused.

    Raises:
        ValueError: this Triton does not compile for this machine's CPU.
    """
    machine, features = cpu_target()
    translate, processor = _llvm(machine).translate_to_asm, _TARGETS[machine][1]
    # Flags; not fused; an object file.
    arguments = ir, f"{machine}-unknown-linux-gnu", processor, features, list[str](), False, True
    for more in (), (False,):  # from triton 3.8 on: whether addresses are made canonical
        try:
            return bytes(translate(*arguments, *more))
        except TypeError:
            continue
    raise ValueError(f"triton {triton.__version__} takes other arguments to compile")


@cache
def _llvm(machine: str) -> Any:
    """Triton's LLVM, which can compile for the CPU of this machine.

    Raises:
        ValueError: it cannot.
    """
    from triton._C import libtriton

    libtriton.llvm.init_targets()
    # Triton 3.9 initialises the targets of GPUs only. To compile for one that was not initialised ends the process.
    library, target = ctypes.CDLL(libtriton.__file__), f"LLVMInitialize{_TARGETS[machine][0]}"
    if hasattr(library, f"{target}Target"):
        for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter", "AsmParser"):
            library[target + part]()
    elif not triton.__version__.startswith("3.6."):
        raise ValueError(f"triton {triton.__version__} does not offer LLVM's target {_TARGETS[machine][0]}")
    return libtriton.llvm


def machine_code(elf: bytes, name: str) -> tuple[bytes, int]:
    """Return what an ELF object file of 64 bits has to load, and where in it a function begins: its code, then its
    constants. The code refers to these by their distance, so that it runs wherever it lies.

    Raises:
        ValueError: the code refers to other memory, calls something, or refers to constants in another way; or the
            function is not there.
    """
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, number = struct.unpack_from("<HH", elf, 0x3A)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size)) for i in range(number)]
    image, begins = bytearray(), {}
    for i in sorted(range(number), key=lambda i: not sections[i].is_code):
        section = sections[i]
        if section.is_loaded:
            image += bytes(-len(image) % max(section.align, 1))
            begins[i] = len(image)
            image += elf[section.offset :][: section.nbytes]
    (symbols,) = [section for section in sections if section.kind == _SYMBOLS]
    places, start = [], None
    for at in range(symbols.offset, symbols.offset + symbols.nbytes, 24):
        name_at, _, _, i, value, _ = struct.unpack_from("<IBBHQQ", elf, at)
        places.append(begins[i] + value if i in begins else None)
        if elf[sections[symbols.link].offset + name_at :].startswith(name.encode() + b"\0") and name_at:
            start = places[-1]
    for section in sections:
        if section.kind in _RELOCATIONS and section.info in begins:
            for at in range(section.offset, section.offset + section.nbytes, 24):
                offset, kind, symbol, addend = struct.unpack_from("<QIIq", elf, at)
                place, where = places[symbol], begins[section.info] + offset
                if place is None or kind not in _DISTANCES or elf[0x12] != _X86_64:
                    raise ValueError(
                        "the code calls functions or refers to other memory, as for float16 on a CPU without AVX2"
                    )
                struct.pack_into("<i", image, where, place + addend - where)
    if start is None:
        raise ValueError(f"the code has no function {name}")
    return bytes(image), start


class _Section(NamedTuple):
    """The header of a section of an ELF file."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    info: int
    align: int
    entry: int

    @property
    def is_code(self) -> bool:
        return bool(self.flags & 4)

    @property
    def is_loaded(self) -> bool:
        """Code and constants; not tables for debuggers and for exceptions, of which the code has none."""
        return self.kind == 1 and bool(self.flags & 2) and self.nbytes > 0


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
