"""The exceptions that shardweave raises. Standard library only, so that all subpackages may import it."""

from __future__ import annotations

import reprlib

__all__ = [
    "ArgumentError",
    "CapacityError",
    "DisagreementError",
    "LayoutSyntaxError",
    "MeetingTimeoutError",
    "PeerError",
    "ShardweaveError",
    "TransportError",
    "UnsupportedError",
]

_CONTEXT = 60  # characters of a layout's text that are shown on either side of an error


class ShardweaveError(Exception):
    """The base class of all exceptions of shardweave.

    Attributes:
        peers_know: whether the other ranks of the call have been notified that validation failed on this rank.
    """

    peers_know = False


class ArgumentError(ShardweaveError, ValueError):
    """An argument is invalid. Raised before tensor data moves; the message names the argument, its value and what is
    allowed."""


class LayoutSyntaxError(ArgumentError):
    """The text form of a layout cannot be parsed. The message shows the text with a caret under the error.

    Attributes:
        text: the text.
        position: the index of the error in the text.
        reason: the description of the error.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        self.text, self.position, self.reason = text, position, reason
        # The text on one line; of a long text only the part around the error.
        first = max(0, position - _CONTEXT)
        head, tail = "…" if first else "", "…" if len(text) > position + _CONTEXT else ""
        line = head + "".join(c if c.isprintable() else " " for c in text[first : position + _CONTEXT]) + tail
        super().__init__(f"layout text: {reason}\n  {line}\n  {' ' * (position - first + len(head))}^")


class UnsupportedError(ShardweaveError, NotImplementedError):
    """The request is valid but not supported; the message says what to do instead."""


class CapacityError(ShardweaveError, RuntimeError):
    """Tokens were dropped, or had invalid expert ids. Raised on all ranks; the message gives the numbers."""


class TransportError(ShardweaveError, RuntimeError):
    """Communication between ranks failed. The transport stays invalid, and later calls raise the error again, unless it
    is a `DisagreementError` that is `recoverable`."""


class DisagreementError(TransportError):
    """Ranks made different requests in the same collective call. No tensor that a caller holds was written.

    Attributes:
        recoverable: whether a rank refused its arguments, and all ranks of the call have learned so in that call: no
            rank makes it, the transport stays valid, and the next call works.
    """

    recoverable = False


class PeerError(TransportError):
    """A peer died or failed; the message names it."""


class MeetingTimeoutError(TransportError, TimeoutError):
    """A peer did not arrive within the timeout; the message names it."""


def with_prefix(error: ShardweaveError, prefix: str) -> ShardweaveError:
    """An error of the same class with `prefix` and a colon in front of its message."""
    if isinstance(error, LayoutSyntaxError):
        return type(error)(error.text, error.position, f"{prefix}: {error.reason}")
    return type(error)(f"{prefix}: {error}")


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 16
        self.maxstring = self.maxother = 160

    def repr_int(self, x: int, level: int) -> str:
        # `repr` raises for integers of more than 4,300 digits.
        return repr(x) if abs(x) < 10**60 else f"about {'-' if x < 0 else ''}2**{abs(x).bit_length() - 1}"


_SHORT = _ShortRepr()


def shown(value: object) -> str:
    """The `repr` of a value for messages, shortened if it is long."""
    return _SHORT.repr(value)
