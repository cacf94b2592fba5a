"""Draws a run of ``sennit bench attention``: how near to the floor each workload is, and how far ahead of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sennit.bench.results import Measurement
from sennit.bench.timing import format_time
from sennit.errors import UnsupportedFeature

__all__ = ["check_drawing", "draw"]

MEMORY, COMPUTE = "#2a78b5", "#d9822b"
PEERS = (
    "#4d8f5b", "#8a6bb1", "#b0a04f", "#9c5d5d", "#4f9a9a", "#c07fa0", "#7d8a3c", "#6d7fb8", "#a5744a", "#5c5c7a",
)  # fmt: skip
QUIET = "#6b6b6b"


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

    measurements = measurements[::-1]  # from the top downwards
    peers = list(dict.fromkeys(peer.name for m in measurements for peer in m.peers if peer.speedup is not None))
    rows = max(len(measurements), 2)
    figure = Figure(figsize=(12 if peers else 7, 1.4 + rows * max(0.5, 0.22 * len(peers))), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=QUIET)
    axes = figure.subplots(1, 2 if peers else 1, sharey=True, squeeze=False)[0]
    _draw_floors(axes[0], measurements)
    if peers:
        _draw_peers(axes[1], measurements, peers)
    try:
        figure.savefig(path, dpi=160)
    except ValueError as error:
        raise UnsupportedFeature("picture", str(error)) from None


def _draw_floors(axes: Any, measurements: Sequence[Measurement]) -> None:
    from matplotlib.patches import Patch

    shares = [1 / m.floor_ratio for m in measurements]
    colors = [MEMORY if m.bound == "memory" else COMPUTE for m in measurements]
    axes.barh(range(len(measurements)), shares, height=0.6, color=colors)
    for at, (m, share) in enumerate(zip(measurements, shares, strict=True)):
        inside = share > 0.4
        text = f"  {share:.2f}   {format_time(m.times.median)}"
        axes.text(0 if inside else share, at, text, va="center", fontsize=8, color="white" if inside else QUIET)
        if m.bound == "memory" and m.probe is not None:
            axes.plot([m.floor / m.probe.median] * 2, [at - 0.38, at + 0.38], color="black", linewidth=1.2)
    axes.axvline(1.0, color=QUIET, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(measurements)), [m.name for m in measurements])
    axes.set_xlim(0, max(1.05, *shares))
    axes.set_title("least possible time / time of Sennit", loc="left", fontsize=10)
    legend = [Patch(color=MEMORY, label="bound by memory (line: pages read without softmax)")]
    legend.append(Patch(color=COMPUTE, label="bound by matrix products"))
    axes.legend(handles=legend, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=1)
    _plain_frame(axes)


def _draw_peers(axes: Any, measurements: Sequence[Measurement], peers: Sequence[str]) -> None:
    height = 0.8 / len(peers)
    for index, name in enumerate(peers):
        found = [(at, peer.speedup) for at, m in enumerate(measurements) for peer in m.peers if peer.name == name]
        measured = [(at + 0.4 - (index + 0.5) * height, speedup) for at, speedup in found if speedup is not None]
        places, speedups = zip(*measured, strict=True)
        from_one = [speedup - 1 for speedup in speedups]
        axes.barh(places, from_one, left=1.0, height=height * 0.9, color=PEERS[index % len(PEERS)], label=name)
        for place, speedup in measured:
            axes.text(max(speedup, 1.0), place, f" {speedup:.1f}x", va="center", fontsize=7, color=QUIET)
    axes.axvline(1.0, color=QUIET, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.5)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_title("time of a peer / time of Sennit", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=1)
    _plain_frame(axes)


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=0)
