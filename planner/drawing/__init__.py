"""Draws programs: SVG written by hand, so that the planner needs nothing for it."""

from .document import draw

__all__ = ["draw"]
