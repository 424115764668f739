"""A stand-in for torch.cuda with several devices, on CPU tensors: it notes what acts on the current device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_GETTERS = (torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__)  # type: ignore[attr-defined]


class Stream:
    """A stream of a device; there is one of each device."""

    def __init__(self, gpus: PretendedGpus, index: int) -> None:
        self.gpus, self.device, self.cuda_stream = gpus, torch.device("cuda", index), 100 + index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def synchronize(self) -> None:
        self.gpus.log.append(("synchronize", self.device.index))

    def wait_stream(self, other: Stream) -> None:
        self.gpus.log.append(("wait", self.device.index))

    def wait_event(self, event: str) -> None:
        self.gpus.log.append(("wait", self.device.index))

    def record_event(self) -> str:
        self.gpus.log.append(("event", self.device.index))
        return "event"


class PretendedGpus(TorchFunctionMode):
    """A context in which CPU tensors say that they are on GPU `of_tensors`, except those that are made on the CPU by
    name. Kernels take their CPU paths.

    Attributes:
        current: the index of the current device.
        captures: whether the current stream is being captured in a CUDA graph.
        log: operations that act on the current device or its stream, with the index of that device.
    """

    def __init__(self, of_tensors: int) -> None:
        super().__init__()
        self.current, self.captures, self.log = 0, False, list[tuple[str, int]]()
        self._device, self._patch = torch.device("cuda", of_tensors), pytest.MonkeyPatch()

    def __enter__(self) -> PretendedGpus:
        gpus = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.number = 0

            def record(self, stream: Stream | None = None) -> None:
                gpus.log.append(("event", gpus.current if stream is None else stream.device.index))
                self.number = len(gpus.log)

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return float(end.number - self.number)

        def capturing() -> bool:
            gpus.log.append(("capturing", gpus.current))
            return gpus.captures

        self._patch.setattr(torch._C, "_cuda_getDevice", lambda: gpus.current, raising=False)
        self._patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
        self._patch.setattr(torch.cuda, "device", gpus.device)
        properties = SimpleNamespace(multi_processor_count=4, L2_cache_size=1 << 12)
        self._patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        self._patch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
        self._patch.setattr(torch.cuda, "current_stream", gpus.stream_of)
        self._patch.setattr(torch.cuda, "Event", Event)
        self._patch.setattr(torch.cuda, "Stream", lambda device: Stream(gpus, device.index))
        self._patch.setattr(torch.cuda, "stream", lambda stream: gpus.device(stream.device))
        for name, module in list(sys.modules.items()):
            if name.startswith("shardweave.kernels.") and hasattr(module, "runs_on"):
                self._patch.setattr(module, "runs_on", lambda device: False)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    def stream_of(self, device: Any = None) -> Stream:
        return Stream(self, self.current if device is None else getattr(device, "index", device))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _GETTERS:
            on_host = getattr(args[0], "pretended_host", False)
            device = _CPU if on_host else self._device
            return device if function == _GETTERS[0] else not on_host
        on_host = bool(kwargs.pop("pin_memory", False)) or function is torch.Tensor.pin_memory
        if function is torch.Tensor.pin_memory:
            self.log.append(("pin", self.current))
            function = torch.Tensor.clone
        if (device := kwargs.get("device")) is not None:
            on_host = on_host or torch.device(device).type == "cpu"
            kwargs["device"] = _CPU
        if function is torch.Tensor.to and isinstance(args[1], torch.device | str):
            args = args[0].clone(), _CPU, *args[2:]
        result = function(*args, **kwargs)
        if on_host and isinstance(result, torch.Tensor):
            result.pretended_host = True  # type: ignore[attr-defined]
        return result
