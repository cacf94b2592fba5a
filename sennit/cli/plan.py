"""``sennit plan``: prints what the planner makes of given lengths, as a table and a bar a worker."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import console, print_json, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from rich.table import Table

    from sennit.cli.bars import WorkerBars
    from sennit.plan.cost import KernelConfig
    from sennit.plan.plan import Plan
    from sennit.spec import AttentionSpec

__all__ = ["Combine", "plan"]

MOST_ROWS = 20  # of the table of segments
MOST_WORKERS = 2**16  # no GPU has a hundredth of them


# How strands share the device, by ``KernelConfig.combine``.
HOW = {
    "sum": "one after the other",
    "max": "side by side",
    "turns": "in turns",
    "apart": "at once, on workers of their own",
}


class Combine(str, Enum):
    """How the strands of the example configuration share a worker."""

    SUM = "sum"
    MAX = "max"


def plan(
    batch: Annotated[
        str, typer.Argument(metavar="BATCH", help='Requests as new@visible tokens: "2048@16384 + 64*1@16384".')
    ],
    heads: Annotated[str, typer.Option(metavar="QO/KV", help="Query heads and KV heads.")] = "32/8",
    head_dim: Annotated[str, typer.Option(metavar="DIM", help="Head dimension, or QK/VO if they differ.")] = "128",
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens a page.")] = 16,
    split_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Split keys at its multiples only.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Rows see no key behind their own.")] = True,
    window_left: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Keys more than N positions behind a row are hidden.")
    ] = None,
    sink_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="First keys that the window never hides.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers (SMs).", show_default="132")] = None,
    combine: Annotated[
        Combine | None, typer.Option(help="Strands one after the other (sum), side by side (max).", show_default="max")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use this backend's configurations instead of the example of an H200."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run it too, and show the measured loads; needs --backend.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how a batch is cut into work items and placed on workers. Nothing is computed, and no GPU is needed.

    Example: sennit plan "2048@2048 + 128*1@2048" --heads 32/8 --window-left 1023

    With --measure the backend runs the batch and tells when each item began and ended:
    sennit plan "300@900 + 20*1@700" --backend reference-items --measure
    """
    from sennit.backends import registry
    from sennit.bench.items import measure_items
    from sennit.cli.description import describe, describe_measured

    spec = _spec(heads, head_dim).replace(window_left=window_left, num_sink_tokens=sink_tokens)
    options: dict[str, Any] = {"page_size": page_size, "causal": causal, "split_size": split_size}
    _check_options(backend, measure=measure, workers=workers, combine=combine)
    if backend is None:
        described = describe(_make(batch, spec, "example", _example(workers, combine), options), causal=causal)
    else:
        name, device = _offering(backend, spec)
        if measure:
            times = measure_items(batch, spec, backend=name, device=device, **options)
            described = describe(times.plan, causal=causal) | {"measured": describe_measured(times)}
        else:
            configs = registry.load(name).configs(spec, device)
            described = describe(_make(batch, spec, name, configs, options), causal=causal)
    if as_json:
        print_json(described)
    else:
        _print(described)


def _spec(heads: str, head_dim: str) -> AttentionSpec:
    import torch

    from sennit.errors import InvalidInput
    from sennit.spec import AttentionSpec

    num_qo_heads, num_kv_heads = _pair("--heads", heads, "two numbers, as in 32/8")
    if num_qo_heads % num_kv_heads:
        raise InvalidInput("--heads", expected="query heads that KV heads divide, as in 32/8", got=repr(heads))
    dim_qk, dim_vo = _pair("--head-dim", head_dim, "one number or two, as in 128 or 192/128", alone=True)
    return AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=dim_qk,
        head_dim_vo=dim_vo,
        dtype=torch.bfloat16,
    )


