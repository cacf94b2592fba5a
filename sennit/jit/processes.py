"""Runs compilers: side by side, without a terminal, and so that none survives an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Event
from types import TracebackType

__all__ = ["Finished", "Stopped", "Workers", "processors", "run"]

LOOK = 0.1  # seconds between looks at whether to stop
# Ends a process group when the pipe from here closes, as it does however this process ends.
WATCH = ("/bin/sh", "-c", 'read -r _ || kill -s KILL -- "-$1"', "sh")


class Stopped(Exception):
    """Somebody asked the workers to stop."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended.

    Attributes:
        command: program and arguments.
        status: its exit status; negative: the signal that ended it.
        printed: what it printed on standard output.
        complaints: what it printed on standard error.
    """

    command: tuple[str, ...]
    status: int
    printed: str
    complaints: str

    @property
    def output(self) -> str:
        """All that it printed."""
        return self.complaints + self.printed


def run(
    command: Sequence[str], *, folder: Path | None = None, stop: Event | None = None, limit: float = inf
) -> Finished:
    """Run one command to its end. On any exception it and the processes that it started are killed.

    They are also when a signal ends this process. Processes that the command leaves behind are not waited for. Its
    messages are in English, and its temporary files in ``folder``.

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
        stderr=subprocess.PIPE,
        start_new_session=True,  # a group of its own, so that a compiler's own children can be killed with it
    )
    try:
        with _watched(process):
            texts = _texts(process, stop, limit)
        printed, complaints = (text.decode("utf-8", errors="replace") for text in texts)
        return Finished(tuple(command), process.returncode, printed, complaints)
    finally:
        _kill(process)


@contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a process and those that it started if this one ends inside, even where no Python code runs any more."""
    watcher = subprocess.Popen(
        [*WATCH, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def _texts(process: subprocess.Popen[bytes], stop: Event | None, limit: float) -> tuple[bytes, bytes]:
    """What a process prints on standard output and standard error until it ends."""
    deadline = time.monotonic() + limit
    ended = False
    while True:
        try:
            return process.communicate(timeout=LOOK)
        except subprocess.TimeoutExpired as so_far:
            if ended:  # and the pipes are held by a process that it left behind
                return so_far.output or b"", so_far.stderr or b""
            ended = process.poll() is not None
            if stop is not None and stop.is_set():
                raise Stopped from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer in {limit:g} s") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


class Workers:
    """As many compilers at a time as this process has processors; leaving the context by an exception stops all."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(processors(), thread_name_prefix="sennit-compiler")
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


def processors() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
