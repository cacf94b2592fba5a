"""The environment variables that Sennit reads, and the folders it may write to."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir", "model_dir"]


def cache_dir() -> Path:
    """Folder for everything that Sennit keeps between runs; ``SENNIT_CACHE_DIR`` moves it. Not created here."""
    if override := os.environ.get("SENNIT_CACHE_DIR"):
        return Path(override)
    from platformdirs import user_cache_path

    return user_cache_path("sennit", appauthor=False)


def model_dir() -> Path:
    """Folder of converted models, inside :func:`cache_dir`."""
    return cache_dir() / "models"
