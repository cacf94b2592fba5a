"""``sennit kernels``: compiles kernels for GPUs that need not be here, and prints what they take."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from sennit.cli.output import console, print_json, progress_between, table

if TYPE_CHECKING:
    from sennit.bench.compiling import Outcome

__all__ = ["kernels"]


def kernels(
    architecture: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="NAMES",
            help="Architectures to compile for, with commas between: sm_80, sm_86, sm_89, sm_90.",
            show_default="sm_80,sm_90; sm_90 for hopper",
        ),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Whose kernels: triton or hopper.")] = "triton",
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Compile only for layers with matching names, such as 'bf16 128*'.")
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile the kernels of a GPU backend, with no GPU, and print their registers, spills and shared memory.

    The layers are those of well-known models, and one for each feature that changes kernels. What is there already, in
    Triton's own cache, is not compiled again.

    The exit code is 1 where something cannot be compiled, or takes more shared memory than the architecture has.

    Example: sennit kernels --arch sm_90 --only 'bf16 MLA*'
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from sennit.bench.compiling import ARCHITECTURES, BACKENDS, compile_layers, usual_layers
    from sennit.errors import InvalidInput

    if backend not in BACKENDS:
        raise InvalidInput("--backend", expected=" or ".join(BACKENDS), got=repr(backend))
    if architecture is None:
        architecture = "sm_90" if backend == "hopper" else "sm_80,sm_90"
    chosen = {name: layer for name, layer in usual_layers().items() if fnmatchcase(name, only)}
    if not chosen:
        raise InvalidInput(
            "--only", expected="a pattern that some layer's whole name matches", got=repr(only), hint="such as 'bf16*'"
        )
    names = list(dict.fromkeys(name.strip() for name in architecture.split(",") if name.strip()))
    for name in names or [architecture]:
        if name not in ARCHITECTURES:
            raise InvalidInput("--arch", expected="some of " + ", ".join(ARCHITECTURES), got=repr(name))
    with progress_between(TextColumn("compiling"), BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        outcomes = compile_layers(chosen, names, backend, told)
    if not outcomes:
        raise InvalidInput("--only", expected=f"layers of which {backend} takes some", got=", ".join(chosen))
    limits = {name: ARCHITECTURES[name].shared_memory for name in names}
    if as_json:
        print_json({"shared_memory": limits, "outcomes": [asdict(outcome) for outcome in outcomes]})
    else:
        for name in names:
            _print(name, limits[name], [outcome for outcome in outcomes if outcome.architecture == name])
    if any(outcome.error or outcome.shared_memory > limits[outcome.architecture] for outcome in outcomes):
        raise typer.Exit(1)


def _print(architecture: str, limit: int, outcomes: list[Outcome]) -> None:
    from rich.text import Text

    stdout = console()
    title = f"{architecture}: {limit // 1024} KiB of shared memory a worker, 255 registers a thread"
    made = table(title, "layer", "kernel", ">warps", ">regs", ">spilled", ">in loops", ">shared")
    for outcome in outcomes:
        for index, kernel in enumerate(outcome.kernels):
            layer = Text("" if index else outcome.layer)
            if index == 0:
                layer.append(f"\n{outcome.config}", "dim")
            spilled = Text(f"{kernel.spilled} B" if kernel.spilled else "0", "bold yellow" if kernel.spilled else "")
            shared = Text(f"{kernel.shared_memory / 1024:.1f} KiB", "bold red" if kernel.shared_memory > limit else "")
            in_loops = Text(str(kernel.spills_in_loops), "bold red" if kernel.spills_in_loops else "")
            name = kernel.name.removesuffix("_kernel").replace("_", " ")
            made.add_row(layer, name, str(kernel.warps), str(kernel.registers), spilled, in_loops, shared)
    stdout.print(made)
    for outcome in outcomes:
        if outcome.error:
            stdout.print(f"{outcome.layer}, {outcome.config} cannot be compiled:", style="bold red")
            stdout.print(outcome.error)
    stdout.print()
