"""``sennit cache``: which compiled libraries there are; building them ahead of time, and removing them."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import command_group, console, fail, format_bytes, print_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sennit.jit import Source
    from sennit.jit.store import Entry

__all__ = ["app"]

KEY_DIGITS = 8  # of a key, in tables; --json has all

app = command_group(help="List, build and remove compiled libraries.\n\nExample: sennit cache list")


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the libraries that have been built on this machine.

    Example: sennit cache list --json
    """
    from sennit.env import library_dir
    from sennit.jit.store import entries, obstacle

    found = entries()
    if as_json:
        print_json({"folder": str(library_dir()), "libraries": [_described(entry) for entry in found]})
    elif found:
        _print(found)
    else:
        problem = obstacle()
        note = f"none can be built: {problem}" if problem else "they are built when first needed"
        console().print(f"no libraries in {library_dir()}; {note}", soft_wrap=True)


@app.command("clear")
def clear(
    models: Annotated[bool, typer.Option("--models", help="Remove converted models too; they are large.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove all libraries, printed functions, and what failed builds left for a report.

    They are made again when they are needed.

    What a running process is building stays, and so do models unless --models is given.

    Example: sennit cache clear --models
    """
    from sennit.env import folder_size, function_dir, model_dir
    from sennit.jit import store
    from sennit.jit.files import remove

    if problem := store.obstacle():
        fail(f"nothing can be removed: {problem}")
    done = store.clear()
    remove(function_dir())
    size = folder_size(model_dir()) if models else 0
    if models:
        remove(model_dir())
        size -= folder_size(model_dir())
    freed = {"libraries": done.libraries, "library_bytes": done.size, "model_bytes": size, "kept": list(done.busy)}
    if as_json:
        print_json(freed)
        return
    stdout = console()
    stdout.print(f"libraries removed: {done.libraries}, {format_bytes(done.size)} freed")
    if models:
        stdout.print(f"models removed: {format_bytes(size)} freed")
    for stem in done.busy:
        stdout.print(f"kept {stem}, which is being built", soft_wrap=True)


@app.command("warm")
def warm(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Build the usual libraries for this processor now, so that no later run waits for a compiler.

    Example: sennit cache warm
    """
    from sennit.jit import build_all
    from sennit.jit.store import entries

    before = {entry.folder for entry in entries()}
    wanted = {path.parent for path in build_all(_sources())}
    found = [entry for entry in entries() if entry.folder in wanted]
    if as_json:
        print_json([_described(entry) | {"was_there": entry.folder in before} for entry in found])
        return
    _print(found)
    new = sum(entry.folder not in before for entry in found)
    console().print(f"\nbuilt {new}; {len(found) - new} had been there already")


def _sources() -> Sequence[Source]:
    """What plans and the CPU backend will want on this machine."""
    from sennit.backends.cpu import warm_sources
    from sennit.plan.work import planner_source

    return [planner_source(), *warm_sources()]


def _described(entry: Entry) -> dict[str, Any]:
    built = datetime.fromtimestamp(entry.built).astimezone().isoformat(timespec="seconds")
    return asdict(entry) | {"folder": str(entry.folder), "built": built, "flags": list(entry.flags)}


def _print(found: Sequence[Entry]) -> None:
    made = table("Libraries", "name", "for", "key", ">size", "built", "compiler")
    for column in made.columns[:-1]:  # compilers may have long names; the rest must not fold for their sake
        column.no_wrap = True
    for entry in found:
        when = datetime.fromtimestamp(entry.built).date().isoformat()
        compiler = re.sub(r" \(.*?\)", "", entry.compiler)  # what a distribution puts into parentheses
        made.add_row(entry.name, entry.purpose, entry.key[:KEY_DIGITS], format_bytes(entry.size), when, compiler)
    console().print(made)
