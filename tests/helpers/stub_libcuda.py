"""Triton's own launcher without a GPU: a `libcuda.so.1` that reports what `cuLaunchKernelEx` is given.

For a process of its own: the library stays loaded, and whoever asks for libcuda.so.1 then gets it. Kernels are compiled
for sm_90 and loaded, and their launches recorded, but not run. What a kernel takes is read from its binary.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STREAM = 0x5EED0
_KPARAM_INFO = 0x17  # of an entry in a cubin's .nv.info: ordinal, offset and size of a parameter


def compiler() -> str | None:
    """The C compiler, which Triton needs as well to build its launcher; None: there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class Launched:
    """One call of cuLaunchKernelEx; `arguments`: the bytes of each parameter of the binary, in order."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    arguments: tuple[bytes, ...]


class StubDriver:
    """Builds and loads the library, and makes it Triton's driver.

    Attributes:
        launches: all so far.
        images: the number of binaries loaded.
    """

    def __init__(self, folder: Path) -> None:
        library = folder / "libcuda.so.1"
        source = Path(__file__).with_suffix(".c")
        command = [compiler() or "cc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}", "-o", library, source]
        subprocess.run(command, check=True, capture_output=True)
        self.launches: list[Launched] = []
        self._images: list[bytes] = []
        self._functions: list[tuple[str, list[int]]] = []
        kinds = (
            ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(self._load),
            ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p)(self._find),
            ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))(
                self._launch
            ),
        )
        self._kept = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), kinds
        self._kept[0].stub_report(*kinds)
        self._become_driver(folder)

    @property
    def images(self) -> int:
        return len(self._images)

    def _become_driver(self, folder: Path) -> None:
        import triton
        from triton import knobs
        from triton.backends.nvidia.driver import CudaDriver

        knobs.nvidia.libcuda_path = str(folder)  # to link with
        driver = CudaDriver()
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda device: STREAM
        driver.get_device_capability = lambda device=None: (9, 0)
        driver.set_current_device = lambda device: None
        triton.runtime.driver.set_active(driver)

    def _load(self, image: int) -> int:
        header = ctypes.string_at(image, 64)
        sections, entry, number = struct.unpack_from("<Q10xHH", header, 40)  # the last part but program headers
        self._images.append(ctypes.string_at(image, sections + entry * number))
        return len(self._images)

    def _find(self, module: int, name: bytes) -> int:
        self._functions.append((name.decode(), parameter_sizes(self._images[module - 1], name.decode())))
        return len(self._functions)

    def _launch(self, config: Any, function: int, arguments: Any) -> None:
        name, sizes = self._functions[function - 1]
        given, values = config.contents, tuple(ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes))
        self.launches.append(
            Launched(name, tuple(given.grid), tuple(given.block), given.shared_bytes, given.stream or 0, values)
        )


def parameter_sizes(cubin: bytes, kernel: str) -> list[int]:
    """The bytes of each parameter of a kernel, in order, from the binary."""
    first, number, names_at = struct.unpack_from("<Q12xHH", cubin, 40)
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + 64 * i) for i in range(number)]
    names = sections[names_at][4]
    for name, _, _, _, at, size in sections:
        start = names + name
        if cubin[start : cubin.index(b"\0", start)].decode() != f".nv.info.{kernel}":
            continue
        sizes, end = {}, at + size
        while at < end:
            kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if attribute == _KPARAM_INFO:
                _, ordinal, _, packed = struct.unpack_from("<IHHI", cubin, at + 4)
                sizes[ordinal] = packed >> 18
            at += 4 + (length if kind == 4 else 0)  # else the length is the value
        return [sizes[ordinal] for ordinal in range(len(sizes))]
    raise LookupError(f"{kernel}: no .nv.info of it in the binary")


def kernels_on_the_cpu() -> None:
    """Make the package launch kernels for CPU tensors, as interpreted ones are."""
    from shardweave.kernels import launch

    runs_on = launch.runs_on
    for name, module in list(sys.modules.items()):
        if name.startswith("shardweave.kernels.") and getattr(module, "runs_on", None) is runs_on:
            module.runs_on = lambda device: True  # type: ignore[attr-defined]
