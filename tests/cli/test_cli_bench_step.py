"""``sennit bench step``: what it prints and writes."""

from __future__ import annotations

import json

import pytest

from sennit.bench import stepping


@pytest.fixture
def bench(sennit, monkeypatch):
    monkeypatch.setattr(stepping, "SPEC", stepping.SPEC.replace(num_qo_heads=4, num_kv_heads=2, head_dim=16))
    monkeypatch.setattr(stepping, "WORKLOADS", ("2*1@9", "5@7 + 1@9"))
    return lambda *arguments, **options: sennit(
        "bench", "step", "--backend", "reference", "--repeat", "2", *arguments, **options
    )


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_every_part_of_every_batch(bench, width):
    result = bench(width=width)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for text in ("reference on cpu", "2*1@9", "5@7 + 1@9", "plan included", "attend", "end the step", "float64"):
        assert text in words
    assert max(map(len, result.stdout.splitlines())) <= width


def test_json_and_the_file_have_all_samples(bench, tmp_path):
    path = tmp_path / "steps.json"
    record = json.loads(bench("3*1@9", "--json", "--out", str(path)).stdout)
    assert record == json.loads(path.read_text())
    (found,) = record["batches"]
    assert (found["batch"], found["backend"], record["repeat"]) == ("3*1@9", "reference", 2)
    assert [len(found[part]["samples"]) for part in ("step", "attend", "run", "end")] == [2, 8, 2, 2]
    assert found["check"]["error"] <= found["check"]["allowed"]


@pytest.mark.parametrize(
    ("batch", "words"), [("", "at least one request, got ''"), ("3@3 + 0@0", "got 0@0 in '3@3 + 0@0'")]
)
def test_a_batch_that_no_cache_can_have_is_refused_with_what_is_wrong_in_it(bench, batch, words):
    result = bench(batch)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize("arguments", [["3@2"], ["--device", "tpu"], ["--out", "/no/such/folder/file.json"]])
def test_mistakes_end_it_with_a_word(bench, arguments):
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected" in result.stderr


def test_all_batches_are_checked_before_any_is_measured(bench, monkeypatch):
    monkeypatch.setattr(stepping, "measure", lambda *arguments, **options: pytest.fail("measured"))
    for last in ("", "3@2", f"1@{2**31 - 1}"):
        result = bench("2*1@9", last)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: batch: expected ")