def _pair(option: str, text: str, expected: str, *, alone: bool = False) -> tuple[int, int]:
    """Two numbers with a slash between them, or if ``alone`` one that stands for both."""
    from sennit.errors import InvalidInput
    from sennit.plan.integers import INT32_MAX

    first, slash, second = map(str.strip, text.partition("/"))
    if alone and not slash:
        second = first
    if not (first.isdecimal() and second.isdecimal()):
        raise InvalidInput(option, expected=expected, got=repr(text))
    if max(len(first), len(second)) > 10 or min(pair := (int(first), int(second))) < 1 or max(pair) > INT32_MAX:
        raise InvalidInput(option, expected=f"{expected}, from 1 to {INT32_MAX}", got=repr(text))
    return pair


def _example(workers: int | None, combine: Combine | None) -> Sequence[KernelConfig]:
    from sennit.plan.example import example_config

    return (example_config(workers or 132, (combine or Combine.MAX).value),)


def _check_options(backend: str | None, *, measure: bool, workers: int | None, combine: Combine | None) -> None:
    """Refuse what means nothing with a backend, or without one, and workers that nobody has memory for."""
    from sennit.errors import InvalidInput

    if workers is not None and workers > MOST_WORKERS:
        raise InvalidInput("--workers", expected=f"at most {MOST_WORKERS}", got=workers)
    if backend is None:
        if measure:
            raise InvalidInput("--measure", expected="--backend beside it: the example is of no machine", got="none")
        return
    for option, value in (("--workers", workers), ("--combine", combine and combine.value)):
        if value is not None:
            raise InvalidInput(option, expected="nothing beside --backend, which has its own", got=value)


def _offering(backend: str, spec: AttentionSpec) -> tuple[str, torch.device]:
    """Name of the backend that takes a layer, and where: on the GPU of this machine if it runs there."""
    import torch

    from sennit.backends import registry
    from sennit.device import resolve_device
    from sennit.errors import BackendUnavailable

    reasons = []
    for device in dict.fromkeys([resolve_device(None), torch.device("cpu")]):
        for name in registry.candidates(backend, device):
            support = registry.examine(name, spec, frozenset({"paged"}), device).support
            if support.accepted:
                return name, device
            reasons.append(f"{name} on {device}: {support.reason}")
    hint = "without --backend an H200 is planned for, which need not be here"
    raise BackendUnavailable(f"backend {backend!r} has no configurations for this here ({'; '.join(reasons)}); {hint}")


def _make(
    batch: str, spec: AttentionSpec, backend: str, configs: Sequence[KernelConfig], options: dict[str, Any]
) -> Plan:
    import torch

    from sennit.plan.batch import Batch
    from sennit.plan.plan import make_plan

    parsed = Batch.parse(batch, page_size=options["page_size"])
    return make_plan(
        parsed,
        spec=spec,
        owner="sennit plan",
        backend=backend,
        configs=configs,
        device=torch.device("cpu"),
        **options,
    )


def _print(described: dict[str, Any]) -> None:
    stdout = console()
    stdout.print(described["batch"], style="bold")
    stdout.print(_facts(described))
    if described["segments"]:
        stdout.print()
        stdout.print(_segments(described["segments"]))
    for title, bars in _bars(described, described["loads_us"]):
        stdout.print()
        stdout.print(f"Load of each {title}, of {described['makespan_us']:.1f} us", style="bold")
        stdout.print(bars)
    if "measured" in described:
        _print_measured(described, described["measured"])


def _print_measured(described: dict[str, Any], measured: dict[str, Any]) -> None:
    stdout = console()
    for title, bars in _bars(described, measured["loads_us"]):
        stdout.print()
        stdout.print(f"Measured, each {title} busy with items, of {measured['makespan_us']:.1f} us", style="bold")
        stdout.print(bars)
    made = table("Times of items, microseconds", "strand", "of", ">configured", ">measured")
    made.caption = "configured: what the planner counts with; measured: what fits the items best"
    for strand in measured["strands"]:
        for name, planned in strand["planned_us"].items():
            found = strand["measured_us"][name]
            measured_us = f"cannot be told: {strand['untold'][name]}" if found is None else f"{found:.3f}"
            made.add_row(strand["name"], name, f"{planned:.3f}", measured_us)
    stdout.print()
    stdout.print(made)


