"""Ranks that are masked out of a token dispatcher: which transports allow it, and how their rows travel then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...errors import ArgumentError, UnsupportedError
from .config import DispatchConfig
from .transfer.base import TokenTransfer
from .transfer.fixed import sendrecv_transfer


class ActiveRanks:
    """The transfer of a rank while all ranks are active, and the one while only some are.

    On two levels a rank forwards the tokens of others. So while some ranks are masked out, rows travel on one level, in
    messages inside nodes as well. Results are equal to the bit.
    """

    def __init__(self, transfer: TokenTransfer) -> None:
        self._of_all, self._two_level = transfer, transfer.config.two_level
        self._one_level: TokenTransfer | None = None

    def choose(self, config: DispatchConfig, ranks: Sequence[int] | None) -> tuple[DispatchConfig, TokenTransfer]:
        """Return `config` with other active ranks, and the transfer for it, which does not use it yet.

        Raises:
            ArgumentError: no rank, or one that does not exist or is given twice.
            UnsupportedError: ranks synchronise on the device, among all of the group.
        """
        config = replace(config, active_ranks=ranks, two_level=self._two_level)
        if config.active_ranks is None:
            return config, self._of_all
        if self._of_all.in_windows and not self._of_all.two_level:
            raise UnsupportedError(
                "active ranks with symmetric_memory, where all ranks of the group synchronise on the device; allowed: "
                'transport="shared_memory", "process_group", "hierarchical"'
            )
        if not self._of_all.two_level:
            return config, self._of_all
        config = replace(config, two_level=False)
        if self._one_level is None:
            t = self._of_all
            fingerprint = config.fingerprint(t.config.number_of(t.fingerprint))
            with torch.inference_mode(False):
                kind = sendrecv_transfer(config)
                self._one_level = kind(config, t.transport, t.ranks, t.me, t.device, fingerprint)
        return config, self._one_level


def check_active(config: DispatchConfig, rank: int) -> None:
    """
    Raises:
        UnsupportedError: the rank is masked out.
    """
    if not config.is_active(rank):
        assert config.active_ranks is not None
        raise UnsupportedError(
            f"rank {rank} of the dispatcher is masked out; allowed: calls of ranks {list(config.active_ranks)}, until "
            "set_active_ranks takes it back"
        )


def check_all_active(config: DispatchConfig, what: str) -> None:
    """
    Raises:
        ArgumentError: ranks are masked out.
    """
    if config.active_ranks is not None:
        raise ArgumentError(f"{what}: only ranks {list(config.active_ranks)} are active; allowed: with all ranks")
