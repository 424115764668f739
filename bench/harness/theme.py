"""The colours of reports and pictures, by name, on light and on dark pages."""

from __future__ import annotations

THEME = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c1f23; --muted: #5b636d; --grid: #dfe3e8; --band: #f4f6f8;
  --ours: #0063a8; --ours2: #2f8fce; --stock: #c24e00; --other: #00805c; --other2: #8a4b9e; --ceiling: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e8eaed; --muted: #a3abb5; --grid: #353b42;
  --band: #1d2226; --ours: #5cb3f2; --ours2: #9fd0f2; --stock: #ff9d57; --other: #46d3a5; --other2: #d59be6;
  --ceiling: #b4bbc4; } }
"""


def standalone(svg: str) -> str:
    """A picture that takes its colours from a page as a file of its own: light or dark as its reader is."""
    head, rest = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>{THEME}</style>{rest}'
