"""``sennit check``: the self-test, on this machine, of every backend that can run here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import console, error_console, gauge, print_json, table

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from sennit.cli.checking import Finding, Job

__all__ = ["check"]

MOST_FAILURES = 5  # printed in full; --json has all


@dataclass
class Tally:
    """What has come of the cases of one backend and group so far."""

    backend: str
    group: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    worst_ratio: float = 0.0
    reasons: set[str] = field(default_factory=set)  # of the skipped ones
    seen: Counter[str] = field(default_factory=Counter)  # what happened in cases that are made of many things

    @property
    def cases(self) -> int:
        """Cases that have been run or skipped."""
        return self.passed + self.failed + self.skipped

    def take(self, finding: Finding) -> str:
        """Count what a case has come to; what is wrong, or an empty text."""
        if finding.skipped is not None:
            self.skipped += 1
            self.reasons.add(finding.skipped)
            return ""
        outcome = finding.outcome
        if outcome is None:
            self.failed += 1
            self.worst_ratio = float("inf")
            return str(finding.error)
        self.worst_ratio = max(self.worst_ratio, outcome.ratio)
        self.seen.update(outcome.seen)
        if outcome.passed:
            self.passed += 1
            return ""
        self.failed += 1
        return outcome.text


@dataclass(frozen=True)
class Failure:
    """A case that failed, and the command that runs it again."""

    backend: str
    case: str
    text: str
    repeat: str


def check(
    device: Annotated[
        str | None, typer.Option(help="Device to test, such as cpu or cuda:1.", show_default="a GPU if there is one")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend to test.", show_default="all that can run on the device")
    ] = None,
    num_random: Annotated[
        int | None,
        typer.Option(
            "--random", min=0, metavar="N", help="Random hostile batches for each backend.", show_default="200"
        ),
    ] = None,
    num_operations: Annotated[
        int | None,
        typer.Option(
            "--operations", min=0, metavar="N", help="Random cache operations for each backend.", show_default="1000"
        ),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Make that 20000 batches and 1000000 operations.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of everything random.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that run cases: on a GPU most of the time is compiling.",
            show_default="up to 8 on a GPU, 1 on a CPU",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Run only the cases with matching names, such as 'pages/*'.")
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare every backend with dense float64 attention, and caches with plain tensors, on this machine.

    An error may be twice that of plain PyTorch in the same dtype, plus one rounding.

    The exit code is 1 where a case fails; the command that runs it again is then printed.

    Example: sennit check --random 1000 --seed 7
    """
    from sennit.cli.checking import Battery
    from sennit.device import resolve_device
    from sennit.errors import InvalidInput

    target = resolve_device(device)
    num_random = (20_000 if long else 200) if num_random is None else num_random
    num_operations = (1_000_000 if long else 1_000) if num_operations is None else num_operations
    if jobs is None:
        jobs = 1 if target.type == "cpu" else min(8, os.cpu_count() or 1)
    batteries = [Battery(name, target, num_random, num_operations, seed) for name in _backends(backend, target)]
    chosen = [(battery, case.name) for battery in batteries for case in battery.cases if fnmatchcase(case.name, only)]
    if not chosen:
        raise InvalidInput("--only", expected="a pattern that some case's name matches", got=repr(only))
    options = f"--device {target} --random {num_random} --operations {num_operations} --seed {seed}"
    start = perf_counter()
    tallies, failures = _run(chosen, jobs, options)
    if as_json:
        print_json(_as_json(tallies, failures, str(target), seed) | {"seconds": round(perf_counter() - start, 1)})
    else:
        _print(tallies, failures, str(target))
    if failures:
        raise typer.Exit(1)


def _backends(backend: str | None, device: torch.device) -> list[str]:
    from sennit.backends import registry

    examined = [
        registry.examine(name, None, frozenset(), device) for name in ([backend] if backend else registry.names())
    ]
    found = [candidate.name for candidate in examined if candidate.support.accepted]
    if not found:
        raise registry.unavailable(examined, device)
    return found


