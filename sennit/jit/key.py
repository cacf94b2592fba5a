"""The key of a library: a hash of everything that decides what the compiler makes of its source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from sennit.jit.files import hash_bytes
from sennit.jit.source import Source
from sennit.jit.toolchain import COMPILE, LINK, LINK_LINUX, Toolchain

__all__ = ["key_of", "read_headers"]

FORMAT = 1  # of what is built, and of the folder that it is kept in


def read_headers(folder: Path | None) -> dict[str, bytes]:
    """The files of a folder by their path in it; hidden ones are left out."""
    if folder is None:
        return {}
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.as_posix(): (folder / path).read_bytes() for path in paths if not str(path.name).startswith(".")}


def key_of(
    source: Source, headers: Mapping[str, bytes], toolchain: Toolchain, extra: Sequence[str], runtime: str
) -> str:
    """Return 32 hexadecimal digits that name what will be built.

    Args:
        source: names, texts and flags.
        headers: contents of its headers, see :func:`read_headers`.
        toolchain: the compiler, and what it knows of this processor.
        extra: the user's own compiler flags.
        runtime: version of tvm_ffi, whose headers are compiled in.
    """
    compiler = [*toolchain.command, toolchain.version, toolchain.target, *toolchain.native, toolchain.macros]
    flags = [COMPILE, LINK, LINK_LINUX, source.flags, list(extra), source.last_flags]
    texts = [source.name, source.units, sorted((name, hash_bytes(data)) for name, data in headers.items())]
    return hash_bytes(json.dumps([FORMAT, runtime, compiler, flags, texts]).encode())
