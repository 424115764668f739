"""Agreement of ranks whose backend has no tags: a word beside each message, compared on the receiver's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels import Failure, WordComparison, pack


class WordCheck:
    """What a rank sends beside its messages, and what it makes of the words that come.

    The host waits for nothing: it learns of words that differ when it next asks. What came with them, and all that
    comes later, is overwritten on the device.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._failure = Failure(device)
        codes = torch.tensor([pack(rank, peer, 0) for peer in range(size)], device=device)
        self._compare = WordComparison(codes, self._failure)
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def words(self, expected: int) -> torch.Tensor:
        """int64 [world size]: this rank's word, which it sends from its own place, and room for the others'. Where no
        word comes stands what is expected."""
        return torch.full((self.size,), expected, dtype=torch.int64, device=self.device)

    def compare(self, words: torch.Tensor, expected: int, received: Sequence[torch.Tensor]) -> None:
        """Overwrite what was received, flat bytes, where a rank's word is another, or one was before."""
        for out in _merged(received) or [self._none]:
            self._compare(words, expected, out)
            words = self._none

    def disagrees(self) -> int | None:
        """The peer whose word differed, as far as the host knows."""
        code = self._failure.read()
        return None if code is None else code.peer


def _merged(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat bytes, those that follow each other in one piece of memory together."""
    found: list[torch.Tensor] = []
    for buffer in sorted((b for b in buffers if b.numel()), key=torch.Tensor.data_ptr):
        last = found[-1] if found else None
        if last is not None and last.data_ptr() + last.numel() == buffer.data_ptr() and _share(last, buffer):
            found[-1] = last.as_strided((last.numel() + buffer.numel(),), (1,))
        else:
            found.append(buffer)
    return found


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
