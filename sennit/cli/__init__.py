"""The ``sennit`` command: one module a command, each of which imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sennit.cli import bench, cache, check, generate, info, kernels, plan
from sennit.cli.output import INTERRUPTED, command_group

__all__ = ["app", "main"]

app = command_group()
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("kernels")(kernels.kernels)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from sennit import __version__

        typer.echo(f"sennit {__version__}")
        raise typer.Exit


@app.callback()
def _sennit(
    version: Annotated[
        bool, typer.Option("--version", help="Print Sennit's version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Attention of a whole LLM serving step in one call, over a paged KV cache.

    Example: sennit generate "What is a braid?"
    """


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that has no letter for something still gets the rest
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:  # before a command began
        sys.exit(INTERRUPTED)
