"""Builds libraries that are missing, each once for all processes, and keeps what is needed to report a failure."""

from __future__ import annotations

import ctypes
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from threading import Event, Thread
from time import monotonic

from sennit import __version__
from sennit.env import cxx_flags, library_dir
from sennit.errors import BuildFailed, BuildUnavailable
from sennit.jit import store
from sennit.jit.files import remove
from sennit.jit.key import key_of, read_headers
from sennit.jit.processes import Finished, Stopped, Workers
from sennit.jit.runtime import runtime
from sennit.jit.source import Source
from sennit.jit.toolchain import Toolchain, find_toolchain

__all__ = ["Built", "build", "build_all", "check_buildable", "ensure", "find"]

PATIENCE, REMINDER = 1.0, 10.0  # seconds without a word, at first and later
FIRST_LINES = 6  # of a compiler's errors, in the text of an exception
NO_SPACE = ("No space left on device", "Disk quota exceeded")
NO_MEMORY = ("Killed signal terminated program", "virtual memory exhausted", "out of memory", "Cannot allocate memory")
ERRORS = ("error:", "undefined reference", "Undefined symbols", "cannot find")


@dataclass(frozen=True)
class Built:
    """A library, and whether it was built just now."""

    path: Path
    fresh: bool


@dataclass(frozen=True)
class Job:
    """A library to build: its source, the contents of its headers, all flags, the compiler, and the key of them all."""

    source: Source
    headers: Mapping[str, bytes]
    flags: tuple[str, ...]
    toolchain: Toolchain
    key: str

    @property
    def stem(self) -> str:
        """Name and key, as files are called."""
        return f"{self.source.name}-{self.key}"

    def commands(self) -> tuple[list[list[str]], list[str]]:
        """The commands that compile the units, and the one that links them; paths are relative to the build folder."""
        info = runtime().libinfo
        units = [name for name, _ in self.source.units]
        objects = [f"objects/{name}.o" for name in units]
        folders = {"includes": ["headers"], "system": info.include_paths()}
        compiling = [
            self.toolchain.compile(f"units/{unit}", made, **folders, flags=self.flags)
            for unit, made in zip(units, objects, strict=True)
        ]
        output, libraries = f"{self.source.name}.so", [info.find_libtvm_ffi()]
        return compiling, self.toolchain.link(objects, output, libraries=libraries, flags=self.flags)


def build(source: Source) -> Path:
    """Return the path of a library, after building it if it is not in the cache.

    Threads and processes that need it at the same time wait for the first one. After an error or an interrupt no
    compiler is left running and the cache is as before.

    Raises:
        BuildUnavailable: nothing can be compiled here, or the cache folder cannot be written.
        BuildFailed: the compiler rejected the source.
    """
    return ensure([source])[0].path


def build_all(sources: Sequence[Source]) -> list[Path]:
    """Return the paths of several libraries, in their order; those that are missing are built side by side.

    Raises: as :func:`build`, for the first that could not be built, after all others have been.
    """
    return [built.path for built in ensure(sources)]


def ensure(sources: Sequence[Source]) -> list[Built]:
    """Find or build libraries; as :func:`build_all`."""
    jobs = {source: _job(source) for source in sources}
    found = {
        job.stem: Built(path, fresh=False) for job in jobs.values() if (path := store.find(job.source.name, job.key))
    }
    missing = {job.stem: job for job in jobs.values() if job.stem not in found}
    if missing:
        found |= dict(zip(missing, _build_side_by_side(list(missing.values())), strict=True))
    return [found[jobs[source].stem] for source in sources]


def find(source: Source) -> Path | None:
    """Return the path of a library if it is in the cache; nothing is built."""
    job = _job(source)
    return store.find(job.source.name, job.key)


def check_buildable() -> None:
    """Check that there is a compiler and a folder for what it makes; nothing is built or made for it.

    Raises:
        BuildUnavailable: there is not.
        InvalidInput: ``SENNIT_CXXFLAGS`` cannot be read.
    """
    find_toolchain()
    cxx_flags()
    if problem := store.obstacle():
        raise BuildUnavailable(f"libraries cannot be built: {problem}")


