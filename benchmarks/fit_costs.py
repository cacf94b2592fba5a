"""Fit the times in a backend's configurations to when its items run: python benchmarks/fit_costs.py --backend hopper.

Batches of one strand alone, then of both beside each other, are run by ``sennit plan --measure``'s own code; the
printed times are what the constants in the backend's ``configs`` or ``costs`` should come to.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import typer
from rich.progress import BarColumn, TextColumn
from rich.table import Table

from sennit import AttentionSpec
from sennit.bench.host import describe_host
from sennit.bench.items import ItemTimes, compared_times, measure_items
from sennit.cli.output import console, errors_in_words, file_to_write, progress_between, write_json
from sennit.device import resolve_device

BATCHES = {
    "wide": ("8192@8192", "2048@16384", "4*2048@2048", "300@9000"),
    "narrow": ("64*1@8192", "128*1@2048", "1@131072 + 63*1@1024", "64*4@4096"),
    "both": ("2048@2048 + 128*1@2048", "4096@4096 + 128*1@8192", "1024@12288 + 80*1@12288"),
}
SMALL = {"wide": ("150@260", "90@130"), "narrow": ("24*1@200", "5*2@400"), "both": ("300@400 + 30*1@300",)}


def main() -> None:
    """Measure, print, and write what was found; or say what is wrong."""
    try:
        with errors_in_words(lambda: {"backend": "--backend"}):
            _main()
    except typer.Exit as end:
        sys.exit(end.exit_code)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--small", action="store_true", help="batches that reference-items can run")
    parser.add_argument("--out", metavar="FILE", help="write the times to this file, as JSON")
    options = parser.parse_args()
    file = file_to_write("--out", options.out)
    device = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
    heads = (4, 2) if options.small else (32, 8)
    spec = AttentionSpec(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=128, dtype=torch.bfloat16)
    batches = SMALL if options.small else BATCHES
    listed = [(kind, batch) for kind, texts in batches.items() for batch in texts]
    found: dict[tuple[str, str], list[ItemTimes]] = defaultdict(list)
    with progress_between(TextColumn("measuring {task.description}", markup=False), BarColumn()) as bar:
        task = bar.add_task("", total=len(listed))
        for kind, batch in listed:
            bar.update(task, description=batch, refresh=True)
            times = measure_items(batch, spec, backend=options.backend, device=device, page_size=16)
            found[kind, times.plan.config.name].append(times)
            bar.update(task, advance=1, refresh=True)
    fits = [
        {
            "kind": kind,
            "configuration": configuration,
            "batches": [str(each.plan.batch) for each in times],
            "strands": compared_times(times),
        }
        for (kind, configuration), times in found.items()
    ]
    stdout = console()
    stdout.print(_table(fits))
    for line in _untold(fits):
        stdout.print(line, soft_wrap=True)
    if file is not None:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        write_json(describe_host() | {"gpu": gpu, "fits": fits}, file)


def _table(fits: list[dict[str, Any]]) -> Table:
    made = Table("batches", "configuration", "strand", "of", "configured us", "measured us")
    for fit in fits:
        for strand, times in fit["strands"].items():
            for name, planned in times["planned_us"].items():
                measured = times["measured_us"][name]
                if measured is not None:
                    made.add_row(fit["kind"], fit["configuration"], strand, name, f"{planned:.3f}", f"{measured:.3f}")
    return made


def _untold(fits: list[dict[str, Any]]) -> Iterator[str]:
    """What is not in the table, and why: a line for each strand and reason."""
    for fit in fits:
        for strand, times in fit["strands"].items():
            for reason in dict.fromkeys(times["untold"].values()):
                names = ", ".join(name for name, why in times["untold"].items() if why == reason)
                yield f"{fit['kind']}, {fit['configuration']}, {strand}: {names} cannot be told: {reason}"


if __name__ == "__main__":
    main()
