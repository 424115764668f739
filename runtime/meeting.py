"""What a rank asks of its world while a program runs. The executor yields these; worlds and the simulator answer
them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Meet(NamedTuple):
    """Wait until every peer has come to the same point. One-sided worlds only.

    Safe after it: peers' writes made before their own `Meet` are visible here; the answer says where each peer's
    offered
    buffer lies. The answer is one address per peer, in the order of `peers`; `World.open` turns it into a tensor.
    """

    peers: tuple[int, ...]
    token: int
    """Equal on all ranks that run the same point of the same request."""
    offer: torch.Tensor | None
    """A buffer from `World.empty` that peers may write into until the next meeting."""


class Transfer(NamedTuple):
    """Send flat byte tensors to some peers and fill flat byte tensors from others. Two-sided worlds only."""

    sends: tuple[tuple[int, torch.Tensor], ...]
    receives: tuple[tuple[int, torch.Tensor], ...]


Address = Any
