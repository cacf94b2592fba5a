"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)


def test_the_readme_has_an_example_for_each_level_and_one_of_a_spec():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("index", [1, 2, 3])
def test_examples_that_need_no_model_run(index, capsys):
    exec(compile(BLOCKS[index], f"README.md block {index}", "exec"), {})


@pytest.mark.slow
@pytest.mark.model
def test_the_hugging_face_example_prints_text(capsys):
    exec(compile(BLOCKS[0], "README.md block 0", "exec"), {})
    lines = capsys.readouterr().out.split()
    assert len(lines) > 10
