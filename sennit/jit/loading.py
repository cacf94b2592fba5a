"""Loads libraries, each once in a process."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from sennit.errors import BuildFailed
from sennit.jit.building import Built, ensure
from sennit.jit.runtime import runtime
from sennit.jit.source import Source
from sennit.jit.store import set_aside

if TYPE_CHECKING:
    from tvm_ffi import Module

__all__ = ["load", "surroundings"]

SURROUNDINGS = ("CXX", "PATH", "SENNIT_CACHE_DIR", "SENNIT_CXXFLAGS")

_modules: dict[tuple[Source, tuple[str | None, ...]], Module] = {}
_locks: dict[tuple[Source, tuple[str | None, ...]], Lock] = {}
# A child has none of the threads that held its parent's locks.
os.register_at_fork(after_in_child=_locks.clear)


def load(source: Source) -> Module:
    """Return the library of a source, ready to be called; it is built if it is not in the cache.

    The same source gives the same module for as long as the process lives; its headers are not read again.

    Raises:
        BuildUnavailable: nothing can be compiled here, or the cache folder cannot be written.
        BuildFailed: the compiler rejected the source, or what it made of it cannot be loaded.
    """
    known = source, surroundings()
    if (module := _modules.get(known)) is not None:
        return module
    with _locks.setdefault(known, Lock()):
        if known not in _modules:
            _modules[known] = _load(source)
        return _modules[known]


def surroundings() -> tuple[str | None, ...]:
    """What else decides which library a source means, and whether it can be built; it may change at any time."""
    return tuple(map(os.environ.get, SURROUNDINGS))


def _load(source: Source) -> Module:
    [built] = ensure([source])
    try:
        return _open(built)
    except BuildFailed:
        if built.fresh:
            raise
    # Made for another system, such as a container with an older libc, or removed since it was found.
    with suppress(OSError):  # where it cannot be replaced, the second attempt says what is wrong
        set_aside(built.path.parent)
    [built] = ensure([source])
    return _open(built)


def _open(built: Built) -> Module:
    try:
        module: Module = runtime().load_module(str(built.path))
    except Exception as error:
        raise BuildFailed(f"{built.path} was built, but cannot be loaded: {error}") from error
    return module
