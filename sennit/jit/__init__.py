"""C++ source text to compiled, cached and loaded libraries."""

from __future__ import annotations

from sennit.jit.building import build, build_all
from sennit.jit.loading import load
from sennit.jit.source import Source
from sennit.jit.toolchain import Toolchain, find_toolchain

__all__ = ["Source", "Toolchain", "build", "build_all", "find_toolchain", "load"]