def _run(chosen: list[Job], jobs: int, options: str) -> tuple[list[Tally], list[Failure]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sennit.cli.checking import find

    stderr = error_console()
    columns = (
        TextColumn("{task.description:32}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    groups = [(battery.backend, name.partition("/")[0]) for battery, name in chosen]
    tallies = {key: Tally(*key) for key in groups}
    failures: dict[Job, Failure] = {}
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("{} {}".format(*groups[0]), total=len(chosen))
        for job, finding in find(chosen, num_processes=min(jobs, len(chosen))):
            battery, name = job
            tally = tallies[battery.backend, name.partition("/")[0]]
            if wrong := tally.take(finding):
                repeat = f"sennit check --backend {battery.backend} {options} --only '{name}'"
                failures[job] = Failure(battery.backend, name, wrong, repeat)
            bar.update(task, description=f"{tally.backend} {tally.group}", advance=1)
    return list(tallies.values()), [failures[job] for job in chosen if job in failures]


def _as_json(tallies: list[Tally], failures: list[Failure], device: str, seed: int) -> dict[str, Any]:
    from dataclasses import asdict
    from math import isfinite

    return {
        "passed": not failures,
        "device": device,
        "seed": seed,
        "groups": [
            {
                "backend": tally.backend,
                "group": tally.group,
                "cases": tally.cases,
                "passed": tally.passed,
                "failed": tally.failed,
                "skipped": tally.skipped,
                "worst_ratio": tally.worst_ratio if isfinite(tally.worst_ratio) else None,
                "skip_reasons": sorted(tally.reasons),
                "seen": dict(tally.seen),
            }
            for tally in tallies
        ],
        "failures": [asdict(failure) for failure in failures],
    }


def _print(tallies: list[Tally], failures: list[Failure], device: str) -> None:
    from rich.text import Text

    stdout = console()
    for backend in dict.fromkeys(tally.backend for tally in tallies):
        of_backend = [tally for tally in tallies if tally.backend == backend]
        stdout.print(_table(backend, of_backend, device, ascii_only=stdout.options.ascii_only))
        stdout.print()
    for tally in tallies:
        if tally.seen:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(tally.seen.items()))
            stdout.print(f"{tally.backend} {tally.group}: {counts}", style="dim")
    for reason in sorted({reason for tally in tallies for reason in tally.reasons}):
        stdout.print(f"skipped: {reason}", style="dim")
    for failure in failures[:MOST_FAILURES]:
        stdout.print(Text(f"{failure.backend} fails {failure.case}", "bold red"))
        stdout.print(failure.text)
        stdout.print(f"run it again: {failure.repeat}\n", soft_wrap=True)
    if len(failures) > MOST_FAILURES:
        stdout.print(f"... and {len(failures) - MOST_FAILURES} more failures; --json has them all\n")
    for backend in dict.fromkeys(tally.backend for tally in tallies):
        stdout.print(_verdict(backend, [tally for tally in tallies if tally.backend == backend], device))


def _table(backend: str, tallies: list[Tally], device: str, *, ascii_only: bool) -> Table:
    from rich.text import Text

    title = f"{backend} on {device}, against dense float64"
    made = table(title, "cases of", ">passed", ">failed", ">skipped", ">error", "of what is allowed")
    for tally in tallies:
        ratio = tally.worst_ratio
        tried = tally.passed + tally.failed
        bar = gauge(ratio, 20, "green" if ratio <= 1 else "red", ascii_only=ascii_only)
        made.add_row(
            tally.group,
            f"{tally.passed}",
            Text(f"{tally.failed}", "bold red") if tally.failed else "0",
            f"{tally.skipped}" if tally.skipped else "0",
            f"{100 * ratio:.0f} %" if tried and ratio < 100 else ("far" if tried else ""),
            bar if tried else Text("skipped", "dim"),
        )
    return made


def _verdict(backend: str, tallies: Iterable[Tally], device: str) -> Any:
    from rich.text import Text

    tallies = list(tallies)
    passed, failed = sum(tally.passed for tally in tallies), sum(tally.failed for tally in tallies)
    skipped = sum(tally.skipped for tally in tallies)
    text = f"{backend} on {device}: {passed} of {passed + failed} cases right" + f", {skipped} skipped" * bool(skipped)
    return Text(text, "bold red" if failed else "bold green" if passed else "bold yellow")
