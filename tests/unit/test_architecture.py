"""The list of modules in the docs says what their docstrings say."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_architecture_page_lists_every_module_once_with_its_own_sentence():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("- `")]
    expected = []
    for path in (ROOT / "sennit").rglob("*.py"):
        if path.name != "__init__.py":
            sentence = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            expected.append(f"- `{path.relative_to(ROOT / 'sennit')}`: {sentence}")
    assert sorted(listed) == sorted(expected)
