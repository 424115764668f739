"""Renders programs: as text, as SVG, as plain values for JSON, and parses the latter."""
