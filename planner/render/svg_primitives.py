"""The subset of SVG that drawings need: a sheet, shapes, text and patterns."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

# Four colours of Okabe and Ito, then each as far as possible from all before it for normal vision and three kinds of
# colour blindness (at least 14 apart in CIE Lab). All are visible on white and on black.
_PALETTE = (
    "#0072b2 #e69f00 #009e73 #cc79a7 #6a570d #dada8f #4cc9f0 #8f326a "
    "#a2dab4 #a28f45 #8fa2ff #a21f45 #dab457 #c75757 #b46a0d #a2b47d"
).split()
COLOURS = len(_PALETTE)

_LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "line": "#8c959f", "faint": "#eff2f5"}
_DARK = {"paper": "#0d1117", "ink": "#f0f6fc", "muted": "#9198a1", "line": "#656c76", "faint": "#1c2128"}
_RULES = """
svg.shardweave text {{ fill: {ink}; }}
svg.shardweave text.muted {{ fill: {muted}; }}
svg.shardweave .paper {{ fill: {paper}; }}
svg.shardweave .plate {{ fill: {paper}; fill-opacity: 0.85; }}
svg.shardweave .panel {{ fill: {faint}; stroke: {line}; }}
svg.shardweave .without {{ fill: none; stroke: {line}; stroke-dasharray: 3 2; }}
svg.shardweave .filled {{ fill: {line}; fill-opacity: 0.5; stroke: {paper}; stroke-width: 0.75; }}
svg.shardweave .moved, svg.shardweave .held {{ stroke: {paper}; stroke-width: 0.75; }}
svg.shardweave .hatch {{ stroke: {ink}; stroke-width: 1.1; stroke-opacity: 0.55; }}
svg.shardweave .seam {{ stroke: {line}; stroke-width: 0.75; stroke-dasharray: 2 2; }}
svg.shardweave .node {{ fill: none; stroke: {line}; }}
svg.shardweave .onward {{ fill: {faint}; stroke: {line}; }}
"""
# Text on a colour contrasts with that colour on any background.
_FIXED = """
svg.shardweave { font-family: system-ui, sans-serif; max-width: 100%; }
svg.shardweave text.on-dark { fill: #ffffff; }
svg.shardweave text.on-light { fill: #1f2328; }
"""
_UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML, even escaped


def colour(position: int) -> str:
    """The colour of a rank. Colours repeat after 16 ranks, which their numbers then tell apart."""
    return _PALETTE[position % len(_PALETTE)]


def text_on(background: str) -> str:
    """The CSS class of text that is legible on a colour."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > 135 else "on-dark"


def text_width(text: str, size: float) -> float:
    """An estimate of the width of a text that sans-serif fonts rarely exceed."""
    return size * sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.6 for c in text)


def wrapped(text: str, width: float, size: float) -> list[str]:
    """`text` broken into lines no wider than `width`."""
    widest = max((text_width(c, 1) for c in text), default=0.6)
    return textwrap.wrap(text, max(1, int(width / size / widest))) or [""]


class Place(NamedTuple):
    """A rectangle on the sheet."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


class Sheet:
    """Elements in painting order, and the patterns that they use."""

    def __init__(self) -> None:
        self._body: list[str] = []
        self._patterns: dict[str, str] = {}

    def open(self, title: str, **attributes: object) -> None:
        """Start a group with a tooltip."""
        self._body.append(f"<g{_written(attributes)}><title>{_clean(title)}</title>")

    def close(self) -> None:
        """End the group."""
        self._body.append("</g>")

    def add(self, tag: str, **attributes: object) -> None:
        """Add an element. `class_` becomes class, underscores become hyphens, floats are rounded."""
        self._body.append(f"<{tag}{_written(attributes)}/>")

    def text(self, x: float, y: float, text: str, size: float, class_: str = "", **attributes: object) -> None:
        """Add a line of text with its baseline at `y`."""
        written = _written({"class_": class_ or None, "x": x, "y": y, "font_size": size, **attributes})
        self._body.append(f"<text{written}>{_clean(text)}</text>")

    def hatch(self) -> str:
        """The fill of partial values, drawn over the colour of their senders."""
        self._patterns["partial"] = (
            '<pattern id="partial" width="5" height="5" patternUnits="userSpaceOnUse">'
            '<path class="hatch" d="M-1,1 L1,-1 M0,5 L5,0 M4,6 L6,4"/></pattern>'
        )
        return "url(#partial)"

    def stripes(self, colours: Sequence[str]) -> str:
        """The fill of values reduced from several ranks: stripes of their colours."""
        name = "-".join(["of", *(c[1:] for c in colours)])
        period = 6 * len(colours)
        # A diagonal stripe is drawn twice, so that the pattern is continuous at its right edge.
        stripes = "".join(
            f'<path fill="{c}" d="M{x},0 h6 l{-period},{period} h-6 Z"/>'
            for turn in (0, period)
            for x, c in zip(range(turn, turn + period, 6), colours, strict=True)
        )
        self._patterns[name] = (
            f'<pattern id="{name}" width="{period}" height="{period}" patternUnits="userSpaceOnUse">{stripes}</pattern>'
        )
        return f"url(#{name})"

    def document(self, width: float, height: float, title: str) -> str:
        """The SVG document, with its own background for light and dark viewers."""
        dark = "@media (prefers-color-scheme: dark) {" + _RULES.format(**_DARK) + "}"
        size = _written({"width": width, "height": height})
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="shardweave" role="img"{size} '
                f'viewBox="0 0 {_number(width)} {_number(height)}">',
                f"<title>{_clean(title)}</title>",
                f"<style>{_RULES.format(**_LIGHT)}{dark}{_FIXED}</style>",
                f"<defs>{''.join(self._patterns.values())}</defs>",
                f'<rect class="paper"{size}/>',
                *self._body,
                "</svg>\n",
            ]
        )


def _clean(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\ufffd", text))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _written(attributes: dict[str, object]) -> str:
    parts = []
    for name, value in attributes.items():
        if value is not None:
            text = _number(value) if isinstance(value, float) else _UNPRINTABLE.sub("\ufffd", str(value))
            parts.append(f" {name.rstrip('_').replace('_', '-')}={quoteattr(text)}")
    return "".join(parts)
