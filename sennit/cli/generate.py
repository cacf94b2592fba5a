"""``sennit generate``: completions of one or many prompts by a Hugging Face model, all of them in one batch."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import console, error_console, fail, print_json, working

if TYPE_CHECKING:
    from sennit.hf import Completion, Event

__all__ = ["DTYPE", "Dtype", "generate"]


class Dtype(str, Enum):
    """Dtypes of weights."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


DTYPE = typer.Option(metavar="DTYPE", help=f"Of the weights: {', '.join(Dtype)}; auto: as they are stored.")


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts; without any, standard input is one.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID", help="A folder, or a model's id on the hub.", show_default="SmolLM2-135M-Instruct"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate at most for each prompt.")
    ] = 64,
    file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A file of prompts, one a line; - is standard input."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0: always the most probable token; more: draw at random.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Draw from the K most probable tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Draw from the fewest tokens that have probability P together.", show_default="1"
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Draw from tokens at least P times as probable as the best.", show_default="0"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Draw the same again; --json prints it.", show_default="a new one")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End a completion before this text; may be repeated.", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[
        str | None, typer.Option(help="Where the model runs, such as cuda:1.", show_default="a GPU if there is one")
    ] = None,
    dtype: Annotated[Dtype, DTYPE] = Dtype.AUTO,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Backend of Sennit's attention; --json prints which one ran.")
    ] = "auto",
) -> None:
    """Generate for prompts, all of them in one batch, and print the texts in the prompts' order.

    Example: sennit generate "What is a braid?" "And a sennit?" --max-new-tokens 40

    At random: sennit generate "Write a haiku." --temperature 0.8 --top-p 0.95 --seed 7 --stop "###"
    """
    asked = _read_prompts(list(prompts or ()), file)
    if "" in (stop or ()):
        fail("--stop: expected at least one character, got none")
    if _has_other_bytes(stop or ()):
        fail("--stop: expected text in UTF-8, got other bytes")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    loaded = _load(model, device, dtype, sampling)
    options = {"max_new_tokens": max_new_tokens, "raw": raw, "stop": stop, "backend": backend, **sampling}
    if len(asked) == 1 and not as_json:
        _stream_one(loaded, asked[0], options)
        return
    completions = _run_all(loaded, asked, options)
    ran = _backend(loaded[0], backend)
    if as_json:
        print_json([_as_json(prompt, done) | {"backend": ran} for prompt, done in zip(asked, completions, strict=True)])
    else:
        _print_all(asked, completions)
        console().print(f"\nbackend {ran}", style="dim")


def _read_prompts(prompts: list[str], file: Path | None) -> list[str]:
    """Prompts of the command line, then those of the file; or all of standard input where it is piped."""
    try:
        if file is not None:
            text = _piped_text() if str(file) == "-" else file.read_text("utf-8-sig")
            lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # splitlines() cuts at other signs too
            prompts += [line for line in lines if line.strip()]
            if not prompts:
                fail(f"{file}: expected a prompt a line, got no line that is not blank")
        elif not prompts and sys.stdin and not sys.stdin.isatty() and (piped := _piped_text().strip()):
            prompts = [piped]
    except UnicodeDecodeError as error:
        fail(f"{file or 'standard input'}: expected text in UTF-8, got {error.object[error.start : error.start + 1]!r}")
    except OSError as error:
        fail(f"--file: {file} cannot be read ({error.strerror})")
    if _has_other_bytes(prompts):
        fail("PROMPT: expected text in UTF-8, got other bytes")
    if not prompts:
        fail("no prompt: give one (\"sennit generate 'What is a braid?'\"), or --file, or pipe one in")
    return prompts


def _has_other_bytes(texts: Iterable[str]) -> bool:
    """Whether arguments of the command line hold bytes that are no UTF-8, which Python keeps as these letters."""
    return any("\udc80" <= letter <= "\udcff" for text in texts for letter in text)


def _piped_text() -> str:
    return sys.stdin.buffer.read().decode("utf-8-sig") if sys.stdin else ""