def _job(source: Source) -> Job:
    toolchain, extra, headers = find_toolchain(), cxx_flags(), read_headers(source.headers)
    key = key_of(source, headers, toolchain, extra, runtime().__version__)
    return Job(source, headers, (*source.flags, *extra, *source.last_flags), toolchain, key)


def _build_side_by_side(jobs: Sequence[Job]) -> list[Built]:
    with Workers() as workers, ThreadPoolExecutor(len(jobs), thread_name_prefix="sennit-build") as pool:
        futures = [pool.submit(_build, job, workers) for job in jobs]
        try:
            wait(futures)
        except BaseException:
            workers.stop.set()
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        # Where one error stopped all the others, it is the one to show.
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error
        return [future.result() for future in futures]


def _build(job: Job, workers: Workers) -> Built:
    """Build one library under its lock, unless another has done it meanwhile."""
    name, place = job.source.name, library_dir()
    shown = f"{name} for {job.source.purpose}" if job.source.purpose else name

    def look() -> None:
        if workers.stop.is_set():
            raise Stopped

    try:
        place.mkdir(parents=True, exist_ok=True)
        with _saying(f"waiting for another that is building {shown}") as waited, store.lock(job.stem, waiting=look):
            waited.set()
            if path := store.find(name, job.key):
                return Built(path, fresh=False)
            store.sweep(job.stem)
            with _saying(f"building {shown}", f" (once; kept in {place})", once=True):
                return Built(_make(job, workers), fresh=True)
    except (OSError, NotImplementedError) as error:  # the latter from locks, where a file system has none
        raise _unusable(name, _text(error)) from error


def _make(job: Job, workers: Workers) -> Path:
    """Compile and link in a temporary folder, which then becomes the entry."""
    folder = store.new_folder(job.stem)
    try:
        compiling, linking = job.commands()
        _write_sources(job, folder, [*compiling, linking])
        _run(job, folder, compiling, workers)
        [linked] = _run(job, folder, [linking], workers)
        _check_loading(job, folder, linked)
        remove(folder / "objects")
        store.seal(
            folder,
            job.source.name,
            job.key,
            compiler=job.toolchain.version,
            flags=job.flags,
            purpose=job.source.purpose,
        )
        library = store.publish(folder, job.stem) / f"{job.source.name}.so"
        remove(library_dir() / _failed(job))
        return library
    except FileNotFoundError as error:
        if folder.exists():
            raise
        raise BuildUnavailable(
            f"{job.source.name} was not built: {folder.parent} was removed meanwhile; trying again will make it anew"
        ) from error
    finally:
        remove(folder)


def _write_sources(job: Job, folder: Path, commands: Sequence[Sequence[str]]) -> None:
    files = {f"units/{name}": text.encode() for name, text in job.source.units}
    files |= {f"headers/{name}": data for name, data in job.headers.items()}
    files["build.sh"] = "".join(
        f"{shlex.join(command)}\n" for command in (["mkdir", "-p", "objects"], *commands)
    ).encode()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for name in ("objects", "headers"):
        (folder / name).mkdir(exist_ok=True)


def _run(job: Job, folder: Path, commands: Sequence[Sequence[str]], workers: Workers) -> list[Finished]:
    """Run commands, and raise for those that failed."""
    try:
        ended = workers.run(commands, folder)
    except OSError as error:
        if not folder.exists():
            raise
        raise BuildUnavailable(
            f"{job.source.name} was not built: the compiler cannot be run: {_text(error)}"
        ) from error
    _check(job, folder, ended)
    return ended


