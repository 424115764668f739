"""Counters of this process: redistributions carried out, and those left to torch with the reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch.distributed as dist

_logger = logging.getLogger(__name__)
_MAX_KINDS = 4096
_OTHERS = "others", ""

Summary = tuple[str, int, int | None]
"""The request as text, the bytes that this rank receives, and the least bytes that it must receive."""


@dataclass
class Redistribution:
    """The counters of one distinct redistribution on this rank.

    Attributes:
        bytes_received: bytes received per call.
        bytes_bound: the least bytes that a call must receive; None where values are reduced or split into terms.
        calls: number of calls.
        milliseconds: time of this process in all calls, waits for peers included; on a GPU the time to enqueue them.
    """

    bytes_received: int = 0
    bytes_bound: int | None = 0
    calls: int = 0
    milliseconds: float = 0.0


@dataclass
class Statistics:
    """Counters since the process started, or since `reset`.

    Attributes:
        calls: programs carried out, by transport.
        delegations: calls left to torch's own redistribution, by reason.
        ignored: arguments that had no effect, by name: of torch, or under torch.compile.
        host_reads: waits of the host for a device, by the value that it read.
        copies: calls that copied data which otherwise stays where peers wrote it, by the data and the reason.
        transports: the transport of the ranks of each mesh and the reason for it; `reset` keeps it.
    """

    calls: Counter[str] = field(default_factory=Counter)
    delegations: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    host_reads: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    transports: dict[tuple[int, ...], str] = field(default_factory=dict)
    _kinds: dict[tuple[Hashable, str], Redistribution] = field(default_factory=dict, repr=False)
    _summaries: dict[tuple[Hashable, str], Callable[[], Summary]] = field(default_factory=dict, repr=False)
    """Of kinds that have not been read yet."""
    _texts: dict[tuple[Hashable, str], str] = field(default_factory=dict, repr=False)

    @property
    def redistributions(self) -> dict[tuple[str, str], Redistribution]:
        """The counters by request (as text) and transport, the most time first."""
        result: dict[tuple[str, str], Redistribution] = {}
        for key, kind in list(self._kinds.items()):
            if not kind.calls:
                continue
            if (summary := self._summaries.pop(key, None)) is not None:
                self._texts[key], kind.bytes_received, kind.bytes_bound = summary()
            name = self._texts[key], key[1]
            if (same := result.get(name)) is not None:  # different requests of the same text
                kind = replace(same, calls=same.calls + kind.calls, milliseconds=same.milliseconds + kind.milliseconds)
            result[name] = kind
        return dict(sorted(result.items(), key=lambda item: -item[1].milliseconds))

    def kind(self, request: Hashable, transport: str, summary: Callable[[], Summary]) -> Redistribution:
        """The counters of one redistribution. Beyond a limit, further redistributions share one entry.

        Args:
            request: equal for requests of the same text.
            summary: called once, when the counters are first read.
        """
        key = (request, transport)
        if key not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                key, summary = _OTHERS, _summary_of_others
            if key not in self._kinds:
                self._kinds[key], self._summaries[key] = Redistribution(), summary
        return self._kinds[key]

    def reset(self) -> None:
        """Set all counters to 0."""
        for counters in (self.calls, self.delegations, self.ignored, self.host_reads, self.copies):
            counters.clear()
        for kind in self._kinds.values():  # not removed: bound calls hold these objects
            kind.calls, kind.milliseconds = 0, 0.0


def _summary_of_others() -> Summary:
    return "others", 0, None


_statistics = Statistics()


def stats() -> Statistics:
    """The counters of this process. Returns one live object, which changes with every call."""
    return _statistics


def log_level(level: int) -> int:
    """The level of a message that all ranks have in the same words: `level` on rank 0, debug on others."""
    return level if not dist.is_initialized() or dist.get_rank() == 0 else logging.DEBUG


_logged_reasons: set[tuple[str, str]] = set()
_MAX_LOGGED_REASONS = 64


def count_delegation(reason: str, level: int, current: object, target: object, left_to: str = "torch") -> None:
    """Count a redistribution that is left to torch or spmd_types, and log it: the first one of each reason at `level`
    on rank 0, all others at debug level. Other ranks leave the same ones."""
    _statistics.delegations[reason] += 1
    text = reason.removeprefix(f"{left_to}: ")
    if (left_to, reason) in _logged_reasons or len(_logged_reasons) == _MAX_LOGGED_REASONS:
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("left to %s: %s (%s to %s)", left_to, text, current, target)
        return
    _logged_reasons.add((left_to, reason))
    _logger.log(
        log_level(level),
        "left to %s: %s (%s to %s). Further ones are counted in shardweave.stats().delegations.",
        left_to,
        text,
        current,
        target,
    )
