"""What the commands share of their output: consoles, JSON, units, and how an error ends a command."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "INTERRUPTED",
    "check_files",
    "command_group",
    "console",
    "error_console",
    "fail",
    "format_bytes",
    "gauge",
    "print_json",
    "progress_between",
    "table",
    "working",
    "write_json",
]

USAGE_ERROR, INTERRUPTED = 2, 130


class Commands(TyperGroup):
    """A group of commands that show no code in warnings, in errors that Sennit raises on purpose, and after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        from sennit.errors import SennitError

        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except SennitError as error:
            fail(str(error))
        except BrokenPipeError:
            raise
        except OSError as error:
            fail(f"{error.filename or 'output'}: {error.strerror or error}")
        except MemoryError:
            fail("this machine has too little memory for that")
        except KeyboardInterrupt:
            error_console().print("stopped", style="red")
            raise typer.Exit(INTERRUPTED) from None


def command_group(**options: Any) -> typer.Typer:
    """A group of commands, with what all groups have in common."""
    return typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        **options,
    )


def _show_warning(message: Warning | str, *place: Any, **more: Any) -> None:
    """Print a warning without the place in the code that it comes from."""
    error_console().print(f"warning: {message}", style="yellow", soft_wrap=True)


def fail(message: str) -> NoReturn:
    """Print one red line and end the command with exit code 2."""
    error_console().print(f"error: {message}", style="red", soft_wrap=True)
    raise typer.Exit(USAGE_ERROR)


def console() -> Console:
    """Standard output. Text is printed as it is: brackets in a prompt are no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def error_console() -> Console:
    """Standard error, for progress and errors; likewise."""
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def working(what: str, *, shown: bool = True) -> AbstractContextManager[object]:
    """A spinner on standard error while something takes long, where that is a terminal."""
    stderr = error_console()
    return stderr.status(what, spinner_style="blue") if shown and stderr.is_terminal else nullcontext()


def progress_between(*columns: ProgressColumn) -> Progress:
    """Progress on standard error that is drawn when it is told something, where that is a terminal.

    Between measurements, that is: a thread that draws would be timed along with what it tells of.
    """
    from rich.progress import Progress

    stderr = error_console()
    return Progress(*columns, console=stderr, transient=True, auto_refresh=False, disable=not stderr.is_terminal)


def print_json(value: object) -> None:
    """Print a value as JSON on standard output; infinities and NaN are refused, since JSON has none."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def write_json(value: object, path: Path) -> None:
    """Write a value to a file as :func:`print_json` prints it; at no time does a file hold half of it."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if path.exists() and not path.is_file():  # a pipe, or /dev/null
        path.write_text(text)
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def check_files(files: Mapping[str, Path | None]) -> None:
    """Refuse, before a long run, what could not be written after it: ``{option: file, or None where there is none}``.

    Raises:
        InvalidInput: a file's folder does not exist, or it is a folder itself.
    """
    from sennit.errors import InvalidInput

    for option, path in files.items():
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidInput(option, expected="a file in an existing folder", got=str(path))


def table(title: str, *columns: str) -> Table:
    """A table in the style of all commands; a column that begins with ``>`` is aligned right."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        border_style="dim",
        show_edge=False,
        pad_edge=False,
    )
    for column in columns:
        made.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return made


def gauge(fraction: float, width: int, style: str, *, ascii_only: bool) -> Text:
    """A bar of which ``fraction`` is filled; the rest is dots."""
    from rich.text import Text

    filled = round(width * min(max(fraction, 0.0), 1.0))
    return (
        Text()
        .append(("#" if ascii_only else "▆") * filled, style)
        .append(("." if ascii_only else "·") * (width - filled), "dim")
    )


def format_bytes(size: float) -> str:
    """Bytes with a decimal unit.

    >>> format_bytes(541_615_114)
    '542 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
