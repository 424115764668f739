"""Every exception that shardweave raises. Standard library only: all rooms may import it."""

from __future__ import annotations

import reprlib

_AROUND = 60  # characters of a layout's text on either side of a fault


class ShardweaveError(Exception):
    """The base of all of them.

    Attributes:
        peers_know: of refusals: the ranks that make the call in step have been told.
    """

    peers_know = False


class ArgumentError(ShardweaveError, ValueError):
    """An argument is wrong; raised before tensor data moves. The text names it, its value and what is allowed."""


class LayoutSyntaxError(ArgumentError):
    """A layout's text form does not parse. The message shows the text with a caret under the spot.

    Attributes:
        text, position, reason: what was read, where in it, from 0 on, and what is wrong there.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        self.text, self.position, self.reason = text, position, reason
        # One line of the text, and of a long one what is around the spot.
        first = max(0, position - _AROUND)
        head, tail = "…" if first else "", "…" if len(text) > position + _AROUND else ""
        line = head + "".join(c if c.isprintable() else " " for c in text[first : position + _AROUND]) + tail
        super().__init__(f"layout text: {reason}\n  {line}\n  {' ' * (position - first + len(head))}^")


class UnsupportedError(ShardweaveError, NotImplementedError):
    """A request that is well formed and that shardweave does not carry out; the text says what to do instead."""


class CapacityError(ShardweaveError, RuntimeError):
    """Tokens were dropped, or had ids of no expert; raised on all ranks alike. The text says how many."""


class TransportError(ShardweaveError, RuntimeError):
    """The ranks could not meet. After one of these the transport is dead: later calls raise it again."""


class DisagreementError(TransportError):
    """Ranks of one meeting asked for different things; no tensor that a caller holds was written."""


class PeerError(TransportError):
    """A peer died or failed; the text names it."""


class MeetingTimeoutError(TransportError, TimeoutError):
    """A peer did not come within the timeout; the text names it."""


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 16
        self.maxstring = self.maxother = 160

    def repr_int(self, x: int, level: int) -> str:
        # `repr` itself refuses whole numbers of more than 4,300 digits.
        return repr(x) if abs(x) < 10**60 else f"about {'-' if x < 0 else ''}2**{abs(x).bit_length() - 1}"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A value as messages have it: its `repr`, shortened where that is long."""
    return _SHOWN.repr(value)
