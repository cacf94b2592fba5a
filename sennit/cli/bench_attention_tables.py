"""What ``sennit bench attention`` prints: tables of times, peers, parts, balance and ceilings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sennit.bench.timing import format_rate, format_time
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
    where = hardware.get("gpu") or f"{hardware['threads']} threads of {hardware['cpu']}"
    backends = " and ".join(dict.fromkeys(workload["backend"] for workload in record["workloads"]))
    return (
        f"{backends}: {record['dtype']}, {record['kv_layout']} pages of {record['page_size']}, {where}, "
        f"torch {versions['torch']}, medians of {record['repeat']}"
    )


def print_run(record: dict[str, Any], found: Sequence[Measurement]) -> None:
    """Print everything that was found, then what to think of it."""
    stdout = console()
    stdout.print(title(record), style="bold")
    parts = (_peers, _not_measured, _parts, _heats, _balance, _ceilings)
    for made in (_times(found, stdout.width), *(part(found) for part in parts)):
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
    made = table("Time of a call", "workload", ">time", *more, ">read", ">computed", ">x floor", ">share", *bar)
    for m in found:
        seconds = m.times.median * 1e-6
        row: list[RenderableType] = [_named(m), format_time(m.times.median)]
        if wide:
            row.append(f"{format_time(m.times.lower_quartile)} - {format_time(m.times.upper_quartile)}")
            row.append(format_time(m.floor))
        rates = format_rate(m.work.bytes / seconds, "B"), format_rate(m.work.flops / seconds, "FLOP")
        row += [*rates, f"{m.floor_ratio:.2f}"]
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
    made = table("Peers", "workload", "peer", ">time", ">x floor", ">speed-up", "how")
    for m in found:
        for peer in m.peers:
            if peer.times is None or peer.speedup is None:
                if peer.check is not None:  # it is wrong
                    made.add_row(m.name, peer.name, "", "", "", peer.note)
                continue
            ratios = f"{peer.times.median / m.floor:.2f}", f"{peer.speedup:.2f}x"
            how = ", ".join(part for part in (peer.note, peer.timed) if part)
            made.add_row(m.name, peer.name, format_time(peer.times.median), *ratios, how)
    return made


def _not_measured(found: Sequence[Measurement]) -> Table:
    """Peers that are not here, failed, or cannot do what is asked: a row for each reason."""
    made = table("Peers that were not measured", "peer", "why", "workloads")
    reasons: dict[tuple[str, str], list[str]] = {}
    for m in found:
        for peer in m.peers:
            if peer.check is None:
                reasons.setdefault((peer.name, peer.note), []).append(m.name)
    for (name, why), workloads in reasons.items():
        made.add_row(name, why, "all" if len(workloads) == len(found) else ", ".join(workloads))
    return made


def _heats(found: Sequence[Measurement]) -> Table:
    made = table("After a rest, and under sustained load", "workload", "", ">cool", ">hot", ">clock", ">power")
    for m in found:
        sides = {m.backend: m.heat} | {peer.name: peer.heat for peer in m.peers}
        for name, heat in sides.items():
            if heat is not None:
                clock = "" if heat.clock is None else f"{heat.clock:.0f} MHz"
                power = "" if heat.power is None else f"{heat.power:.0f} W"
                made.add_row(m.name, name, format_time(heat.cool), format_time(heat.hot), clock, power)
    return made


def _parts(found: Sequence[Measurement]) -> Table:
    """What requests take alone, and what masks and functions cost."""
    made = table("Compared with itself", "workload", "beside", ">time", ">ratio")
    for m in found:
        for part in m.parts:
            made.add_row(m.name, f"{part.name} part alone, {part.batch}", format_time(part.times.median), "")
        if m.parts_sum is not None:
            ratio = f"{m.times.median / m.parts_sum:.2f}"
            made.add_row(m.name, "sum of its parts", format_time(m.parts_sum), ratio)
        if m.plain is not None:
            beside = "plain causal; ratio for each visible (query, key) pair"
            made.add_row(m.name, beside, format_time(m.plain.median), f"{m.pair_cost:.2f}")
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
    for kind, unit in (("reads", "B"), ("products", "FLOP")):
        for name in getattr(found[0].ceilings, kind):
            rates = [getattr(m.ceilings, kind)[name] for m in found]
            made.add_row(name, *(format_rate(rate, unit) for rate in (min(rates), max(rates))))
    return made


def _warnings(record: dict[str, Any], found: Sequence[Measurement]) -> Iterator[str]:
    yield from record["notes"]
    if len(hows := {m.timed for m in found if m.timed}) == 1:
        yield f"Sennit was timed by {hows.pop()}."
    else:
        yield from (f"{m.name}: timed by {m.timed}" for m in found if m.timed)
    for m in found:
        if m.activity.warning:
            yield f"{m.name}: {m.activity.warning}"
