"""Small operations on files that hold although other processes do the same at the same time."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["hash_bytes", "read_object", "remove", "write_atomically"]


def hash_bytes(data: bytes) -> str:
    """A hash of 128 bits, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    try:
        read = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} holds no object")
    return read


def write_atomically(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a file that others see whole or not at all; with ``mode``, those are its permissions."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        if mode is not None:
            temporary.touch(0o600)  # until it has its own, nobody else may read it
        temporary.write_text(text)
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove(path: Path) -> None:
    """Remove a file or a folder; what somebody else removes or fills at the same time is left to them."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
