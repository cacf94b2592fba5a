"""Draws what each worker of a plan does: a bar a worker, with both strands in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from sennit.plan.cost import FloatArray

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["WorkerBars"]

WIDE, NARROW = "dodger_blue2", "dark_orange"
SHORTEST_BAR, GAP = 12, 2  # columns
MOST_LINES = 48
VALUE_WIDTH = 8


@dataclass(frozen=True)
class Glyphs:
    """What fills a cell of a bar: without colours the strands differ by shape alone."""

    wide: str
    narrow: str
    both: str  # side by side: wide above narrow
    idle: str


STACKED = Glyphs(wide="█", narrow="▒", both="", idle="·")
STACKED_IN_COLOUR = Glyphs(wide="▆", narrow="▆", both="", idle="·")
SIDE_BY_SIDE = Glyphs(wide="▀", narrow="▄", both="█", idle="·")
ASCII_STACKED = Glyphs(wide="#", narrow="=", both="", idle=".")
ASCII_SIDE_BY_SIDE = Glyphs(wide='"', narrow="_", both="#", idle=".")


@dataclass(frozen=True, eq=False)
class WorkerBars:
    """A bar a worker, in as many columns as the terminal has room for; prints with rich.

    Attributes:
        wide: microseconds of each worker's wide strand, ``[num_workers]``.
        narrow: the same of its narrow strand.
        side_by_side: the strands run at the same time, so that the longer one counts; otherwise their sum.
    """

    wide: FloatArray
    narrow: FloatArray
    side_by_side: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines of bars, then a legend."""
        num_workers = len(self.wide)
        label = len(str(num_workers - 1))
        most = max(1, (options.max_width + GAP) // (label + 1 + SHORTEST_BAR + GAP))
        together = max(1, -(-num_workers // (most * MOST_LINES)))
        wide, narrow = self._fullest(together)
        columns = _columns(len(wide), most)
        lines = -(-len(wide) // columns)
        width = (options.max_width + GAP) // columns - GAP
        bar = width - label - 1
        scale = max(float(self._times(wide, narrow).max()), 1e-9)
        value_width = max(len(f"{scale:.1f}") + 1, VALUE_WIDTH)
        values = bar >= SHORTEST_BAR + value_width + 4
        if values:
            bar -= value_width
        coloured = console.color_system is not None and not console.no_color
        glyphs = self._glyphs(options.ascii_only, coloured)
        for line in range(lines):
            text = Text(no_wrap=True)
            for worker in range(line, len(wide), lines):
                text.append(" " * GAP if worker != line else "")
                text.append(f"{worker * together:>{label}} ", "dim")
                lengths = wide[worker] / scale * bar, narrow[worker] / scale * bar
                text.append_text(self._bar(lengths, bar, glyphs, coloured))
                if values:
                    text.append(f"{self._times(wide[worker], narrow[worker]):{value_width}.1f}")
            yield text
        yield self._legend(glyphs, coloured, together)

    def _times(self, wide: FloatArray, narrow: FloatArray) -> FloatArray:
        times: FloatArray = np.maximum(wide, narrow) if self.side_by_side else wide + narrow
        return times

    def _fullest(self, together: int) -> tuple[FloatArray, FloatArray]:
        """Both strands of the fullest worker of every ``together`` neighbours."""
        times = self._times(self.wide, self.narrow)
        starts = range(0, len(times), together)
        chosen = [start + int(times[start : start + together].argmax()) for start in starts]
        return self.wide[chosen], self.narrow[chosen]

    def _glyphs(self, ascii_only: bool, coloured: bool) -> Glyphs:
        if self.side_by_side:
            return ASCII_SIDE_BY_SIDE if ascii_only else SIDE_BY_SIDE
        if ascii_only:
            return ASCII_STACKED
        return STACKED_IN_COLOUR if coloured else STACKED

    def _bar(self, lengths: tuple[float, float], width: int, glyphs: Glyphs, coloured: bool) -> Text:
        """One bar of ``width`` cells; ``lengths`` are those of wide and narrow."""
        wide, narrow = lengths
        text = Text()
        if self.side_by_side:
            cells = round(wide), round(narrow)
            both, filled = min(cells), max(cells)
            # One cell shows two colours as a half block on a background; without colours the half blocks do.
            text.append((glyphs.wide if coloured else glyphs.both) * both, f"{WIDE} on {NARROW}")
            glyph, style = (glyphs.wide, WIDE) if cells[0] > cells[1] else (glyphs.narrow, NARROW)
            text.append(glyph * (filled - both), style)
        else:
            first, filled = round(wide), round(wide + narrow)
            text.append(glyphs.wide * first, WIDE)
            text.append(glyphs.narrow * (filled - first), NARROW)
        return text.append(glyphs.idle * (width - filled), "dim")

    def _legend(self, glyphs: Glyphs, coloured: bool, together: int) -> Text:
        text = Text()
        text.append(glyphs.wide, WIDE).append(" wide  ").append(glyphs.narrow, NARROW).append(" narrow  ")
        if self.side_by_side and not coloured:
            text.append(f"{glyphs.both} both  ")
        text.append(glyphs.idle, "dim").append(" idle")
        if together > 1:
            text.append(f"  (each bar: the fullest of {together} neighbouring workers)")
        return text


def _columns(bars: int, most: int) -> int:
    """Columns that keep bars long while they need no more lines than make a comfortable screen."""
    comfortable = next((columns for columns in range(1, most + 1) if -(-bars // columns) <= 24), most)
    return min(comfortable, bars)
