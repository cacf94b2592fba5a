"""C++ source text to compiled, cached and loaded libraries."""

from __future__ import annotations

from sennit.jit.building import build, build_all, check_buildable, find
from sennit.jit.loading import load, surroundings
from sennit.jit.source import Source
from sennit.jit.toolchain import Toolchain, find_toolchain

__all__ = [
    "Source",
    "Toolchain",
    "build",
    "build_all",
    "check_buildable",
    "find",
    "find_toolchain",
    "load",
    "surroundings",
]