def _bars(described: dict[str, Any], loads_us: dict[str, list[float]]) -> Iterator[tuple[str, WorkerBars]]:
    """Bars with both strands of each worker; or, where strands have workers of their own, bars of each strand's."""
    import numpy as np

    from sennit.cli.bars import WorkerBars

    loads = {name: np.array(times) for name, times in loads_us.items() if any(times)}
    idle = np.zeros(described["workers"])
    if described["combine"] in ("sum", "max"):
        if loads:
            yield (
                "worker",
                WorkerBars(loads.get("wide", idle), loads.get("narrow", idle), described["combine"] == "max"),
            )
        return
    for strand in described["strands"]:
        name, count = strand["name"], strand["workers"]
        if name in loads:
            both = {"wide": idle[:count], "narrow": idle[:count], name: loads[name][:count]}
            yield f"{name} worker", WorkerBars(**both, side_by_side=False)


def _facts(described: dict[str, Any]) -> Table:
    """What was planned, and the plan in numbers."""
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    dims = (described["head_dim_qk"], described["head_dim_vo"])
    dim = f"{dims[0]}/{dims[1]}" if dims[0] != dims[1] else f"{dims[0]}"
    splitting = (
        f"fixed splits of {described['split_size']} keys" if described["split_size"] else "splits where they help"
    )
    how = HOW[described["combine"]]
    strands = ", ".join(f"{s['name']} {s['tile_rows']} rows x {s['key_step']} keys" for s in described["strands"])
    items = ", ".join(f"{count} {name}" for name, count in described["items_by_strand"].items())
    backend = described["backend"]
    planned_for = "an imaginary GPU; --backend NAME is for this machine" if backend == "example" else backend
    rows = {
        "layer": f"{described['num_qo_heads']} query heads, {described['num_kv_heads']} KV heads, head dim {dim}",
        "step": f"{_masks(described)}, pages of {described['page_size']}, {splitting}",
        "configuration": f"{described['configuration']}, {described['workers']} workers, strands {how}",
        "planned for": planned_for,
        "tiles": strands,
        "work items": f"{described['items']} ({items})",
        "splits": f"{described['splits']} partial results of {described['partial_rows']} rows, "
        f"{described['merges']} merges",
        "makespan": f"{described['makespan_us']:.1f} us predicted, mean {described['mean_us']:.1f} us, "
        f"imbalance {described['imbalance']:.3f}",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    return facts


def _masks(described: dict[str, Any]) -> str:
    causal = "causal" if described["causal"] else "not causal"
    if described["window_left"] is None:
        return causal
    return f"{causal}, {described['window_left']} keys behind and the first {described['num_sink_tokens']}"


def _segments(groups: list[dict[str, Any]]) -> Table:
    made = table("Segments", ">requests", ">new tokens", ">keys", ">keys a row", "strand", ">items", ">splits", ">work")
    notes = ["keys a row: planned for the mean query row, whole steps and tiles included"]
    total = sum(group["time_us"] for group in groups) or 1.0
    for group in groups[:MOST_ROWS]:
        share = f"{100 * group['time_us'] / total:.1f} %"
        numbers = (f"{group[name]:.0f}" for name in ("requests", "q_len", "kv_len", "planned_keys"))
        made.add_row(*numbers, group["strand"] or "none", f"{group['items']}", f"{group['splits']}", share)
    if len(groups) > MOST_ROWS:
        notes.insert(0, f"and {len(groups) - MOST_ROWS} more kinds of segment; --json has them all")
    made.caption = "\n".join(notes)
    return made
