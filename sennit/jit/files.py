"""Small operations on files that hold although other processes do the same at the same time."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["hash_bytes", "remove", "write_atomically"]


def hash_bytes(data: bytes) -> str:
    """A hash of 128 bits, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text)
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
