"""compare_words: words that came beside messages, compared on the device; messages of another call overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .pointers import on_device, prepared, runs_on
from .signal import Failure

_DISAGREES = 3  # of `signal.KINDS`
_KIND = tl.constexpr(_DISAGREES << 60)
_BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["came", "number", "expected", "codes", "error", "told", "out", "nbytes"])
def compare_words_kernel(
    came,  # int64 [number]
    number: tl.int64,
    expected: tl.int64,
    codes,  # int64 [number]
    error,  # int64 [1]
    told: tl.int64,  # address of an int64 of the host
    out: tl.int64,  # address
    nbytes: tl.int64,  # in out
):
    """One program."""
    failed = tl.atomic_add(error, 0, sem="relaxed", scope="gpu") != 0
    if not failed:
        none = tl.full((), 0, tl.int64)
        code = none
        for first in range(0, number, _BLOCK):
            i = first + tl.arange(0, _BLOCK)
            words = tl.load(came + i, mask=i < number, other=0)
            differs = (words != expected.to(tl.int64)) & (i < number)
            code = tl.maximum(code, tl.max(tl.where(differs, tl.load(codes + i, mask=differs, other=0) + _KIND, 0), 0))
        if code != 0:
            failed = True
            if tl.atomic_cas(error, none, code, sem="relaxed", scope="gpu") == 0:
                tl.atomic_xchg(told.to(tl.int64).to(tl.pointer_type(tl.int64)), code, sem="relaxed", scope="sys")
    if failed:
        target = out.to(tl.int64).to(tl.pointer_type(tl.int8))
        filler = tl.full((_BLOCK,), -1, tl.int8)
        for start in range(0, nbytes, _BLOCK):
            at = start + tl.arange(0, _BLOCK)
            tl.store(target + at, filler, mask=at < nbytes)


class WordComparison:
    """Compares what a rank expects with a word of each rank, and overwrites messages that came with another.

    Compiled and loaded when it is made, which a captured graph could not do. The host waits for nothing, and learns
    from `failure`.

    Args:
        codes: int64 [n], `signal.pack` of rank, peer and channel; of several that differ the largest is kept.
    """

    def __init__(self, codes: torch.Tensor, failure: Failure) -> None:
        self.codes, self.failure = codes, failure
        self._start: Callable[..., None] | None = None
        if runs_on(codes.device):
            arguments: tuple[Any, ...] = (codes, 1, 0, codes, failure.error, failure.told.data_ptr(), 0, 0)
            self._start = prepared(compare_words_kernel, (1, 1, 1), codes.device, arguments, 1)

    def __call__(self, came: torch.Tensor, expected: int, out: torch.Tensor) -> None:
        """Fail if a word is not the expected one; if this rank has failed, now or before, overwrite `out`.

        Args:
            came: int64 [n], contiguous; [0] compares nothing.
            expected: 63 bits.
            out: contiguous, of any dtype. All its bits are set: NaN where the dtype has one.
        """
        if self._start is None:
            compare_words_reference(came, expected, self.codes, self.failure, out)
            return
        failure, nbytes = self.failure, out.numel() * out.element_size()
        with on_device(came.device):
            self._start(came, came.numel(), expected, self.codes, failure.error, failure.told.data_ptr(),
                        out.data_ptr(), nbytes)  # fmt: skip


def compare_words_reference(
    came: torch.Tensor, expected: int, codes: torch.Tensor, failure: Failure, out: torch.Tensor
) -> None:
    if not int(failure.error[0]):
        differ = (came != expected).nonzero().view(-1).tolist()
        if not differ:
            return
        failure.error[0] = failure.told[0] = int(codes[differ].max()) + (_DISAGREES << 60)
    out.reshape(-1).view(torch.uint8).fill_(255)
