"""Every exception that shardweave raises. Standard library only: all rooms may import it."""

from __future__ import annotations


class ShardweaveError(Exception):
    """The base of all of them."""


class ArgumentError(ShardweaveError, ValueError):
    """An argument is wrong; raised before tensor data moves. The text names it, its value and what is allowed."""


class LayoutSyntaxError(ArgumentError):
    """A layout's text form does not parse. The message shows the text with a caret under the spot.

    Attributes:
        text, position, reason: what was read, where in it, from 0 on, and what is wrong there.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        self.text, self.position, self.reason = text, position, reason
        super().__init__(f"layout text: {reason}\n  {text}\n  {' ' * position}^")


class UnsupportedError(ShardweaveError, NotImplementedError):
    """A request that is well formed and that shardweave does not carry out; the text says what to do instead."""


class CapacityError(ShardweaveError, RuntimeError):
    """Tokens were dropped, or had ids of no expert; raised on all ranks alike. The text says how many."""


class WorldError(ShardweaveError, RuntimeError):
    """The ranks could not meet. After one of these the world is dead: later calls raise it again."""


class DisagreementError(WorldError):
    """Ranks of one meeting asked for different things; no tensor that a caller holds was written."""


class PeerError(WorldError):
    """A peer died or failed; the text names it."""


class MeetingTimeoutError(WorldError, TimeoutError):
    """A peer did not come within the timeout; the text names it."""
