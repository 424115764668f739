"""Arrows between two columns of panels, routed through the gutters under the rows so that they cross no panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .svg_primitives import Place, Sheet, colour

MAX_ARROWS = 24  # above, arrows cannot be told apart
LANE = 5.0
_FIRST = 10.0  # from a panel to the first lane under it, for the head of an arrow
_BEND = 4.0
_HEAD = 7.0


class Arrows:
    """The arrows of one step, and the lane of each under its row of panels.

    A sender in the last column of panels and a receiver in the first one face the gap and need no lane. Panels nearer
    to the gap get the upper lanes, so that an arrow that turns up to its panel crosses no other.

    Args:
        transfers: elements by (sender, receiver).
        columns: columns of panels in each column of the drawing.
    """

    def __init__(self, transfers: Mapping[tuple[int, int], int], columns: int) -> None:
        self.transfers = transfers if len(transfers) <= MAX_ARROWS else {}
        self.columns = columns
        self.outgoing: dict[int, list[int]] = {}
        self.incoming: dict[int, list[tuple[int, int]]] = {}
        for sender in sorted({s for s, _ in self.transfers}, reverse=True):
            if sender % columns < columns - 1:
                self.outgoing.setdefault(sender // columns, []).append(sender)
        for receiver, sender in sorted((r, s) for s, r in self.transfers):
            if receiver % columns > 0:
                self.incoming.setdefault(receiver // columns, []).append((receiver, sender))

    def draw(
        self,
        sheet: Sheet,
        source: Callable[[int], Place],
        target: Callable[[int], Place],
        gap: tuple[float, float],
        before: Arrows | None,
        titles: Mapping[tuple[int, int], str],
    ) -> None:
        """Draw the arrows from the panels `source` to the panels `target`.

        Args:
            gap: the left and right edge of the gap.
            before: the arrows of the step before, whose lanes lie above.
            titles: the tooltip of each arrow.
        """
        most = max(self.transfers.values(), default=1)
        for (sender, receiver), elements in self.transfers.items():
            width = 1 + 2 * elements / most
            sheet.open(titles[sender, receiver], class_="arrow")
            start, leaving = self._start(source(sender), sender, gap[0], before)
            end, arriving, head = self._end(target(receiver), sender, receiver, gap[1])
            middle = (gap[0] + gap[1]) / 2
            curve = f"C{middle:.1f},{leaving:.1f} {middle:.1f},{arriving:.1f} {gap[1]:.1f},{arriving:.1f}"
            paint = colour(sender)
            sheet.add("path", d=f"{start} {curve} {end}", fill="none", stroke=paint, stroke_width=width)
            sheet.add("path", d=head, fill=paint)
            sheet.close()

    def _start(self, panel: Place, sender: int, edge: float, before: Arrows | None) -> tuple[str, float]:
        """The path from a panel to the gap, and its height there."""
        row, column = divmod(sender, self.columns)
        if column == self.columns - 1:
            y = panel.y + panel.height / 2
            return f"M{panel.right:.1f},{y:.1f} H{edge:.1f}", y
        above = len(before.incoming.get(row, ())) if before else 0
        y = panel.bottom + _FIRST + LANE * (above + self.outgoing[row].index(sender))
        x = panel.x + panel.width * 0.85
        return f"M{x:.1f},{panel.bottom:.1f} V{y - _BEND:.1f} q0,{_BEND} {_BEND},{_BEND} H{edge:.1f}", y

    def _end(self, panel: Place, sender: int, receiver: int, edge: float) -> tuple[str, float, str]:
        """The path from the gap to a panel, its height in the gap, and the head."""
        senders = [s for s, r in self.transfers if r == receiver]
        part = (senders.index(sender) + 1) / (len(senders) + 1)
        half = _HEAD * 0.6
        if receiver % self.columns == 0:
            y = panel.y + panel.height * part
            return f"H{panel.x - _HEAD:.1f}", y, f"M{panel.x:.1f},{y:.1f} l{-_HEAD},{-half:.1f} v{2 * half:.1f} Z"
        y = panel.bottom + _FIRST + LANE * self.incoming[receiver // self.columns].index((receiver, sender))
        x = panel.x + panel.width * 0.75 * part
        path = f"H{x - _BEND:.1f} q{_BEND},0 {_BEND},{-_BEND} V{panel.bottom + _HEAD:.1f}"
        return path, y, f"M{x:.1f},{panel.bottom:.1f} l{-half:.1f},{_HEAD} h{2 * half:.1f} Z"


def depth(row: int, before: Arrows | None, after: Arrows | None) -> float:
    """The height of the incoming and outgoing lanes under a row of panels."""
    lanes = len(before.incoming.get(row, ())) if before else 0
    lanes += len(after.outgoing.get(row, ())) if after else 0
    return LANE * lanes + (_FIRST - LANE if lanes else 0)
