"""WordComparison: the rank whose word differs is named, and outputs are overwritten from then on."""

from __future__ import annotations

import pytest
import torch

from shardweave.kernels.channel import Code, Failure, pack
from shardweave.kernels.compare_words import WordComparison

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.complex64)


def comparison(size: int, device: str) -> WordComparison:
    codes = torch.tensor([pack(1, peer, 0) for peer in range(size)], device=device)
    return WordComparison(codes, Failure(torch.device(device)))


@pytest.mark.parametrize("size", [2, 5, 1500])
def test_equal_words_leave_output(device: str, size: int) -> None:
    compare = comparison(size, device)
    expected = (1 << 62) + 12345
    for dtype in DTYPES:
        out = torch.arange(7, device=device).to(torch.uint8).repeat(8).view(dtype)
        before = out.clone()
        compare(torch.full((size,), expected, device=device), expected, out)
        assert out.view(torch.uint8).equal(before.view(torch.uint8)) and compare.failure.read() is None


@pytest.mark.parametrize("size", [2, 5, 1500])
def test_different_word_is_named_and_output_overwritten(device: str, size: int) -> None:
    for wrong in {1, size - 1}:
        for dtype in DTYPES:
            compare = comparison(size, device)
            words = torch.full((size,), 77, device=device)
            words[wrong] = 77 + (1 << 40)
            room = torch.zeros(8 + 3000 * 8 + 8, dtype=torch.uint8, device=device)
            out = room[8:-8].view(dtype)
            compare(words, 77, out)
            if device == "cuda":
                torch.cuda.synchronize()
            assert compare.failure.read() == Code("disagrees", 1, wrong, 0)
            assert bool((out.view(torch.uint8) == 255).all()) and not room[:8].any() and not room[-8:].any()
            if dtype.is_floating_point:
                assert bool(out.float().isnan().all())
            # From then on outputs are overwritten whatever the words are.
            later = torch.zeros(5, dtype=dtype, device=device)
            compare(torch.full((size,), 77, device=device), 77, later)
            compare(torch.empty(0, dtype=torch.int64, device=device), 77, torch.zeros(0, device=device))
            assert bool((later.view(torch.uint8) == 255).all())
            assert compare.failure.read() == Code("disagrees", 1, wrong, 0)
