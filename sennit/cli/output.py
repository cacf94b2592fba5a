"""What the commands share of their output: consoles, JSON, units, and how an error ends a command."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text

    from sennit.errors import SennitError

__all__ = [
    "INTERRUPTED",
    "as_typed",
    "command_group",
    "console",
    "error_console",
    "errors_in_words",
    "fail",
    "file_to_write",
    "format_bytes",
    "gauge",
    "print_json",
    "progress_between",
    "table",
    "working",
    "write_json",
]

USAGE_ERROR, INTERRUPTED = 2, 130
ASKED = re.compile(r"allocate ([0-9.]+ (?:bytes|[KMGT]iB))")  # in the words of PyTorch and NumPy
# What options with other names become.
BECOMES = {
    "num_qo_heads": "--heads",
    "num_kv_heads": "--heads",
    "head_dim_qk": "--head-dim",
    "head_dim_vo": "--head-dim",
    "num_sink_tokens": "--sink-tokens",
    "kv_layout": "--layout",
}
# Of files that can be written and not replaced: their folder may not be written, or they are mounted by themselves.
NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)


class Commands(TyperGroup):
    """A group of commands that show no code in warnings, in errors that Sennit raises on purpose, and after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with errors_in_words(lambda: self._options(ctx)):
            return super().invoke(ctx)

    def _options(self, ctx: Any) -> dict[str, str]:
        """The options of the command that was asked for, by the names of what they become."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        named = {each.name: each.opts[0] for each in command.params if each.opts} if command else {}
        options = {name: option for name, option in named.items() if name and option.startswith("-")}
        return {name: option for name, option in BECOMES.items() if option in options.values()} | options


def as_typed(error: SennitError, options: Mapping[str, str]) -> SennitError:
    """The error, about the options that the user typed where it is about the parameters that they became.

    Args:
        error: what is wrong.
        options: an option for the name of each parameter.

    >>> from sennit.errors import InvalidInput
    >>> error = InvalidInput("num_sink_tokens", expected="0 where window_left is None", got=4)
    >>> print(as_typed(error, {"num_sink_tokens": "--sink-tokens", "window_left": "--window-left"}))
    --sink-tokens: expected 0 where --window-left is None, got 4
    """
    from sennit.errors import InvalidInput, UnsupportedFeature

    def named(names: str) -> str:
        return ", ".join(options.get(name, name) for name in names.split(", "))

    def within(text: str) -> str:  # a name of one word may be just that
        return re.sub(r"(?<![\w.])[a-z]+_\w+", lambda name: options.get(name[0], name[0]), text)

    if isinstance(error, InvalidInput):
        return type(error)(
            named(error.argument), expected=within(error.expected), got=error.got, hint=within(error.hint)
        )
    if isinstance(error, UnsupportedFeature):
        return type(error)(named(error.feature), within(error.reason))
    return error


@contextmanager
def errors_in_words(options: Callable[[], Mapping[str, str]] = dict) -> Iterator[None]:
    """End with a line and an exit code, not with a traceback, what a user or the machine is at fault for.

    Args:
        options: tells, once there is an error, what :func:`as_typed` is to know.

    Raises:
        typer.Exit: the line has been printed.
    """
    from sennit.errors import SennitError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except SennitError as error:
        fail(str(as_typed(error, options())))
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if (where := _lacking_memory(error)) is None:
            raise
        asked = ASKED.search(str(error))
        fail(
            f"{where} has too little memory for that"
            + (f": {asked[1]} could not be had" if asked else "")
            + "; ask for a smaller batch"
        )
    except KeyboardInterrupt:
        error_console().print("stopped", style="red")
        raise typer.Exit(INTERRUPTED) from None


def _lacking_memory(error: Exception) -> str | None:
    """What had too little memory, if the error is about that: PyTorch has no type for it on a CPU."""
    import torch

    if isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error):
        return "the GPU"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "this machine"
    return None


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


def write_json(value: object, path: Path, *, last: bool = True) -> None:
    """Write a value to a file as :func:`print_json` prints it; the file keeps its mode.

    At no time does it hold half of the value, unless it can only be written where it is, as in a folder that cannot.

    Args:
        value: what to write.
        path: the file; where it is a symbolic link, the file that this leads to.
        last: the value is printed where it cannot be written. If it is not the last, another will be written, and
            nothing is said then.

    Raises:
        OSError: the last value could not be written.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    try:
        if _is_special(path):
            path.write_text(text)
        else:
            _write_file(_target(path), text)
    except OSError as error:
        if last:
            typer.echo(text, nl=False)
            reason = f"{error.strerror or error}; what should be in it is on standard output"
            raise OSError(error.errno, reason, str(path)) from error


def _write_file(path: Path, text: str) -> None:
    """Replace a file, or write it where it is if that is all that may be done."""
    from sennit.jit.files import write_atomically

    try:
        write_atomically(path, text, mode=path.stat().st_mode & 0o7777 if path.exists() else None)
    except OSError as error:
        if error.errno not in NOT_REPLACED or not path.is_file():
            raise
        path.write_text(text)


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, such as ``/dev/null``."""
    return path.exists() and not path.is_file()


def _target(path: Path) -> Path:
    """The file that is written where ``path`` is asked for."""
    return Path(os.path.realpath(path))


def file_to_write(option: str, name: str | None) -> Path | None:
    """The file of that name, if any; before a long run, what could not be written after it is refused.

    Args:
        option: that names the file.
        name: as it was typed: in a path, the sign of a folder at its end would be lost.

    Raises:
        InvalidInput: the file's folder does not exist, or it cannot be written, is a folder, or a link to itself.
    """
    from sennit.errors import InvalidInput

    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or name.endswith(("/", "/.")):
        got = "the current folder" if path == Path() else f"the folder {name}"  # an empty name is the former
        raise InvalidInput(option, expected="a file", got=got, hint="add the file's name")
    if _leads_nowhere(path):
        got = f"{name}, a symbolic link that leads back to itself"
        raise InvalidInput(option, expected="a file", got=got, hint="remove it, or choose another")
    folder = _target(path).parent
    if not folder.is_dir():
        raise InvalidInput(option, expected="a file in an existing folder", got=name, hint=f"make {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidInput(option, expected="a file that may be written", got=name, hint="choose another")
    return path


def _leads_nowhere(path: Path) -> bool:
    """Whether symbolic links on the way lead back to themselves."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def table(title: str, *columns: str) -> Table:
    """A table in the style of all commands; a column that begins with ``>`` is aligned right."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
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
