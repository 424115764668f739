"""Counters of this process: redistributions carried out, and those left to torch with the reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from weakref import ref

import torch.distributed as dist
from torch._guards import CompileContext

from ..planner import format_bytes
from .tables import Table, as_html, as_text

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
class _Traced:
    """What was counted while torch traced, each redistribution of a graph once.

    Before there is a graph, torch runs a function in several passes. What a pass counts takes the place of what the
    pass before it has counted of the same function.
    """

    counts: Counter[str] = field(default_factory=Counter)
    _function: Callable[[], CompileContext | None] = lambda: None
    """A weak reference to what is compiled."""
    _pass: Hashable = None
    _of_pass: Counter[str] = field(default_factory=Counter)

    def count(self, counter: Counter[str], key: str, into_graph: bool) -> None:
        function = CompileContext.try_get()
        number = None if function is None else (function.attempt, into_graph)
        if function is None or function is not self._function() or number != self._pass:
            if function is not None and function is self._function():
                counter -= self._of_pass
                self.counts -= self._of_pass
            self._function = (lambda: None) if function is None else ref(function)
            self._pass, self._of_pass = number, Counter()
        for counts in (counter, self.counts, self._of_pass):
            counts[key] += 1


@dataclass(repr=False)
class Statistics:
    """Counters since the process started, or since `reset`.

    What torch.compile traces is not called again when its graph runs. It is counted once for each place in a graph,
    when that is traced, forward and backward, and `reset` keeps it, because the graph goes on running. Of a graph that
    torch loads from its cache, the forward alone is counted.

    `print` shows tables of the counters that are not 0, and so does a notebook.

    Attributes:
        calls: programs carried out, by transport.
        delegations: calls left to torch's own redistribution, by reason; and traced ones.
        ignored: arguments that had no effect, by name: of torch, or under torch.compile.
        host_reads: waits of the host for a device, by the value that it read.
        copies: calls that copied data which otherwise stays where peers wrote it, by the data and the reason.
        traced: redistributions in graphs of torch's operators, by request, collectives and bytes received per run.
        transports: the transport of the ranks of each mesh and the reason for it; `reset` keeps it.
    """

    calls: Counter[str] = field(default_factory=Counter)
    delegations: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    host_reads: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    traced: Counter[str] = field(default_factory=Counter)
    transports: dict[tuple[int, ...], str] = field(default_factory=dict)
    _kinds: dict[tuple[Hashable, str], Redistribution] = field(default_factory=dict, repr=False)
    _summaries: dict[tuple[Hashable, str], Callable[[], Summary]] = field(default_factory=dict, repr=False)
    """Of kinds that have not been read yet."""
    _texts: dict[tuple[Hashable, str], str] = field(default_factory=dict, repr=False)
    _traced: _Traced = field(default_factory=_Traced, repr=False)
    """Of torch's own function, which every pass calls."""
    _in_graphs: _Traced = field(default_factory=_Traced, repr=False)
    _ignored_by_dynamo: _Traced = field(default_factory=_Traced, repr=False)

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
        """Set all counters to 0, except for what is in traced graphs."""
        for counters in (self.calls, self.delegations, self.ignored, self.host_reads, self.copies, self.traced):
            counters.clear()
        self.traced.update(self._in_graphs.counts)
        self.delegations.update(self._traced.counts)
        self.ignored.update(self._ignored_by_dynamo.counts)
        for kind in self._kinds.values():  # not removed: bound calls hold these objects
            kind.calls, kind.milliseconds = 0, 0.0

    def __repr__(self) -> str:
        return as_text(self._tables()) or "no calls"

    def _repr_html_(self) -> str:
        return as_html(self._tables()) or "no calls"

    def _tables(self) -> list[Table]:
        requests = [
            (
                str(kind.calls),
                f"{kind.milliseconds:.3f}",
                "-" if kind.bytes_bound is None and not kind.bytes_received else format_bytes(kind.bytes_received),
                "-" if kind.bytes_bound is None else format_bytes(kind.bytes_bound),
                transport,
                text,
            )
            for (text, transport), kind in self.redistributions.items()
        ]
        counters = {
            "in traced graphs": self.traced,
            "left to torch": self.delegations,
            "argument without effect": self.ignored,
            "the host waits for": self.host_reads,
            "copied": self.copies,
        }
        tables = [
            Table(("calls", "ms", "bytes per call", "least", "transport", "request"), requests, texts=2),
            Table(("calls", "transport"), _descending(self.calls)),
            *(Table(("count", title), _descending(counter)) for title, counter in counters.items()),
            Table(
                ("ranks", "transport and why"),
                [(", ".join(map(str, ranks)), why) for ranks, why in self.transports.items()],
                texts=2,
            ),
        ]
        return [table for table in tables if table.rows]


def _descending(counter: Counter[str]) -> list[tuple[str, str]]:
    return [(str(count), name) for name, count in counter.most_common() if count]


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


COMPILING = "torch.compile is tracing"


def count_ignored_by_dynamo(argument: str) -> None:
    """Count an argument that has no effect under torch.compile, of a call that only Dynamo sees, while it traces."""
    _statistics._ignored_by_dynamo.count(_statistics.ignored, argument, False)


def count_traced(text: str, into_graph: bool | None) -> None:
    """Count a redistribution that is traced into a graph.

    Args:
        into_graph: None: torch only finds out about outputs. False: it is a pass of torch.compile that makes no graph
            yet, or no compiler is tracing. True: a graph is traced.
    """
    if into_graph is not None:
        _statistics._in_graphs.count(_statistics.traced, text, into_graph)


def count_delegation(
    reason: str, level: int, current: object, target: object, left_to: str = "torch", into_graph: bool | None = None
) -> None:
    """Count a redistribution that is left to torch or spmd_types, and log it: the first one of each reason at `level`
    on rank 0, all others at debug level. Other ranks leave the same ones.

    Args:
        into_graph: None: torch carries the redistribution out. False: it is a pass of torch.compile that makes no graph
            yet. True: a graph is traced.
    """
    if into_graph is None:
        _statistics.delegations[reason] += 1
    else:
        _statistics._traced.count(_statistics.delegations, reason, into_graph)
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
