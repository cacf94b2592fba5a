"""The examples in docstrings run, and public things have examples."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "sennit").rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings_run_as_they_stand(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_entries_of_every_level_have_examples():
    assert {"sennit.spec", "sennit.plan.batch", "sennit.attention", "sennit.states", "sennit.kvcache"} <= set(NAMES)
