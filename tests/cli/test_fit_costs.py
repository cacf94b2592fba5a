"""``benchmarks/fit_costs.py``: what it prints, and where it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sennit.bench.items import BELOW_ZERO

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fit_costs.py"


def fit_costs(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_times_are_printed_and_written_and_a_pipe_has_no_progress_in_it(tmp_path):
    path = tmp_path / "times.json"
    result = fit_costs("--backend", "reference-items", "--small", "--out", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "key step" in result.stdout
    assert "narrow: item and head, key step, partial result cannot be told: 0 of the 8 items needed" in result.stdout
    kinds = {fit["kind"]: fit["strands"] for fit in json.loads(path.read_text())["fits"]}
    assert set(kinds) == {"wide", "narrow", "both"}
    for strand in (kinds["wide"]["wide"], *kinds["both"].values()):  # on a busy machine anything may fit best
        assert strand["measured_us"]["key step"] or strand["untold"]["key step"] == BELOW_ZERO
    assert kinds["wide"]["narrow"]["untold"]["key step"] == "0 of the 8 items needed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "hopper", "--out", "/no/such/folder/file.json"], "--out: expected a file in an existing folder"),
        (["--backend", "reference", "--small"], "reference-items has"),
        (["--backend", "nobody", "--small"], "error: --backend: expected "),
        (["--backend", "hopper", "--out", "times.json/"], "--out: expected a file, got the folder times.json/"),
    ],
)
def test_mistakes_end_it_with_a_line(arguments, words):
    result = fit_costs(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
