"""Triton's driver for compiled kernels without a GPU: a launch executes the kernel's PTX in this process's memory.

Kernels are compiled for sm_90, loaded and launched by Triton and by the package's own launchers; arguments arrive
packed as for the driver of a GPU. For a process of its own: see `stub_libcuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stub_libcuda import StubDriver, kernels_on_the_cpu

from .machine import Launch, run
from .memory import GlobalMemory


class Storages:
    """The memory of the tensors whose addresses were asked for: what kernels may access.

    A tensor that is gone is known until its memory is given to another.
    """

    def __init__(self) -> None:
        self._end: dict[int, int] = {}  # by first address
        own = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            self._add(storage.data_ptr(), storage.nbytes())
            return own(tensor)

        torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]

    def _add(self, first: int, nbytes: int) -> None:
        end = first + nbytes
        if nbytes and self._end.get(first) != end:
            self._end = {a: b for a, b in self._end.items() if b <= first or a >= end}
            self._end[first] = end

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((first, end - first) for first, end in self._end.items())


class PtxDriver(StubDriver):
    """
    Attributes:
        seed: of the order in which warps take turns.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from triton import knobs

        self.seed = 0
        self.storages = Storages()
        self._texts: dict[str, str] = {}
        self._text_of: list[str] = []
        self.fault: BaseException | None = None
        knobs.runtime.kernel_load_start_hook.add(self._loading)
        knobs.runtime.launch_exit_hook.add(self._launched)
        kernels_on_the_cpu()

    def _loading(self, module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
        self._texts[name] = Path(metadata_group[f"{name}.ptx"]).read_text(encoding="utf-8")

    def _find(self, module: int, name: bytes) -> int:
        self._text_of.append(self._texts[name.decode()])
        return super()._find(module, name)

    def _launch(self, config: Any, function: int, arguments: Any) -> None:
        """Called from C, through which no exception passes: it is raised when the launcher has returned."""
        super()._launch(config, function, arguments)
        made, text = self.launches.pop(), self._text_of[function - 1]
        try:
            memory = GlobalMemory(self.storages)
            run([Launch(text, made.grid, made.block[0] // 32, made.shared_bytes, made.arguments, memory)], self.seed)
        except Exception as error:
            error.add_note(f"in {made.kernel}")
            self.fault = error

    def _launched(self, metadata: Any) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
