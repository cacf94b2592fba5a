"""What ``sennit bench attention`` prints: tables of times, peers, parts, balance and ceilings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sennit.cli.output import console, gauge, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sennit.bench.results import Measurement

__all__ = ["print_run", "title"]

MOST_WORKERS = 4  # whose times are printed one by one
NOTES = (
    "Every output was compared with float64 before it was timed; caches held other data when a call began.",
    "x floor: over the least time, that of all bytes at the rate of reading memory or of all operations at that of "
    "matrix products, both measured in the same turns. of probe: over reading the same pages without softmax.",
)


def title(record: dict[str, Any]) -> str:
    """What was measured, on what, in one line."""
    hardware, versions = record["hardware"], record["versions"]
    backends = " and ".join(dict.fromkeys(workload["backend"] for workload in record["workloads"]))
    return (
        f"{backends}: {record['dtype']}, {record['kv_layout']} pages of {record['page_size']}, {hardware['threads']} "
        f"threads of {hardware['cpu']}, torch {versions['torch']}, medians of {record['repeat']}"
    )


def print_run(record: dict[str, Any], found: Sequence[Measurement]) -> None:
    """Print everything that was found, then what to think of it."""
    stdout = console()
    stdout.print(title(record), style="bold")
    for made in (_times(found, stdout.width), _peers(found), _parts(found), _balance(found), _ceilings(found)):
        if made.row_count:
            stdout.print()
            stdout.print(made)
    stdout.print()
    for note in NOTES:
        stdout.print(note, style="dim")
    for warning in _warnings(record, found):
        stdout.print(warning, style="yellow")


def _times(found: Sequence[Measurement], width: int) -> Table:
    wide = width >= 110
    more, bar = ([">quartiles", ">floor"], [""]) if wide else ([], [])
    made = table("Time of a call", "workload", ">ms", *more, ">GB/s", ">GFLOP/s", ">x floor", ">share", *bar)
    for m in found:
        seconds = m.times.median * 1e-6
        row: list[RenderableType] = [_named(m), f"{m.times.median / 1e3:.2f}"]
        if wide:
            row.append(f"{m.times.lower_quartile / 1e3:.2f}-{m.times.upper_quartile / 1e3:.2f}")
            row.append(f"{m.floor / 1e3:.2f}")
        row += [f"{m.work.bytes / seconds / 1e9:.1f}", f"{m.work.flops / seconds / 1e9:.0f}", f"{m.floor_ratio:.2f}"]
        share, of = (m.probe_share, "probe") if m.bound == "memory" else (m.matrix_share, "GEMM")
        row.append("" if share is None else f"{share:.2f} of {of}")
        if wide:
            color = "blue" if m.bound == "memory" else "yellow"
            row.append(gauge(1 / m.floor_ratio, 16, color, ascii_only=console().options.ascii_only))
        made.add_row(*row)
    return made


def _named(m: Measurement) -> str:
    return m.name if m.name == m.batch else f"{m.name}: {m.batch}"


def _peers(found: Sequence[Measurement]) -> Table:
    made = table("Peers", "workload", "peer", ">ms", ">speed-up", "how")
    for m in found:
        for peer in m.peers:
            time = "" if peer.times is None else f"{peer.times.median / 1e3:.2f}"
            speedup = "" if peer.speedup is None else f"{peer.speedup:.2f}x"
            made.add_row(m.name, peer.name, time, speedup, peer.note)
    return made


def _parts(found: Sequence[Measurement]) -> Table:
    """What requests take alone, and what masks and functions cost."""
    made = table("Compared with itself", "workload", "beside", ">ms", ">ratio")
    for m in found:
        for part in m.parts:
            made.add_row(m.name, f"{part.name} part alone, {part.batch}", f"{part.times.median / 1e3:.2f}", "")
        if m.parts_sum is not None:
            ratio = f"{m.times.median / m.parts_sum:.2f}"
            made.add_row(m.name, "sum of its parts", f"{m.parts_sum / 1e3:.2f}", ratio)
        if m.plain is not None:
            beside = "plain causal; ratio for each visible (query, key) pair"
            made.add_row(m.name, beside, f"{m.plain.median / 1e3:.2f}", f"{m.pair_cost:.2f}")
    return made


def _balance(found: Sequence[Measurement]) -> Table:
    made = table("Balance: the fullest worker over the mean", "workload", ">planned", ">measured", "ms of each worker")
    for m in found:
        balance = m.balance
        measured = balance.measured_imbalance
        each = ""
        if balance.measured is not None and len(balance.measured) <= MOST_WORKERS:
            pairs = zip(balance.predicted, balance.measured, strict=True)
            each = ", ".join(f"{actual / 1e3:.2f} (planned {planned / 1e3:.2f})" for planned, actual in pairs)
        shown = "" if measured is None else f"{measured:.3f}"
        made.add_row(m.name, f"{balance.predicted_imbalance:.3f}", shown, each)
    return made


def _ceilings(found: Sequence[Measurement]) -> Table:
    made = table("What this machine can do, lowest and highest of all workloads", "", ">lowest", ">highest")
    for kind, unit in (("reads", "GB/s"), ("products", "GFLOP/s")):
        for name in getattr(found[0].ceilings, kind):
            rates = [getattr(m.ceilings, kind)[name] / 1e9 for m in found]
            made.add_row(name, *(f"{rate:.1f} {unit}" for rate in (min(rates), max(rates))))
    return made


def _warnings(record: dict[str, Any], found: Sequence[Measurement]) -> Iterator[str]:
    yield from record["notes"]
    for m in found:
        if m.activity.warning:
            yield f"{m.name}: {m.activity.warning}"
