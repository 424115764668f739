"""compare_words: compare the fingerprints received with messages on the device; overwrite a message of another call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .channel import DISAGREES, Failure
from .current_device import on_device
from .launch import prepared, runs_on
from .store_word import PTX, store_word

_KIND = tl.constexpr(DISAGREES << 60)
_BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["received", "number", "expected", "codes", "error", "host_error", "out", "nbytes"])
def compare_words_kernel(
    received,  # int64 [number]
    number: tl.int64,
    expected: tl.int64,
    codes,  # int64 [number]
    error,  # int64 [1]
    host_error: tl.int64,  # address of an int64 in host memory
    out: tl.int64,  # address
    nbytes: tl.int64,  # in out
    PTX: tl.constexpr,
):
    """One program compares all words."""
    failed = tl.atomic_add(error, 0, sem="relaxed", scope="gpu") != 0
    if not failed:
        none = tl.full((), 0, tl.int64)
        code = none
        for first in range(0, number, _BLOCK):
            i = first + tl.arange(0, _BLOCK)
            words = tl.load(received + i, mask=i < number, other=0)
            differs = (words != expected.to(tl.int64)) & (i < number)
            code = tl.maximum(code, tl.max(tl.where(differs, tl.load(codes + i, mask=differs, other=0) + _KIND, 0), 0))
        if code != 0:
            failed = True
            if tl.atomic_cas(error, none, code, sem="relaxed", scope="gpu") == 0:
                store_word(host_error.to(tl.int64).to(tl.pointer_type(tl.int64)), code, RELEASE=False, PTX=PTX)
    if failed:
        target = out.to(tl.int64).to(tl.pointer_type(tl.int8))
        filler = tl.full((_BLOCK,), -1, tl.int8)
        for start in range(0, nbytes, _BLOCK):
            at = start + tl.arange(0, _BLOCK)
            tl.store(target + at, filler, mask=at < nbytes)


class WordComparison:
    """Compares each rank's word with the expected one on the device, and overwrites the output on a mismatch.

    The kernel is compiled and loaded by the constructor, since a CUDA graph capture could not do so. The host does not
    wait; it reads the outcome from `failure`.

    Args:
        codes: int64 [n], `channel.pack` of rank, peer and channel; if several words differ the largest code is kept.
    """

    def __init__(self, codes: torch.Tensor, failure: Failure) -> None:
        self.codes, self.failure = codes, failure
        self._start: Callable[..., None] | None = None
        if runs_on(codes.device):
            arguments: tuple[Any, ...] = (codes, 1, 0, codes, failure.error, failure.host_error.data_ptr(), 0, 0, PTX)
            self._start = prepared(compare_words_kernel, (1, 1, 1), codes.device, arguments, 1)

    def __call__(self, received: torch.Tensor, expected: int, out: torch.Tensor) -> None:
        """Record a failure if a word differs; overwrite `out` if this rank has failed, now or before.

        Args:
            received: int64 [n], contiguous; with n = 0 nothing is compared.
            expected: 63 bits.
            out: contiguous, of any dtype. All bits are set, which is NaN in floating-point dtypes.
        """
        if self._start is None:
            compare_words_cpu(received, expected, self.codes, self.failure, out)
            return
        failure, nbytes = self.failure, out.numel() * out.element_size()
        with on_device(received.device):
            self._start(received, received.numel(), expected, self.codes, failure.error, failure.host_error.data_ptr(),
                        out.data_ptr(), nbytes, PTX)  # fmt: skip


def compare_words_cpu(
    received: torch.Tensor, expected: int, codes: torch.Tensor, failure: Failure, out: torch.Tensor
) -> None:
    """compare_words in torch operations."""
    if not int(failure.error[0]):
        differ = (received != expected).nonzero().view(-1).tolist()
        if not differ:
            return
        failure.error[0] = failure.host_error[0] = int(codes[differ].max()) + (DISAGREES << 60)
    out.reshape(-1).view(torch.uint8).fill_(255)
