"""Fixtures of the tests of ``sennit.jit``: an empty cache, and a compiler that does as it is told."""

from __future__ import annotations

import pytest
from tiny_libraries import Compiler


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """The library folder of an empty cache of this test's own; it does not exist yet."""
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "SENNIT_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "libraries"


@pytest.fixture
def compiler(tmp_path, monkeypatch, libraries):
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made
