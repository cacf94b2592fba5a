"""The pages of the documentation show what happens: their Python runs as it stands, and prints what they say."""

from __future__ import annotations

import doctest
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITH_EXAMPLES = {"cache.md", "huggingface.md", "masks.md"}


def blocks(text: str) -> list[tuple[str, str, int]]:
    """Kind, text and first line (from 0) of every block of Python, in order."""
    return [(found[1], found[2], text.count("\n", 0, found.start(2))) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md")))
def test_examples_of_a_page_run_in_order_and_print_what_it_says(name):
    page = DOCS / name
    namespace: dict[str, object] = {"__name__": "__main__"}
    runner, report = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), io.StringIO()
    found = blocks(page.read_text())
    for kind, text, line in found:
        if kind == "python":
            exec(compile("\n" * line + text, str(page), "exec"), namespace)
        else:
            test = doctest.DocTestParser().get_doctest(text, {}, name, str(page), line)
            test.globs = namespace
            runner.run(test, out=report.write, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()
    assert bool(found) == (name in WITH_EXAMPLES)
