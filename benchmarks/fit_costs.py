"""Fit the times in a backend's configurations to when its items run: python benchmarks/fit_costs.py --backend hopper.

Batches of one strand alone, then of both beside each other, are run by ``sennit plan --measure``'s own code; the
printed times are what the constants in the backend's ``configs`` or ``costs`` should come to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sennit import AttentionSpec
from sennit.bench.host import describe_host
from sennit.bench.items import ItemTimes, fitted_times, measure_items
from sennit.bench.planning import strand_times
from sennit.device import resolve_device
from sennit.errors import SennitError

BATCHES = {
    "wide": ("8192@8192", "2048@16384", "4*2048@2048", "300@9000"),
    "narrow": ("64*1@8192", "128*1@2048", "1@131072 + 63*1@1024", "64*4@4096"),
    "both": ("2048@2048 + 128*1@2048", "4096@4096 + 128*1@8192", "1024@12288 + 80*1@12288"),
}
SMALL = {"wide": ("500@900", "300@400"), "narrow": ("40*1@700", "9*2@2000"), "both": ("300@900 + 30*1@700",)}
NAMES = ("item and head", "key step", "partial result")


def main() -> None:
    """Measure, print, and write what was found; or say what is wrong."""
    try:
        _main()
    except SennitError as error:
        sys.exit(f"error: {error}")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--small", action="store_true", help="batches that reference-items can run")
    parser.add_argument("--out", type=Path, help="write the times to this file, as JSON")
    options = parser.parse_args()
    device = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
    heads = (4, 2) if options.small else (32, 8)
    spec = AttentionSpec(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=128, dtype=torch.bfloat16)
    batches = SMALL if options.small else BATCHES
    listed = [(kind, batch) for kind, texts in batches.items() for batch in texts]
    found: dict[tuple[str, str], list[ItemTimes]] = defaultdict(list)
    for kind, batch in track(listed, "measuring", console=Console(stderr=True)):
        times = measure_items(batch, spec, backend=options.backend, device=device, page_size=16)
        found[kind, times.plan.config.name].append(times)
    fits = [_fit(kind, times) for (kind, _), times in found.items()]
    Console().print(_table(fits))
    if options.out:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        record = describe_host() | {"gpu": gpu, "fits": fits}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def _fit(kind: str, times: list[ItemTimes]) -> dict[str, Any]:
    config = times[0].plan.config
    rows = zip(config.strands, strand_times(config).tolist(), fitted_times(times), strict=True)
    return {
        "kind": kind,
        "configuration": config.name,
        "batches": [str(each.plan.batch) for each in times],
        "strands": {
            strand.name: {
                "planned_us": dict(zip(NAMES, planned, strict=True)),
                "measured_us": dict(zip(NAMES, fitted, strict=True)),
            }
            for strand, planned, fitted in rows
        },
    }


def _table(fits: list[dict[str, Any]]) -> Table:
    made = Table("batches", "configuration", "strand", "of", "planned us", "measured us")
    for fit in fits:
        for strand, times in fit["strands"].items():
            for name in NAMES:
                measured = times["measured_us"][name]
                if measured is not None:
                    planned = times["planned_us"][name]
                    made.add_row(fit["kind"], fit["configuration"], strand, name, f"{planned:.3f}", f"{measured:.3f}")
    return made


if __name__ == "__main__":
    main()
