"""``sennit bench``: measurements, each beside a check of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sennit.cli import bench_attention, bench_generate, bench_step
from sennit.cli.output import (
    command_group,
    console,
    file_to_write,
    gauge,
    print_json,
    progress_between,
    table,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sennit.bench.planning import PlanningTime

__all__ = ["app"]

NOTES = (
    "Every plan was checked: each query row meets each key that it sees exactly once.",
    "Planned for an imaginary GPU of 132 workers. Imbalance: the fullest of them over the mean.",
    "* FlashInfer's planner for its uniform kernel; measured elsewhere on a comparable CPU, not in this run.",
)

app = command_group(help="Measure parts of Sennit on this machine.\n\nExample: sennit bench plan")
app.command("attention")(bench_attention.attention)
app.command("generate")(bench_generate.generate)
app.command("step")(bench_step.step)


@app.callback()
def _bench() -> None:
    pass


@app.command("plan")
def plan(
    batches: Annotated[
        list[str] | None,
        typer.Argument(metavar="BATCH", help="Batches to plan instead of the usual ones.", show_default=False),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Plans to time for each batch.")] = 400,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", path_type=str, help="Write the JSON to a file too.", show_default=False),
    ] = None,
) -> None:
    """Time the planner on the host: medians, for 32 query and 8 KV heads and 132 workers.

    Every plan is first checked to cover its batch exactly; only then is it timed.

    Example: sennit bench plan "64*1@8192" --repeat 1000
    """
    from dataclasses import asdict

    from sennit.bench.host import Observer, describe_host
    from sennit.plan.work import planner

    file = file_to_write("--out", out)
    observer = Observer()
    results = _measure(list(batches or ()), repeat)
    record = describe_host() | {
        "planner": "compiled" if planner() else "NumPy",
        "repeat": repeat,
        "activity": asdict(activity := observer.activity()),
        "batches": [asdict(result) for result in results],
    }
    if file is not None:
        write_json(record, file)
    if as_json:
        print_json(record)
    else:
        _print(results, activity.warning)


def _measure(batches: list[str], repeat: int) -> list[PlanningTime]:
    from rich.progress import BarColumn, TextColumn

    from sennit.bench.planning import WORKLOADS, check, measure

    for text in batches:  # before any is measured, which would be lost
        check(text)
    batches = batches or list(WORKLOADS)
    with progress_between(TextColumn("planning {task.description}", markup=False), BarColumn()) as bar:
        task = bar.add_task("", total=len(batches))
        results = []
        for text in batches:
            bar.update(task, description=text, refresh=True)
            results.append(measure(text, repeat=repeat))
            bar.update(task, advance=1, refresh=True)
    return results


def _print(results: list[PlanningTime], warning: str) -> None:
    from rich.text import Text

    stdout = console()
    drawn = stdout.width >= 100
    title = f"Planning time in microseconds, of {results[0].repeat} plans each"
    headings = ("batch", ">median", ">min", ">quartiles", ">imbalance", ">FlashInfer*")
    made = table(title, *headings, *([""] if drawn else []))
    largest = max(result.median for result in results)
    for result in results:
        row: list[RenderableType] = [
            result.batch,
            Text(f"{result.median:.0f}", "bold"),
            f"{result.minimum:.0f}",
            f"{result.lower_quartile:.0f}-{result.upper_quartile:.0f}",
            f"{result.imbalance:.3f}",
            Text(f"{result.flashinfer:.0f}" if result.flashinfer else "", "dim"),
        ]
        bar = gauge(result.median / largest, 24, "blue", ascii_only=stdout.options.ascii_only)
        made.add_row(*row, *([bar] if drawn else []))
    stdout.print(made)
    stdout.print()
    for note in NOTES:
        stdout.print(note, style="dim")
    if warning:
        stdout.print(warning, style="yellow")
