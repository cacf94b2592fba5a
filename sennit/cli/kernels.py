"""``sennit kernels``: compiles the Triton backend's kernels for GPUs that need not be here, and measures them."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from sennit.cli.output import console, print_json, table, working

if TYPE_CHECKING:
    from sennit.backends.triton.compiling import Outcome

__all__ = ["kernels"]


def kernels(
    architecture: Annotated[
        str,
        typer.Option(
            "--arch",
            metavar="NAMES",
            help="Architectures to compile for, with commas between: sm_80, sm_86, sm_89, sm_90.",
        ),
    ] = "sm_80,sm_90",
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Compile only for layers with matching names, such as 'bf16 128*'.")
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile the Triton backend's kernels, with no GPU, and print their registers, spills and shared memory.

    The layers are those of well-known models, and one for each feature that changes kernels. What is there already, in
    Triton's own cache, is not compiled again.

    The exit code is 1 where something cannot be compiled, or takes more shared memory than the architecture has.

    Example: sennit kernels --arch sm_90 --only 'bf16 MLA*'
    """
    from sennit.backends.triton.compiling import ARCHITECTURES, compile_layers, usual_layers
    from sennit.errors import InvalidInput

    chosen = {name: layer for name, layer in usual_layers().items() if fnmatchcase(name, only)}
    if not chosen:
        raise InvalidInput(
            "--only", expected="a pattern that some layer's whole name matches", got=repr(only), hint="such as 'bf16*'"
        )
    names = list(dict.fromkeys(name.strip() for name in architecture.split(",")))
    for name in names:
        if name not in ARCHITECTURES:
            raise InvalidInput("--arch", expected="some of " + ", ".join(ARCHITECTURES), got=repr(name))
    with working("compiling", shown=not as_json):
        outcomes = compile_layers(chosen, names)
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
