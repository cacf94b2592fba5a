"""``sennit bench attention``: speed of attention over named batches, beside floors, ceilings and peers."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import check_files, error_console, print_json, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sennit.bench.attention import Setting
    from sennit.bench.instruments import Absent, Instruments, Peer
    from sennit.bench.results import Measurement
    from sennit.bench.workloads import Workload

__all__ = ["attention"]


class Dtype(str, Enum):
    """Of queries, keys and values."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Layout(str, Enum):
    """Of pages."""

    HND = "HND"
    NHD = "NHD"


def attention(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="Names, patterns such as 'decode-*', or batches of your own such as '8*1@8192'.",
            show_default="all that have a name",
        ),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend to measure.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Of queries, keys and values.")] = Dtype.BFLOAT16,
    layout: Annotated[Layout, typer.Option(help="Of pages.")] = Layout.HND,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens a page.")] = 16,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads.", show_default="as many as PyTorch has")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Samples of everything, taken in turns.")] = 7,
    peers: Annotated[bool, typer.Option("--peers", help="Measure vLLM's CPU kernels and PyTorch's SDPA too.")] = False,
    vllm_library: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder with vLLM's _C.abi3.so, or the file, where vLLM is not installed; means --peers.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything to FILE, as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the ratios; needs pip install 'sennit\\[bench]'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure attention on the CPU: time, bytes and operations, beside the least time that this machine allows.

    Every output is first compared with float64; only then is anything timed. Peers that are wrong are not timed.

    Workloads: decode-8k, decode-2k, prefill-1k, prefill-4k, mixed, skewed, mla, window, score-mod.

    Example: sennit bench attention decode-8k "512@4096 + 30*1@4096" --peers --out attention.json
    """
    import torch

    from sennit.bench.attention import Setting
    from sennit.bench.cpu import CpuInstruments
    from sennit.bench.cpu import threads as threads_of
    from sennit.bench.picture import check_drawing, draw
    from sennit.bench.workloads import choose_workloads
    from sennit.cli.bench_attention_tables import print_run, title

    chosen = choose_workloads(list(workloads or ()))
    check_files({"--out": out, "--picture": picture})
    if picture is not None:
        check_drawing()
    with threads_of(threads):
        setting = Setting(
            dtype=getattr(torch, dtype.value),
            kv_layout=layout.value,
            page_size=page_size,
            backend=backend,
            repeat=repeat,
            peers=_peers(vllm_library) if peers or vllm_library is not None else (),
        )
        instruments = CpuInstruments()
        found = _measure(chosen, setting, instruments)
        record = _record(setting, found, instruments)
    if as_json:
        print_json(record)
    else:
        print_run(record, found)
    if out is not None:
        write_json(record, out)
    if picture is not None:
        draw(found, title(record), picture)


def _peers(vllm_library: Path | None) -> Sequence[Peer | Absent]:
    from sennit.bench.sdpa import sdpa_peers
    from sennit.bench.vllm_cpu import find_vllm

    return [find_vllm(vllm_library), *sdpa_peers()]


def _measure(chosen: Sequence[Workload], setting: Setting, instruments: Instruments) -> list[Measurement]:
    from rich.progress import BarColumn, Progress, TextColumn

    from sennit.bench.attention import measure

    stderr = error_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    # Drawn between samples only: a thread that draws would be timed along with them.
    with Progress(*columns, console=stderr, transient=True, auto_refresh=False, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=len(chosen))
        found = []
        for workload in chosen:

            def progress(what: str, name: str = workload.name) -> None:
                bar.update(task, description=f"{name}: {what}", refresh=True)

            found.append(measure(workload, setting, instruments, progress=progress))
            bar.update(task, advance=1)
    return found


def _record(setting: Setting, found: Sequence[Measurement], instruments: Instruments) -> dict[str, Any]:
    """Everything that is known of a run, in values that JSON has."""
    from sennit.bench.host import describe_host

    return describe_host() | {
        "device": str(instruments.device),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "kv_layout": setting.kv_layout,
        "page_size": setting.page_size,
        "repeat": setting.repeat,
        "notes": list(instruments.notes),
        "workloads": [measurement.as_json() for measurement in found],
    }
