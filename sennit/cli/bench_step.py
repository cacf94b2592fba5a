"""``sennit bench step``: host time of a step over a cache, and of each of its layers' calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import console, file_to_write, print_json, progress_between, table, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sennit.bench.host import Activity
    from sennit.bench.stepping import StepTimes

__all__ = ["step"]

PARTS = {
    "step": "open a step, plan included",
    "attend": "attend: append and attention of a layer",
    "run": "attention of a layer alone",
    "end": "end the step",
}
NOTES = (
    "Every output was compared with float64 before it was timed. 4 layers of 32 query and 8 KV heads, bfloat16.",
    "Until a call returns: on a GPU the work itself goes on; on a CPU it is then done.",
)


def step(
    batches: Annotated[
        list[str] | None,
        typer.Argument(metavar="BATCH", help="Batches instead of the usual ones.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:1.")] = "cpu",
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend to measure.")] = "auto",
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to time for each batch.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", path_type=str, help="Write the JSON to a file too.", show_default=False),
    ] = None,
) -> None:
    """Time what the host does for a step of a cache with four layers: medians and quartiles.

    Example: sennit bench step "128*1@8192" --device cuda
    """
    from rich.progress import BarColumn, TextColumn

    from sennit.bench.host import Observer
    from sennit.bench.stepping import WORKLOADS, check, measure
    from sennit.device import resolve_device

    place = resolve_device(device)
    file = file_to_write("--out", out)
    chosen, found = batches or WORKLOADS, []
    for text in chosen:  # before any is measured, which would be lost
        check(text, place)
    observer = Observer()
    with progress_between(TextColumn("steps of {task.description}", markup=False), BarColumn()) as bar:
        task = bar.add_task("", total=len(chosen))
        for text in chosen:
            bar.update(task, description=text, refresh=True)
            found.append(measure(text, device=place, backend=backend, repeat=repeat))
            bar.update(task, advance=1)
    activity = observer.activity()
    record = _record(found, str(place), repeat, activity)
    if file is not None:
        write_json(record, file)
    if as_json:
        print_json(record)
    else:
        _print(found, record, activity.warning)


def _record(found: Sequence[StepTimes], device: str, repeat: int, activity: Activity) -> dict[str, Any]:
    from dataclasses import asdict

    from sennit.bench.host import describe_host

    return describe_host() | {
        "device": device,
        "repeat": repeat,
        "activity": asdict(activity),
        "batches": [asdict(each) for each in found],
    }


def _print(found: Sequence[StepTimes], record: dict[str, Any], warning: str) -> None:
    from sennit.bench.timing import format_time

    stdout = console()
    backends = " and ".join(dict.fromkeys(each.backend for each in found))
    title = f"{backends} on {record['device']}: host time of {record['repeat']} steps"
    made = table(title, "batch", "", ">median", ">quartiles")
    for each in found:
        for name, words in PARTS.items():
            times = getattr(each, name)
            quartiles = f"{format_time(times.lower_quartile)} - {format_time(times.upper_quartile)}"
            made.add_row(each.batch, words, format_time(times.median), quartiles)
    stdout.print(made)
    stdout.print()
    for note in NOTES:
        stdout.print(note, style="dim")
    if warning:
        stdout.print(warning, style="yellow")
