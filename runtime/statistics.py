"""What was carried out, how often, for how long; and what was left to torch, with the reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch.distributed as dist

_logger = logging.getLogger(__name__)
_MOST_KINDS = 4096
_OTHERS = "others", ""

Summary = tuple[str, int, int | None]
"""What was asked for, as text; the bytes that this rank receives, and must receive at least."""


@dataclass
class Redistribution:
    """One distinct redistribution on this rank.

    Attributes:
        bytes_received: of each call.
        bytes_bound: what each call had to receive at least; None where values are reduced or split into terms.
        calls: how often it was carried out.
        milliseconds: of this process in all calls together, waits for peers included. On a GPU what it took to enqueue.
    """

    bytes_received: int = 0
    bytes_bound: int | None = 0
    calls: int = 0
    milliseconds: float = 0.0


@dataclass
class Statistics:
    """Since the process started, or since `reset`.

    Attributes:
        calls: programs carried out, by transport.
        delegations: calls left to torch's own redistribution, by reason.
        ignored: arguments of torch's that say nothing here, by name.
        host_reads: waits of the host for a device, by what it read.
        copies: calls that copied what else stays where peers wrote it, by what, and why.
        transports: by the ranks of a mesh, the transport they use and why; `reset` keeps it.
    """

    calls: Counter[str] = field(default_factory=Counter)
    delegations: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    host_reads: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    transports: dict[tuple[int, ...], str] = field(default_factory=dict)
    _kinds: dict[tuple[Hashable, str], Redistribution] = field(default_factory=dict, repr=False)
    _summaries: dict[tuple[Hashable, str], Callable[[], Summary]] = field(default_factory=dict, repr=False)
    """Of kinds that nobody has read yet."""
    _texts: dict[tuple[Hashable, str], str] = field(default_factory=dict, repr=False)

    @property
    def redistributions(self) -> dict[tuple[str, str], Redistribution]:
        """By what was asked for, as text, and the transport; what took longest first."""
        found: dict[tuple[str, str], Redistribution] = {}
        for key, kind in list(self._kinds.items()):
            if not kind.calls:
                continue
            if (summary := self._summaries.pop(key, None)) is not None:
                self._texts[key], kind.bytes_received, kind.bytes_bound = summary()
            named = self._texts[key], key[1]
            if (same := found.get(named)) is not None:  # asked for in two ways that read alike
                kind = replace(same, calls=same.calls + kind.calls, milliseconds=same.milliseconds + kind.milliseconds)
            found[named] = kind
        return dict(sorted(found.items(), key=lambda item: -item[1].milliseconds))

    def kind(self, what: Hashable, transport: str, summary: Callable[[], Summary]) -> Redistribution:
        """The counters of one redistribution; of very many distinct ones the last share theirs.

        Args:
            what: equal for what reads alike.
            summary: called when the counters are read, once.
        """
        key = (what, transport)
        if key not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                key, summary = _OTHERS, _of_others
            if key not in self._kinds:
                self._kinds[key], self._summaries[key] = Redistribution(), summary
        return self._kinds[key]

    def reset(self) -> None:
        """From here on count from 0."""
        for counters in (self.calls, self.delegations, self.ignored, self.host_reads, self.copies):
            counters.clear()
        for kind in self._kinds.values():  # which calls hold on to
            kind.calls, kind.milliseconds = 0, 0.0


def _of_others() -> Summary:
    return "others", 0, None


_statistics = Statistics()


def stats() -> Statistics:
    """The counters of this process: a `Statistics`, live, so that what it says changes with every call."""
    return _statistics


_told: set[str] = set()
_MOST_TOLD = 64


def left_to_torch(reason: str, level: int, current: object, target: object) -> None:
    """Count a redistribution that torch carries out, and log the first of each reason: at `level` on rank 0, on others
    to debug, since all leave the same."""
    _statistics.delegations[reason] += 1
    if reason in _told or len(_told) == _MOST_TOLD:
        return
    _told.add(reason)
    _logger.log(
        level if not dist.is_initialized() or dist.get_rank() == 0 else logging.DEBUG,
        "left to torch: %s (%s to %s). Further ones are counted in shardweave.stats().delegations.",
        reason,
        current,
        target,
    )
