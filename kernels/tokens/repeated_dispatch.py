"""RepeatedDispatch: the launches of a dispatch through a window, made again for another dispatch of the same shapes.

Most of the host's time for a launch goes into checks, alignments and constants, which depend on shapes alone. What the
first dispatch allocated between its launches serves all that follow: they are ordered by one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import UnsupportedError
from ..launch import LaunchMade, RepeatedLaunch
from .count_pairs import count_few_pairs_kernel, place_rows_kernel
from .offer_tokens import offer_tokens_kernel
from .push_rows import push_rows_kernel
from .receive_rows import receive_rows_kernel
from .spread_rows import spread_rows_kernel
from .window_signals import WindowSignals

# The parameters that take numbers of a call: addresses of its tokens and of the received rows, the word to share.
_NUMBERS = {
    count_few_pairs_kernel: (None, None, "word"),
    place_rows_kernel: (None, None, "word"),
    push_rows_kernel: ("x", None, None),
    offer_tokens_kernel: ("x", None, None),
    spread_rows_kernel: (None, "out", None),
    receive_rows_kernel: (None, "target", None),
}

# The kernels with a barrier, and whether they begin with a wait.
_ACQUIRES = {count_few_pairs_kernel: True, place_rows_kernel: True, push_rows_kernel: False, offer_tokens_kernel: False}


class RepeatedDispatch:
    """The dispatch that `launches` made: counts, routes, and brings rows to where they are received.

    Args:
        launches: from `recorded_launches`.
        signals: of the window.
        ids, weights: the arguments, of which no copies were made.
        weights_out: float32 [R], where received weights are copied to.
        columns_out: `Columns.out` of what is copied out of received rows, if anything is.
        results: all other results.

    Raises:
        UnsupportedError: the launches do not take one of these tensors.
    """

    def __init__(
        self,
        launches: Sequence[LaunchMade],
        signals: WindowSignals,
        ids: torch.Tensor,
        weights: torch.Tensor,
        weights_out: torch.Tensor,
        columns_out: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        nothing = None, None, None
        of_all = ids, weights, weights_out, *columns_out, *results
        self._launches = [RepeatedLaunch(made, (*of_all, *_NUMBERS.get(made.kernel, nothing))) for made in launches]
        values = len(of_all) + len(nothing)
        if set[int]().union(*(launch.replaced for launch in self._launches)) != set(range(values)):
            raise UnsupportedError("the launches of this dispatch cannot be made again: arguments were copied")
        # None: without a watch.
        self._acquires = [_ACQUIRES.get(made.kernel) if signals.watches else None for made in launches]
        self._signals = signals
        # Of one element each; `empty_like` takes half the time of `new_empty`.
        self._like = [result.new_empty(1).expand(result.shape) for result in results]

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, weights_out: torch.Tensor,
        columns_out: Sequence[torch.Tensor], word: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Dispatch; return weights_out and the other results.

        Args:
            x, ids, weights, out, weights_out, columns_out: of the shapes, dtypes, strides and alignments of the first
                dispatch.
            word: as `CountShare.word`.
        """
        results = [torch.empty_like(like) for like in self._like]
        values: list[torch.Tensor | int] = [ids, weights, weights_out, *columns_out, *results]
        values += [x.data_ptr(), out.data_ptr(), word]
        for launch, acquires in zip(self._launches, self._acquires, strict=True):
            if acquires is None:
                launch(values)
            else:
                with self._signals.watched(acquires):
                    launch(values)
        return [weights_out, *results]
