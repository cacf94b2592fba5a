"""The folder of libraries: entries that appear whole, are checked before use, and are locked while they are built."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from sennit.env import folder_size, library_dir
from sennit.jit.files import hash_bytes, read_object, remove

__all__ = [
    "Cleared",
    "Entry",
    "clear",
    "entries",
    "find",
    "lock",
    "new_folder",
    "obstacle",
    "publish",
    "seal",
    "set_aside",
    "sweep",
]

MANIFEST = "manifest.json"  # written last
DAY = 86_400.0  # seconds
POLL = 0.05  # seconds between looks at a lock


@dataclass(frozen=True)
class Entry:
    """A library in the cache.

    Attributes:
        name: of its source.
        key: of everything that it was built from.
        folder: where it is, with its source and the commands that built it.
        size: bytes of that folder.
        built: when, in seconds since 1970.
        compiler: the version of the compiler.
        flags: compiler flags of the source and of the user.
        purpose: what it is for, where its name does not say so.
    """

    name: str
    key: str
    folder: Path
    size: int
    built: float
    compiler: str
    flags: tuple[str, ...]
    purpose: str = ""


def find(name: str, key: str) -> Path | None:
    """Return the library of an entry, if there is one and it holds the very bytes that were built."""
    folder = library_dir() / f"{name}-{key}"
    library = folder / f"{name}.so"
    try:
        manifest = read_object(folder / MANIFEST)
        data = library.read_bytes()
    except (OSError, ValueError):
        return None
    whole = {"name": name, "key": key, "size": len(data), "hash": hash_bytes(data)}
    return library if whole.items() <= manifest.items() else None


def seal(folder: Path, name: str, key: str, *, compiler: str, flags: tuple[str, ...], purpose: str = "") -> None:
    """Write the manifest of a library that has just been built in a folder."""
    data = (folder / f"{name}.so").read_bytes()
    made = {"name": name, "key": key, "size": len(data), "hash": hash_bytes(data)}
    made |= {"built": time.time(), "compiler": compiler, "flags": flags, "purpose": purpose}
    (folder / MANIFEST).write_text(json.dumps(made, indent=2) + "\n")


def entries() -> list[Entry]:
    """Return the entries of the cache, by name and then by age; their libraries are not checked."""
    found = []
    for folder in _contents():
        try:
            made = read_object(folder / MANIFEST)
            built, flags = float(made["built"]), tuple(map(str, made["flags"]))
            told = made["compiler"], flags, str(made.get("purpose", ""))
            entry = Entry(made["name"], made["key"], folder, folder_size(folder), built, *told)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if folder.name == f"{entry.name}-{entry.key}":
            found.append(entry)
    return sorted(found, key=lambda entry: (entry.name, entry.built))


def obstacle() -> str:
    """What keeps new libraries from being kept, and what to do; empty where nothing does. Nothing is written for it."""
    place = library_dir()
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a folder; remove it, or set SENNIT_CACHE_DIR to a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written; make it writable, or set SENNIT_CACHE_DIR to a folder that is"
    return ""


def new_folder(stem: str) -> Path:
    """Make the temporary folder in which the library of ``stem``, its name and key, is built."""
    folder = _temporary(stem)
    folder.mkdir()
    return folder


def publish(folder: Path, name: str) -> Path:
    """Let a finished folder appear under a name, by one rename, in place of what is there. Its lock must be held.

    What was there goes away whole, since another process may be using it.
    """
    place = library_dir() / name
    set_aside(place)
    return folder.rename(place)


def set_aside(place: Path) -> None:
    """Remove whatever has this path, if anything, such that nobody sees half of it."""
    if os.path.lexists(place):
        remove(place.rename(_temporary(place.name)))


def _temporary(stem: str) -> Path:
    return library_dir() / f".{stem}.{secrets.token_hex(4)}.tmp"


@contextmanager
def lock(stem: str, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of ``stem`` against other threads and processes.

    Args:
        stem: name and key of a library.
        waiting: called again and again while another has it; may raise.
    """
    from filelock import FileLock, Timeout

    held = FileLock(_lock_file(stem))
    while True:
        try:
            held.acquire(timeout=2 * POLL, poll_interval=POLL)
            break
        except Timeout:
            waiting()
    try:
        yield
    finally:
        held.release()


class _Busy(Exception):
    """A lock is held by somebody."""


def _refuse() -> None:
    raise _Busy


def sweep(stem: str) -> None:
    """Remove temporary folders that no living process builds in, while the lock of ``stem`` is held."""
    for path in _contents():
        if path.suffix != ".tmp":
            continue
        other = _stem(path)
        if other == stem or _age(path) > DAY:
            remove(path)
        elif _lock_file(other).exists():
            _remove_if_free(path)


@dataclass(frozen=True)
class Cleared:
    """What clearing the cache removed: libraries, bytes, and the stems that were left because they are being built."""

    libraries: int
    size: int
    busy: tuple[str, ...]


def clear() -> Cleared:
    """Remove everything that has been built or kept for a report, but not what is being built at this moment."""
    before = {entry.folder for entry in entries()}
    size, busy = 0, []
    for path in _contents():
        if path.suffix == ".lock":  # empty; removing one that another process waits for would let two build at once
            continue
        taken = folder_size(path) if path.is_dir() else path.lstat().st_size
        if _remove_if_free(path):
            size += taken
        else:
            busy.append(_stem(path))
    return Cleared(len(before - {entry.folder for entry in entries()}), size, tuple(dict.fromkeys(busy)))


def _remove_if_free(path: Path) -> bool:
    stem = _stem(path)
    try:
        with lock(stem, waiting=_refuse) if _lock_file(stem).exists() else nullcontext():
            set_aside(path)
    except _Busy:
        return False
    return True


def _lock_file(stem: str) -> Path:
    return library_dir() / f".{stem}.lock"


def _contents() -> list[Path]:
    try:
        return sorted(library_dir().iterdir())
    except OSError:
        return []


def _stem(path: Path) -> str:
    """Name and key of the library that a path in the cache folder belongs to."""
    stem = path.name[1:].rsplit(".", 2)[0] if path.suffix == ".tmp" else path.name
    return stem.removeprefix("failed-")


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0
