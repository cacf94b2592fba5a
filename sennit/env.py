"""The environment variables that Sennit reads, and the folders it may write to."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir", "debug", "folder_size", "model_dir"]


def cache_dir() -> Path:
    """Folder for everything that Sennit keeps between runs; ``SENNIT_CACHE_DIR`` moves it. Not created here."""
    if override := os.environ.get("SENNIT_CACHE_DIR"):
        return Path(override).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("sennit", appauthor=False)


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder, while others may add, rename and delete some."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # renamed or deleted meanwhile
                continue
    return total


def debug() -> bool:
    """Whether ``SENNIT_DEBUG`` is set to other than 0: page tables and lengths on a device are then checked too.

    That copies them to the host, and so waits for the device, in every operation.
    """
    return os.environ.get("SENNIT_DEBUG", "0") != "0"


def model_dir() -> Path:
    """Folder of converted models, inside :func:`cache_dir`."""
    return cache_dir() / "models"
