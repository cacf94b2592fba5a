"""Score and mask functions as Triton's: printed alike where they are equal, kept in files, and given their captures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sennit
from sennit import variants
from sennit.errors import BuildUnavailable
from sennit.variants import trace

pytest.importorskip("triton")
from sennit.backends.gpus import functions, printing

SPEC = sennit.AttentionSpec(num_qo_heads=3, num_kv_heads=3, head_dim=8, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where files are written, with no function loaded."""
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(tmp_path))
    for cached in (functions._printed, functions._loaded):
        cached.cache_clear()
    yield tmp_path / "functions"
    for cached in (functions._printed, functions._loaded):
        cached.cache_clear()


def biased(name: str = "function", factor: float = 2.0):
    slopes = torch.zeros(3)

    def function(score, b, h, q_idx, kv_idx):
        return score * factor + slopes[h]

    function.__name__ = name
    return function


def test_equal_functions_are_printed_alike_and_their_names_nowhere():
    def printed(name: str) -> str:
        graph = trace(biased(name), "score")
        return printing.print_function(graph, trace(variants.causal, "mask"), graph.captures)

    assert printed('"""\nfirst') == printed("second")
    assert "slopes" not in printed("first")


def test_equal_functions_are_one_object_and_others_are_not(folder):
    one = functions.graph_function(SPEC.replace(score_mod=biased()))
    assert functions.graph_function(SPEC.replace(score_mod=biased("other"), head_dim=16)) is one
    assert functions.graph_function(SPEC.replace(score_mod=biased(factor=3.0))) is not one
    assert functions.graph_function(SPEC) is None
    assert len(list(folder.iterdir())) == 2


def test_a_file_that_holds_something_else_is_written_anew(folder):
    spec = SPEC.replace(score_mod=biased())
    functions.graph_function(spec)
    [path] = folder.iterdir()
    text = path.read_text()
    path.write_text("raise SystemExit")
    functions._loaded.cache_clear()
    functions._printed.cache_clear()
    functions.graph_function(spec)
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written_is_an_error_that_says_what_to_do(folder):
    folder.write_text("a file in its place")
    with pytest.raises(BuildUnavailable, match="SENNIT_CACHE_DIR"):
        functions.graph_function(SPEC.replace(score_mod=biased()))


@pytest.mark.slow
def test_processes_that_print_the_same_at_the_same_time_leave_one_whole_file(folder):
    script = (
        "import sennit, torch\n"
        "from sennit.backends.gpus.functions import graph_function\n"
        "spec = sennit.AttentionSpec(num_qo_heads=3, num_kv_heads=3, head_dim=8, dtype=torch.float32,\n"
        "                            mask_mod=sennit.variants.causal)\n"
        "print(graph_function(spec).fn.__code__.co_filename)\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in started}
    assert [Path(path).parent for path in paths] == [folder]
    assert [str(path) for path in folder.iterdir()] == list(paths)


def test_captures_are_given_with_sizes_and_strides_that_triton_does_not_specialise():
    table, flags = torch.zeros(32, 16, dtype=torch.bfloat16).T, torch.tensor(True)

    def function(score, b, h, q_idx, kv_idx):
        return torch.where(flags, score * table[h, kv_idx], score)

    spec = SPEC.replace(score_mod=function)
    flag, tensor, *numbers = functions.capture_arguments(spec, {"table": table, "flags": flags})
    assert (flag.dtype, flag.data_ptr(), tensor.dtype, tensor.data_ptr()) == (
        torch.uint8, flags.data_ptr(), torch.int16, table.data_ptr(),
    )  # fmt: skip
    assert [(number >> 1) - 2**32 for number in numbers] == [16, 1, 32, 16]
    assert all(number % 2 and number.bit_length() > 32 for number in numbers)  # no 1, no multiple of 16, always 64 bits
