"""The environment variables that Sennit reads, and the folders it may write to."""

from __future__ import annotations

import os
import shlex
from functools import cache
from pathlib import Path

from sennit.errors import InvalidInput

__all__ = [
    "CPU_ISAS",
    "cache_dir",
    "cpu_isa",
    "cxx_flags",
    "debug",
    "folder_size",
    "function_dir",
    "library_dir",
    "model_dir",
    "triton_interpreted",
]

CPU_ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "neon", "generic")


def cache_dir() -> Path:
    """Folder for everything that Sennit keeps between runs; ``SENNIT_CACHE_DIR`` moves it. Not created here.

    Raises:
        InvalidInput: the variable begins with ``~`` and there is no such home.
    """
    if override := os.environ.get("SENNIT_CACHE_DIR"):
        try:
            return Path(override).expanduser()
        except RuntimeError as error:
            hint = "write the whole path"
            raise InvalidInput("SENNIT_CACHE_DIR", expected="a folder", got=repr(override), hint=hint) from error
    return _user_cache(*map(os.environ.get, ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA")))


@cache  # which is asked for in every plan
def _user_cache(*variables: str | None) -> Path:
    """Where the user's caches are, by the variables that decide it."""
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


def library_dir() -> Path:
    """Folder of compiled libraries, inside :func:`cache_dir`."""
    return cache_dir().absolute() / "libraries"


def function_dir() -> Path:
    """Folder of score and mask functions printed for Triton, inside :func:`cache_dir`."""
    return cache_dir().absolute() / "functions"


def cpu_isa() -> str | None:
    """The instruction set that ``SENNIT_CPU_ISA`` asks for, one of :data:`CPU_ISAS`, or None where it is not set.

    Raises:
        InvalidInput: it is something else.
    """
    wanted = os.environ.get("SENNIT_CPU_ISA") or None
    if wanted is not None and wanted not in CPU_ISAS:
        raise InvalidInput("SENNIT_CPU_ISA", expected="one of " + ", ".join(CPU_ISAS), got=repr(wanted))
    return wanted


def cxx_flags() -> tuple[str, ...]:
    """Compiler flags that ``SENNIT_CXXFLAGS`` adds behind all others, split as a shell would.

    Raises:
        InvalidInput: a quotation in it does not end.
    """
    text = os.environ.get("SENNIT_CXXFLAGS", "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidInput("SENNIT_CXXFLAGS", expected="flags as a shell reads them", got=repr(text)) from error


def triton_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET``, one of Triton's own variables, makes it run kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
