"""``sennit bench generate``: tokens per second and memory of ``sennit.hf.generate`` beside transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.generate import DTYPE, Dtype
from sennit.cli.output import (
    console,
    error_console,
    fail,
    file_to_write,
    format_bytes,
    print_json,
    table,
    working,
    write_json,
)

if TYPE_CHECKING:
    from sennit.bench.generate_profile import TimeParts
    from sennit.bench.generate_results import Measurement, Options, Report, Speed, WorkloadReport

__all__ = ["generate"]


def generate(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            help="A folder, a model's id on the hub, or random:SHAPE for random weights: llama-3-8b, deepseek-v3-small "
            "or llama-tiny.",
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:1.")] = "cpu",
    dtype: Annotated[Dtype, DTYPE] = Dtype.BFLOAT16,
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts of each workload.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=4, metavar="N", help="Mean length of the prompts.")] = 1000,
    max_new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens to generate for each.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each, taken in turns.")] = 1,
    peers: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    full_check: Annotated[
        bool, typer.Option("--full-check", help="Compare all tokens of all prompts, not 32 of some.")
    ] = False,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend of Sennit's attention.")] = "auto",
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of one of Sennit's steps at most.", show_default="the batcher's"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", path_type=str, help="Write the JSON to a file too.", show_default=False),
    ] = None,
) -> None:
    """Time greedy generation for prompts of equal and of unequal lengths, beside transformers'.

    Sennit's tokens in float32 are first compared with transformers'; nothing is printed unless they agree.

    Every measurement has a process of its own, so that peaks of memory are honest.

    Example: sennit bench generate --repeat 7 --full-check --out generate.json

    A short try: sennit bench generate --prompts 4 --prompt-tokens 200 --max-new-tokens 16

    A GPU: sennit bench generate --device cuda --model random:llama-3-8b --prompts 64 --prompt-tokens 2500
    """
    import torch

    from sennit.device import resolve_device

    try:
        with working("Loading transformers ..."):
            from sennit.bench.generate_engines import Sennit
            from sennit.bench.generate_results import Options
            from sennit.hf import smollm2
    except ImportError as error:  # it says what to install
        fail(str(error))
    file = file_to_write("--out", out)
    settings = {} if max_batch_tokens is None else {"max_batch_tokens": max_batch_tokens}
    options = Options(
        str(smollm2.ensure()) if model is None else model,
        None if dtype is Dtype.AUTO else getattr(torch, dtype.value),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        repeat=repeat,
        peers=peers,
        thorough=full_check,
        engine=Sennit(backend, **settings),
        device=str(resolve_device(device)),
    )
    report = _measure(options)
    found = _as_json(report, smollm2.NAME if model is None else model)
    if file is not None:
        write_json(found, file)
    if as_json:
        print_json(found)
    else:
        _print(report, found["model"])


def _measure(options: Options) -> Report:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sennit.bench.generate import measure, num_stages

    stderr = error_console()
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # Drawn once a second: what is measured needs every core.
    with Progress(
        *columns, console=stderr, transient=True, refresh_per_second=1, disable=not stderr.is_terminal
    ) as bar:
        total = num_stages(options)
        task = bar.add_task("loading", total=total)

        def end() -> None:
            bar.advance(task)
            if not stderr.is_terminal:  # which has no bar
                stderr.print(f"sennit: {bar.tasks[task].completed:.0f} of {total}: {bar.tasks[task].description}")

        return measure(options, on_stage=lambda stage: bar.update(task, description=stage), on_end=end)


def _print(report: Report, model: str) -> None:
    stdout = console()
    for workload in report.workloads:
        _print_workload(workload, report, model)
    activities = [each.activity for each in _measurements(report)]
    if noisy := [activity for activity in activities if activity.warning]:
        worst = max(noisy, key=lambda activity: (activity.stolen or 0) + (activity.foreign or 0))
        stdout.print(f"{worst.warning} at worst, in {len(noisy)} of {len(activities)} measurements", style="yellow")
    agreement, options = report.agreement, report.options
    ties = f" {agreement.ties} ended at two logits within 0.001." if agreement.ties else ""
    for note in (
        f"Checked: {agreement.tokens} greedy tokens of {agreement.prompts} prompts are transformers' in float32.{ties}",
        "new/s: all new tokens over the whole time. prompt/s: until each prompt has one new token. decode/s: the rest.",
        "Memory: most that tensors take while generating, weights included."
        if options.device != "cpu"
        else "Memory: most that is resident while generating, runtime and weights included"
        + (", and loading, on this system." if any(each.loading_included for each in _measurements(report)) else "."),
        f"Medians of {options.repeat}; {options.device}, {report.threads} threads; attention of sennit by backend "
        f"{report.backend}.",
    ):
        stdout.print(note, style="dim")


def _print_workload(found: WorkloadReport, report: Report, model: str) -> None:
    from rich.text import Text

    from sennit.bench.generate_profile import Part

    stdout, options = console(), report.options
    dtype = "as stored" if options.dtype is None else str(options.dtype).removeprefix("torch.")
    title = f"{model}, {dtype}: {found.workload}, {options.max_new_tokens} new tokens each"
    stdout.print(title, style="bold")
    made = table("", "", ">seconds", ">new/s", ">prompt/s", ">decode/s", ">memory")
    for index, speed in enumerate(found.speeds):
        name = Text(speed.engine, "bold" if index == 0 else "")
        made.add_row(name, *_cells(speed))
    stdout.print(made)
    for speed in found.speeds:
        stdout.print(f"{speed.engine}: {speed.failure or speed.settings}", style="red" if speed.failure else "dim")
    if found.speedup is not None:
        stdout.print(f"{found.speedup:.2f} times as fast as the fastest of transformers", style="bold green")
    if found.parts is not None:
        shares = ", ".join(f"{found.parts.share(part):.0%} {part.value}" for part in Part)
        stdout.print(f"Time of sennit, in a further run with hooks: {shares}.")
    stdout.print()


def _cells(speed: Speed) -> list[str]:
    if speed.failure:
        return ["failed", "", "", "", ""]
    rates = (speed.new_tokens_per_second, speed.prompt_rate, speed.decode_rate)
    shown = ("" if rate is None else f"{rate:.0f}" for rate in rates)
    return [f"{speed.seconds:.2f}", *shown, format_bytes(speed.peak_bytes)]


def _measurements(report: Report) -> list[Measurement]:
    return [each for found in report.workloads for speed in found.speeds for each in speed.measurements]


def _as_json(report: Report, model: str) -> dict[str, Any]:
    from dataclasses import asdict

    import transformers

    from sennit.bench.host import describe_host

    options, host = report.options, describe_host()
    host["versions"]["transformers"] = transformers.__version__
    return host | {
        "model": model,
        "device": options.device,
        "dtype": None if options.dtype is None else str(options.dtype).removeprefix("torch."),
        "max_new_tokens": options.max_new_tokens,
        "backend": report.backend,
        "check": asdict(report.agreement),
        "workloads": [_workload_as_json(found) for found in report.workloads],
    }


def _workload_as_json(found: WorkloadReport) -> dict[str, Any]:
    return {
        "name": found.workload.name,
        "prompt_lengths": found.workload.lengths,
        "engines": [_speed_as_json(speed) for speed in found.speeds],
        "speedup": found.speedup,
        "profile": None if found.parts is None else _profile_as_json(found.parts),
    }


def _profile_as_json(parts: TimeParts) -> dict[str, Any]:
    return {
        "seconds": {part.name.lower(): seconds for part, seconds in parts.seconds.items()},
        "share_outside_linear_layers": parts.outside_linear,
    }


def _speed_as_json(speed: Speed) -> dict[str, Any]:
    from dataclasses import asdict

    known = {"name": speed.engine, "settings": speed.settings}
    if speed.failure:
        return known | {"failure": speed.failure}
    return known | {
        "seconds": speed.seconds,
        "prompt_seconds": speed.prompt_seconds,
        "new_tokens_per_second": speed.new_tokens_per_second,
        "prompt_tokens_per_second": speed.prompt_rate,
        "decode_tokens_per_second": speed.decode_rate,
        "peak_bytes": speed.peak_bytes,
        "measurements": [asdict(each) for each in speed.measurements],
    }
