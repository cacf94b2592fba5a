"""``sennit bench attention``: speed of attention over named batches, beside floors, ceilings and peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import fail, file_to_write, print_json, progress_between, write_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from sennit.bench.attention import Setting
    from sennit.bench.results import Measurement
    from sennit.bench.session import Event, Failure, Order
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
            show_default="all below but the sweep",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:1.")] = "cpu",
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend to measure.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Of queries, keys and values.")] = Dtype.BFLOAT16,
    layout: Annotated[
        Layout | None, typer.Option(help="Of pages.", show_default="HND on a CPU, NHD on a GPU: KVCache's")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens a page.")] = 16,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads of a CPU.", show_default="as many as PyTorch has")
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Samples of everything, taken in turns.", show_default="7 on a CPU, 25 on a GPU"
        ),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Measure others too: vLLM's and PyTorch's on a CPU, FlashInfer's ways on a GPU."),
    ] = False,
    vllm_library: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder with vLLM's _C.abi3.so, or the file, where vLLM is not installed; means --peers.",
        ),
    ] = None,
    heat: Annotated[
        bool, typer.Option("--heat", help="Time a GPU after a rest and under sustained load too, with clock and power.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", path_type=str, help="Write everything to FILE, as JSON, after every workload."),
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", path_type=str, help="Draw the ratios; needs pip install 'sennit\\[bench]'."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure attention: time, bytes and operations, beside the least time that this machine allows.

    Every output is first compared with float64; only then is anything timed. Peers that are wrong are not timed.

    Workloads of a CPU: decode-8k, decode-2k, prefill-1k, prefill-4k, mixed, skewed, mla, window, score-mod.

    Workloads of a GPU: decode-8k, decode-2k, decode-1k, skewed, speculative, prefill-8k, prefill-2k, chunk, mixed-512,
    mixed-2k, mixed-4k, mixed-16k, pod-c0, pod-c1, pod-c2, mla-8k, mla-4k-16, mla-4k; and sweep-*: sixty mixes of a
    chunk of a prefill with decodes, as in sweep-32x8-512-4096-16.

    Example: sennit bench attention decode-8k "512@4096 + 30*1@4096" --peers --out attention.json
    """
    import torch

    from sennit.backends import registry
    from sennit.bench.attention import Setting
    from sennit.bench.cpu import threads as threads_of
    from sennit.bench.devices import kind_of
    from sennit.bench.host import describe_host
    from sennit.bench.picture import check_drawing, draw
    from sennit.bench.session import Order
    from sennit.bench.workloads import choose_workloads
    from sennit.cli.bench_attention_tables import print_run, title
    from sennit.device import resolve_device

    place = resolve_device(device)
    kind = kind_of(place)
    chosen = choose_workloads(list(workloads or ()), kind.workloads)
    file, drawing = file_to_write("--out", out), file_to_write("--picture", picture)
    _check_options(place.type, threads=threads, heat=heat and not kind.heats)
    registry.check_runs(backend, place)
    if drawing is not None:
        check_drawing()
    order = Order(
        device=place,
        workloads=tuple(workload.name for workload in chosen),
        setting=Setting(
            dtype=getattr(torch, dtype.value),
            kv_layout=kind.kv_layout if layout is None else layout.value,
            page_size=page_size,
            backend=backend,
            repeat=kind.repeat if repeat is None else repeat,
            heat=heat,
        ),
        peers=peers or vllm_library is not None,
        vllm_library=vllm_library,
    )
    order.find_peers()  # what is wrong with them is said before anything is measured
    with threads_of(threads):
        run = _Run(order.setting, str(place), describe_host(), file)
        _measure(order, chosen, run)
    if not run.found:
        fail("; ".join(f"{failure.workload}: {failure.reason}" for failure in run.failures))
    if as_json:
        print_json(run.record)
    else:
        print_run(run.record, run.found)
    if drawing is not None:
        draw(run.found, title(run.record), drawing)
    if run.failures:
        fail("; ".join(f"{failure.workload}: {failure.reason}" for failure in run.failures))


def _check_options(device: str, *, threads: int | None, heat: bool) -> None:
    """Refuse what means nothing on a kind of device."""
    from sennit.errors import InvalidInput

    if threads is not None and device != "cpu":
        raise InvalidInput("--threads", expected="nothing on a GPU: it is of a CPU", got=threads)
    if heat:
        raise InvalidInput("--heat", expected="a GPU, with --device cuda", got=device)


@dataclass
class _Run:
    """What has been found so far, written to a file as it comes: a machine may be taken away in the middle."""

    setting: Setting
    device: str
    host: dict[str, Any]
    out: Path | None
    found: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    finished: bool = False

    def take(self, event: Event) -> None:
        """Keep what a session tells; stages are for others."""
        from sennit.bench.attention import Stage
        from sennit.bench.results import Measurement
        from sennit.bench.session import Machine

        if isinstance(event, Stage):
            return
        if isinstance(event, Measurement):
            self.found.append(event)
        elif isinstance(event, Machine):
            self.hardware, self.notes = dict(event.hardware), [*self.notes, *event.notes]
        else:
            self.failures.append(event)
        self.write()

    def write(self) -> None:
        """The record, where there is a file for it."""
        if self.out is not None:
            write_json(self.record, self.out, last=self.finished)

    @property
    def record(self) -> dict[str, Any]:
        """Everything that is known of a run, in values that JSON has."""
        from dataclasses import asdict

        return self.host | {
            "hardware": self.host["hardware"] | self.hardware,
            "device": self.device,
            "dtype": str(self.setting.dtype).removeprefix("torch."),
            "kv_layout": self.setting.kv_layout,
            "page_size": self.setting.page_size,
            "repeat": self.setting.repeat,
            "finished": self.finished,
            "notes": self.notes,
            "failures": [asdict(failure) for failure in self.failures],
            "workloads": [measurement.as_json() for measurement in self.found],
        }


def _measure(order: Order, chosen: list[Workload], run: _Run) -> None:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from sennit.bench.attention import Stage
    from sennit.bench.session import run_session

    with progress_between(BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)) as bar:
        if order.peers:
            _prepare(order, chosen, run, bar)
        task = bar.add_task("", total=len(chosen))

        def tell(event: Event) -> None:
            run.take(event)
            if isinstance(event, Stage):
                bar.update(task, description=str(event), refresh=True)
            else:
                bar.update(task, completed=len(run.found) + len(run.failures), refresh=True)

        run_session(order, tell)
        run.finished = True
        run.write()


def _prepare(order: Order, chosen: list[Workload], run: _Run, bar: Progress) -> None:
    """Build what peers need, with a bar of its own."""
    from sennit.bench.devices import kind_of

    task: TaskID | None = None

    def told(name: str, problem: str, done: int, total: int) -> None:
        nonlocal task
        if task is None:
            task = bar.add_task("building what peers need, which takes minutes", total=total)
        if problem:
            run.notes.append(f"{name} was not built: {problem}")
        bar.update(task, completed=done, refresh=True)

    kind_of(order.device).prepare(chosen, order.setting.dtype, order.setting.page_size, told)
    if task is not None:
        bar.remove_task(task)
