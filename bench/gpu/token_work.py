"""Token dispatch by rank 0 among peers that are not there, for `count_work`: its launches, their bytes, and the host's
work for them.

Every rank has memory of its own. What rank 0 signals to a peer arrives in its own pad, as if from that peer, so that no
wait takes time. The other ranks' counts are set to those of rank 0, and the rows that they would push are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardweave.bench.gpu.host_work import MirrorTransport
from shardweave.bench.suites.suite_host import TIMEOUT, Alone
from shardweave.kernels import QuantizationName, launch
from shardweave.kernels.channel import SLOT
from shardweave.kernels.launch import Launches
from shardweave.runtime.moe import dispatcher as dispatcher_module
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.routed import RoutedTokens
from shardweave.runtime.transports.symmetric_memory.window import Window

RANKS = 8
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TokenCase:
    """A dispatch and its combine; T tokens of every rank."""

    tokens: int
    top_k: int = 8
    experts: int = 64
    hidden: int = 128
    dtype: torch.dtype = torch.bfloat16
    quantize: QuantizationName | None = None  # of dispatch and of combine

    def __str__(self) -> str:
        text = f"{self.tokens} tokens, top {self.top_k} of {self.experts} experts, hidden {self.hidden}"
        return text if self.quantize is None else f"{text}, {self.quantize}"


CASES = (
    TokenCase(256),
    TokenCase(16),
    TokenCase(256, quantize="fp8_128"),
    TokenCase(16, quantize="fp8_128"),
    TokenCase(256, quantize="mxfp8"),
)


class SeparateMemory:
    """Memory of all ranks, in this process."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device, self.windows = device, list[torch.Tensor]()

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device), ""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], name: str) -> dict[int, torch.Tensor]:
        memory = {rank: torch.zeros_like(own) if rank else own for rank in handles}
        self.windows += memory.values()
        for window in memory.values():
            window.data_ptr()  # notes for checks of kernels' accesses that this is memory: halves are addressed in it
        return memory


class LoneTransport(MirrorTransport):
    """Rank 0, to which its own signals come back."""

    def _new_window(self, *arguments: Any) -> Window:
        window = super()._new_window(*arguments)
        for channel in (window.arrived, window.released):
            row = SLOT * channel.pad.itemsize
            channel.table[2] = channel.pad.data_ptr() + row * torch.arange(channel.peers)
        return window


class TokenWork:
    """A dispatcher of rank 0 of `RANKS` with pooled buffers, and calls of it."""

    def __init__(self, case: TokenCase) -> None:
        if not dist.is_initialized():
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        self.case, self.memory = case, SeparateMemory()
        self.transport = LoneTransport(0, RANKS, TIMEOUT, self.memory, Alone())
        self.transport._watchdog = None  # GPUs have none
        found = mock.Mock(choose=lambda *_: (self.transport, ""), number_dispatcher=lambda ranks: 1)
        with (
            mock.patch.object(dispatcher_module, "transports_of", lambda *_: found),
            mock.patch.object(dispatcher_module, "why_not_backend", lambda *_: None),
        ):
            self.dispatcher = TokenDispatcher(
                num_experts=case.experts, top_k=case.top_k, hidden=case.hidden, max_tokens=case.tokens,
                dtype=case.dtype, overflow="drop", pooled_buffers=2, transport="symmetric_memory",
                quantize=case.quantize, quantize_output=case.quantize,
            )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        scores = torch.rand(case.tokens, case.experts, generator=generator)
        self.x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.dtype)
        self.weights, self.ids = (v.contiguous() for v in scores.topk(case.top_k))
        with torch.no_grad():
            routed = self.dispatch()
            del routed
            matrix = self.dispatcher.transfers[0]._matrices.tensors[0]  # type: ignore[attr-defined]
            each = self.dispatcher.transfers[0]._each  # type: ignore[attr-defined]
            matrix[1:, :-1] = matrix[0, :-1]
            matrix[1:, -1] = torch.arange(1, RANKS) * each + 1  # a pooled buffer of each rank
            self.routed = self.dispatch()
            self.values = torch.ones(len(self.routed.x), case.hidden, dtype=case.dtype)

    def dispatch(self) -> RoutedTokens:
        return self.dispatcher.dispatch(self.x, self.ids, self.weights)

    def combine(self) -> torch.Tensor:
        return self.dispatcher.combine(self.values, self.routed)

    @property
    def calls(self) -> dict[str, Callable[[], object]]:
        return {"dispatch": self.dispatch, "combine": self.combine}

    @property
    def payload(self) -> int:
        """Bytes of the rows that go to peers or come from them."""
        each, packed = self.case.experts // RANKS, self.dispatcher.config.packed
        of_row = self.case.hidden * self.case.dtype.itemsize if packed is None else 4 * packed.words
        return int((self.ids >= each).sum()) * of_row


class _NullKernel:
    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    pass


@contextmanager
def null_launches() -> Iterator[None]:
    """In this block kernels are not loaded, and launches do nothing."""
    modules = [m for name, m in sys.modules.items() if name.startswith("shardweave.kernels.")]
    found = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, Launches)}
    before = {number: dict(launches._loaded) for number, launches in found.items()}
    for launches in found.values():
        launches._loaded.clear()
    try:
        with mock.patch.object(launch, "loaded", lambda *_, **__: _NullKernel()):
            yield
    finally:
        for number, launches in found.items():
            launches._loaded.clear()
            launches._loaded.update(before[number])


def host_microseconds(call: Callable[[], object], calls: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(calls):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return median(times) * 1e6