def _load(model: str | None, device: str | None, dtype: Dtype, sampling: dict[str, Any]) -> tuple[Any, Any]:
    """The model and its tokenizer, once it is certain that tokens can be chosen in this way."""
    import torch

    from sennit.device import resolve_device

    target = resolve_device(device)
    wanted = None if dtype is Dtype.AUTO else getattr(torch, dtype.value)
    try:
        with working("Loading transformers ..."), _no_collection():
            from sennit.hf import Sampling, loading, smollm2
    except ImportError as error:  # it says what to install
        fail(str(error))
    Sampling(**sampling)
    # Fetching, here or from the hub, draws its own progress.
    source = str(smollm2.ensure()) if model is None else model
    shown = os.path.exists(os.path.expanduser(source))
    with working(f"Loading {model or smollm2.NAME} ...", shown=shown), _no_collection():
        return loading.load(source, dtype=wanted, device=target)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Importing makes many objects and no garbage: looking for some costs half a second of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _events(loaded: tuple[Any, Any], prompts: list[str], options: dict[str, Any]) -> Any:
    from sennit.hf import stream

    return closing(stream(*loaded, prompts, **options))


def _stream_one(loaded: tuple[Any, Any], prompt: str, options: dict[str, Any]) -> None:
    """Print the text of one prompt as it comes."""
    shown = not (sys.stdout and sys.stdout.isatty())  # on a terminal the text itself shows how far it is
    with _events(loaded, [prompt], options) as events, _progress(1, options["max_new_tokens"], shown) as advance:
        try:
            for event in events:
                typer.echo(event.text, nl=False)
                advance(event)
        finally:
            with suppress(OSError):
                typer.echo()  # also after Ctrl-C: what is printed next begins a line


def _run_all(loaded: tuple[Any, Any], prompts: list[str], options: dict[str, Any]) -> list[Completion]:
    found: dict[int, Completion] = {}
    with (
        _events(loaded, prompts, options) as events,
        _progress(len(prompts), options["max_new_tokens"], True) as advance,
    ):
        for event in events:
            advance(event)
            if event.completion is not None:
                found[event.request] = event.completion
    return [found[index] for index in range(len(prompts))]


def _backend(model: Any, asked: str) -> str:
    """The backend of the steps of a generation that has ended, or those of its different layers."""
    from sennit.backends import registry
    from sennit.hf.models import layer_specs

    tried, features = registry.candidates(asked, model.device), frozenset({"paged"})
    chosen = (registry.choose(tried, spec, features, model.device) for spec in dict.fromkeys(layer_specs(model)))
    return ", ".join(dict.fromkeys(chosen))


@contextmanager
def _progress(prompts: int, max_new_tokens: int, shown: bool) -> Iterator[Any]:
    """A bar on standard error, where that is a terminal; gives the function that takes each event."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    stderr = error_console()
    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    tokens = done = 0
    # Standard output must not be taken over: texts go there while the bar is shown.
    with Progress(
        *columns,
        console=stderr,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not (shown and stderr.is_terminal),
    ) as bar:
        task = bar.add_task("reading the prompts", total=prompts * max_new_tokens)

        def advance(event: Event) -> None:
            nonlocal tokens, done
            tokens += event.token_id is not None
            if event.completion is not None:
                done += 1
            # What a finished request did not use counts as done.
            spared = max_new_tokens - len(event.completion.token_ids) if event.completion is not None else 0
            text = f"{tokens} new tokens" + (f", {done} of {prompts} prompts done" if prompts > 1 else "")
            bar.update(task, advance=(event.token_id is not None) + spared, description=text)

        yield advance


def _print_all(prompts: list[str], completions: list[Completion]) -> None:
    from rich.text import Text

    stdout = console()
    for index, (prompt, done) in enumerate(zip(prompts, completions, strict=True), 1):
        heading = Text().append(f"[{index}] ", "dim").append(" ".join(prompt.split()), "bold blue")
        heading.truncate(stdout.width, overflow="ellipsis")
        stdout.print(heading, no_wrap=True)
        typer.echo(done.text.strip("\n"))
        seed = "" if done.seed is None else f", seed {done.seed}"
        note = f"{len(done.token_ids)} tokens, {done.finish_reason}{seed}"
        stdout.print(note, style="dim", end="\n\n" if index < len(prompts) else "\n")


def _as_json(prompt: str, done: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "stopped_by": done.stopped_by,
        "seed": done.seed,
    }
