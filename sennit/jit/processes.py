"""Runs compilers: side by side, without a terminal, and so that none survives an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Event
from types import TracebackType

__all__ = ["Finished", "Stopped", "Workers", "run"]

LOOK = 0.1  # seconds between looks at whether to stop


class Stopped(Exception):
    """Somebody asked the workers to stop."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended: its command, its exit status (negative: a signal) and all that it printed."""

    command: tuple[str, ...]
    status: int
    output: str


def run(
    command: Sequence[str], *, folder: Path | None = None, stop: Event | None = None, limit: float = inf
) -> Finished:
    """Run one command to its end. On any exception it and the processes that it started are killed.

    Its messages are in English, and its temporary files in ``folder``.

    Args:
        command: program and arguments.
        folder: working directory; None for that of this process.
        stop: checked now and then.
        limit: seconds that it may take.

    Raises:
        Stopped: ``stop`` was set.
        TimeoutError: it took longer than ``limit``.
        OSError: it could not be started.
    """
    environment = {**os.environ, "LC_ALL": "C"} | ({} if folder is None else {"TMPDIR": str(folder)})
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a group of its own, so that a compiler's own children can be killed with it
    )
    try:
        return Finished(tuple(command), *_outcome(process, stop, limit))
    finally:
        _kill(process)


def _outcome(process: subprocess.Popen[str], stop: Event | None, limit: float) -> tuple[int, str]:
    deadline = time.monotonic() + limit
    while True:
        try:
            output, _ = process.communicate(timeout=LOOK)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                raise Stopped from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer in {limit:g} s") from None


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Workers:
    """As many compilers at a time as this process has processors; leaving the context by an exception stops all."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_processors(), thread_name_prefix="sennit-compiler")
        self.stop = Event()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self.stop.set()
        self._pool.shutdown(cancel_futures=kind is not None)

    def run(self, commands: Sequence[Sequence[str]], folder: Path) -> list[Finished]:
        """Run commands, side by side where there is room, and return how each ended, in their order.

        On any exception all compilers are stopped, and have ended when it leaves.

        Raises:
            Stopped: ``stop`` was set.
            OSError: one could not be started.
        """
        futures = [self._pool.submit(self._one, command, folder) for command in commands]
        try:
            return [future.result() for future in futures]
        except BaseException:
            self.stop.set()
            wait(futures)
            raise

    def _one(self, command: Sequence[str], folder: Path) -> Finished:
        if self.stop.is_set():
            raise Stopped
        return run(command, folder=folder, stop=self.stop)


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
