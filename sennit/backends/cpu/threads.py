"""Finds the threads that PyTorch's own operations run on, so that kernels run on the same ones."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

__all__ = ["parallel_function"]

# GCC's OpenMP library has this function, and LLVM's and Intel's have it for programs that GCC compiled.
FUNCTION = "GOMP_parallel"
LIBRARIES = ("libgomp", "libomp", "libiomp5")


@cache
def parallel_function() -> int:
    """Address of ``GOMP_parallel`` in the OpenMP library that PyTorch has loaded; 0 where there is none.

    A second pool of threads would wait for PyTorch's, which keep their cores for a while after each operation.
    """
    for path in _loaded():
        try:
            library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_LAZY)
            address = ctypes.cast(getattr(library, FUNCTION), ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        if address:
            return address
    return 0


def _loaded() -> list[str]:
    """OpenMP libraries of this process, PyTorch's own first."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        paths = {str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*")}
    found = [path for path in sorted(paths) if os.path.basename(path).startswith(LIBRARIES)]
    return sorted(found, key=lambda path: not path.startswith(_torch_folders()))


def _torch_folders() -> tuple[str, ...]:
    """Where PyTorch keeps libraries of its own, as the system names them."""
    folder = os.path.realpath(os.path.dirname(torch.__file__))
    return f"{folder}/", f"{folder}.libs/"
