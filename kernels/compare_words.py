"""compare_words: words that came beside messages, compared on the device; messages of another call overwritten."""

from __future__ import annotations

import functools
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


def compare_words(came: torch.Tensor, expected: int, codes: torch.Tensor, failure: Failure, out: torch.Tensor) -> None:
    """Fail if a word is not the expected one; if this rank has failed, now or before, overwrite what came.

    The host waits for nothing and learns of it from `failure`.

    Args:
        came: int64 [n], contiguous: a word of each rank; [0] compares nothing.
        expected: 63 bits.
        codes: int64 [n], `signal.pack` of rank, peer and channel; of several that differ the largest is kept.
        out: contiguous, of any dtype. All its bits are set: NaN where the dtype has one.
    """
    if not runs_on(came.device):
        compare_words_reference(came, expected, codes, failure, out)
        return
    with on_device(came.device):
        start = _launch(came.device)
        start(came, came.numel(), expected, codes, failure.error, failure.told.data_ptr(), out.data_ptr(),
              out.numel() * out.element_size())  # fmt: skip


@functools.lru_cache
def _launch(device: torch.device) -> Callable[..., None]:
    """Compiled once for each device."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    arguments: tuple[Any, ...] = (word, 1, 0, word, word, 0, 0, 0)
    return prepared(compare_words_kernel, (1, 1, 1), device, arguments, 1)


def build_compare_words(device: torch.device) -> None:
    """Compile and load what `compare_words` launches, which a captured graph could not do."""
    if runs_on(device):
        _launch(device)


def compare_words_reference(
    came: torch.Tensor, expected: int, codes: torch.Tensor, failure: Failure, out: torch.Tensor
) -> None:
    if not int(failure.error[0]):
        differ = (came != expected).nonzero().view(-1).tolist()
        if not differ:
            return
        failure.error[0] = failure.told[0] = int(codes[differ].max()) + (_DISAGREES << 60)
    out.reshape(-1).view(torch.uint8).fill_(255)
