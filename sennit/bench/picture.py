"""Draws a run of ``sennit bench attention``: how near to the floor each workload is, and how far ahead of its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sennit.bench.results import Measurement
from sennit.bench.timing import format_time
from sennit.errors import UnsupportedFeature

__all__ = ["check_drawing", "draw"]

MEMORY, COMPUTE = "#2a78b5", "#d9822b"
PEERS = (
    "#4d8f5b", "#8a6bb1", "#b0a04f", "#9c5d5d", "#4f9a9a", "#c07fa0", "#7d8a3c", "#6d7fb8", "#a5744a", "#5c5c7a",
)  # fmt: skip
QUIET = "#6b6b6b"
BAR_INCHES, FEWEST_BARS = 0.16, 3  # of a peer's bar; bars that a workload has room for at least


def check_drawing() -> None:
    """Look whether pictures can be drawn here.

    Raises:
        UnsupportedFeature: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedFeature("picture", "it needs matplotlib: pip install 'sennit[bench]'") from None


def draw(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Draw horizontal bars into a file whose suffix says its format.

    Raises:
        UnsupportedFeature: matplotlib is missing, or does not know the suffix.
    """
    check_drawing()
    from matplotlib.figure import Figure

    rows = _rows(measurements[::-1])  # from the top downwards
    peers = list(dict.fromkeys(name for m in measurements for name, _ in _measured_peers(m)))
    height = 1.6 + BAR_INCHES * (sum(row.bars + 1 for row in rows) + len(peers))
    figure = Figure(figsize=(12 if peers else 7, max(height, 2.6)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=QUIET)
    axes = figure.subplots(1, 2 if peers else 1, sharey=True, squeeze=False)[0]
    _draw_floors(axes[0], rows)
    if peers:
        _draw_peers(axes[1], rows, peers)
    try:
        figure.savefig(path, dpi=160)
    except ValueError as error:
        raise UnsupportedFeature("picture", str(error)) from None


class _Row(NamedTuple):
    """A workload, the middle of its place, and how many of a peer's bars the place is high."""

    measured: Measurement
    middle: float
    bars: int


def _rows(measurements: Sequence[Measurement]) -> list[_Row]:
    """A place for each workload, as high as its own peers need, from the bottom upwards."""
    rows, bottom = [], 0.0
    for m in measurements:
        bars = max(FEWEST_BARS, len(_measured_peers(m)))
        rows.append(_Row(m, bottom + bars / 2, bars))
        bottom += bars + 1
    return rows


def _measured_peers(m: Measurement) -> list[tuple[str, float]]:
    return [(peer.name, peer.speedup) for peer in m.peers if peer.speedup is not None]


def _draw_floors(axes: Any, rows: Sequence[_Row]) -> None:
    from matplotlib.patches import Patch

    shares = [1 / row.measured.floor_ratio for row in rows]
    colors = [MEMORY if row.measured.bound == "memory" else COMPUTE for row in rows]
    axes.barh([row.middle for row in rows], shares, height=[0.9 * row.bars for row in rows], color=colors)
    probed = False
    for (m, middle, bars), share in zip(rows, shares, strict=True):
        inside = share > 0.4
        text = f"  {share:.2f}   {format_time(m.times.median)}"
        axes.text(0 if inside else share, middle, text, va="center", fontsize=8, color="white" if inside else QUIET)
        if m.bound == "memory" and m.probe is not None:
            probed = True
            ends = [middle - bars / 2, middle + bars / 2]
            axes.plot([m.floor / m.probe.median] * 2, ends, color="black", linewidth=1.2)
    axes.axvline(1.0, color=QUIET, linewidth=0.8, linestyle="--")
    axes.set_yticks([row.middle for row in rows], [row.measured.name for row in rows])
    axes.set_ylim(-0.5, rows[-1].middle + rows[-1].bars / 2 + 0.5)
    axes.set_xlim(0, max(1.05, *shares))
    axes.set_title("least possible time / time of Sennit", loc="left", fontsize=10)
    line = " (line: pages read without softmax)" if probed else ""
    legend = [
        Patch(color=MEMORY, label=f"bound by memory{line}"),
        Patch(color=COMPUTE, label="bound by matrix products"),
    ]
    axes.legend(handles=legend, fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=1)
    _plain_frame(axes)


def _draw_peers(axes: Any, rows: Sequence[_Row], peers: Sequence[str]) -> None:
    colors = {name: PEERS[index % len(PEERS)] for index, name in enumerate(peers)}
    for m, middle, _ in rows:
        found = sorted(_measured_peers(m), key=lambda each: peers.index(each[0]))
        for index, (name, speedup) in enumerate(found):
            place = middle + len(found) / 2 - index - 0.5
            axes.barh(place, speedup - 1, left=1.0, height=0.9, color=colors[name])
            axes.text(max(speedup, 1.0), place, f" {speedup:.2f}x", va="center", fontsize=7, color=QUIET)
    axes.axvline(1.0, color=QUIET, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.5)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_title("time of a peer / time of Sennit", loc="left", fontsize=10)
    _name_colors(axes, colors)
    _plain_frame(axes)


def _name_colors(axes: Any, colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=handles, fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=0)