def _check(job: Job, folder: Path, ended: Sequence[Finished]) -> None:
    """Raise for the commands that failed: the machine's fault, or the source's."""
    failed = [one for one in ended if one.status != 0]
    if not failed:
        return
    said = "\n".join(one.output for one in failed)
    for sign in NO_SPACE:
        if sign in said:
            raise _unusable(job.source.name, sign)
    if any(sign in said for sign in NO_MEMORY) or any(one.status == -SIGKILL for one in failed):
        raise BuildUnavailable(
            f"{job.source.name}: the compiler was killed, most likely because memory ran out; "
            f"with more of it free, the same will work ({shlex.join(failed[0].command)})"
        )
    raise _failure(job, folder, failed, "rejected it, and said first")


def _check_loading(job: Job, folder: Path, linked: Finished) -> None:
    """Raise if what was linked without an error is no library that can be loaded, before others see it."""
    try:
        ctypes.CDLL(str(folder / f"{job.source.name}.so"))
    except OSError as error:
        told = replace(linked, complaints=f"{error}\n{linked.complaints}".replace(f"{folder}/", ""))
        raise _failure(job, folder, [told], "made a library that cannot be loaded") from error


def _failure(job: Job, folder: Path, failed: Sequence[Finished], verdict: str) -> BuildFailed:
    """The error for a source of which no library could be made; its folder is kept, with a report in it."""
    remove(folder / "objects")
    (folder / "report.txt").write_text(_report(job, failed))
    kept = store.publish(folder, _failed(job))
    lines = [line for line in failed[0].output.splitlines() if line.strip()] or ["(nothing)"]
    start = next((at for at, line in enumerate(lines) if any(sign in line for sign in ERRORS)), 0)
    ours = f"\nSENNIT_CXXFLAGS adds: {shlex.join(cxx_flags())}; try without it first" if cxx_flags() else ""
    return BuildFailed(
        f"{job.source.name}: {job.toolchain.version} {verdict}:\n"
        + "".join(f"  {line}\n" for line in lines[start : start + FIRST_LINES])
        + f"Command, in {kept}:\n  {shlex.join(failed[0].command)}{ours}\n"
        f"To report this, attach {kept / 'report.txt'}"
    )


def _failed(job: Job) -> str:
    """Name of the folder that is kept of a failure."""
    return f"failed-{job.stem}"


def _report(job: Job, failed: Sequence[Finished]) -> str:
    """Everything that somebody else needs in order to see the same."""
    parts = [f"sennit {__version__}, tvm_ffi {runtime().__version__}", f"{job.toolchain!r}"]
    for one in failed:
        parts += [f"$ {shlex.join(one.command)}", f"exit status {one.status}", one.output]
    for name, text in job.source.units:
        parts += [f"==== {name}", text]
    return "\n".join(parts) + "\n"


def _text(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return str(error).removeprefix(f"[Errno {number}] ")


def _unusable(name: str, problem: str) -> BuildUnavailable:
    """The error for a folder in which a library cannot be built, with what to do."""
    if found := store.obstacle():
        return BuildUnavailable(f"{name} cannot be built: {found}")
    full = any(sign in problem for sign in NO_SPACE)
    remedy = "make some MB free there, or set" if full else "set"
    return BuildUnavailable(
        f"{name} cannot be built in {library_dir()}: {problem}; {remedy} SENNIT_CACHE_DIR to another folder"
    )


_said: set[str] = set()  # lines that this process says once


@contextmanager
def _saying(what: str, more: str = "", *, once: bool = False) -> Iterator[Event]:
    """Say a line on standard error if the inside takes long, and again while it does; setting the event ends that.

    With ``once``, a line that has been said is not said again: libraries of one name may be many.
    """
    done = Event()
    Thread(target=_say, args=(what, more, once, done), daemon=True).start()
    try:
        yield done
    finally:
        done.set()


def _say(what: str, more: str, once: bool, done: Event) -> None:
    start, pause = monotonic(), PATIENCE
    while not done.wait(pause):
        line = f"sennit: {what}{more}"
        if sys.stderr is not None and line not in _said:
            print(f"{line}\n", end="", file=sys.stderr, flush=True)
        if once and pause == PATIENCE:
            _said.add(line)
        pause = REMINDER
        more = f", {monotonic() + pause - start:.0f} s so far"
