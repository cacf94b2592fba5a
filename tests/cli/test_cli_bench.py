"""``sennit bench plan``: only right plans are timed, and the statistics are those of the times."""

from __future__ import annotations

import dataclasses
import gc
import json

import numpy as np
import pytest
import torch

from sennit.bench import planning
from sennit.errors import InvalidInput, SennitError
from sennit.plan.batch import Batch
from sennit.plan.example import example_config
from sennit.plan.schedule import Item
from sennit.plan.tensors import Extents, Layout, PlanArrays, write_header


def make(text, config=None):
    return planning._plan(Batch.parse(text, page_size=16), config or example_config())


@pytest.mark.parametrize("combine", ["sum", "max"])
@pytest.mark.parametrize("text", [*planning.WORKLOADS, "", "0@5 + 3@0 + 9@4", "700@700 + 0@0 + 33*5@131"])
def test_plans_of_all_workloads_cover_their_batches(text, combine):
    planning.check_coverage(make(text, example_config(combine=combine)))


def change(plan, items):
    """The plan with other items, in the array that kernels read."""
    layout = Layout(len(plan.segments), len(items), 0, len(plan.config.strands), plan.config.num_workers, 0, 0)
    array = np.zeros(layout.offsets[-1], np.int32)
    extents = Extents(0, plan.num_rows, plan.batch.num_tokens, 0, 0, 0)
    write_header(array, layout, extents, (len(plan.segments), len(items), 0, 0))
    _, items_at, workers_at, *_ = layout.offsets
    array[items_at : items_at + items.size] = items.ravel()
    indptr = arrays(plan).worker_indptr.copy()
    indptr[-1, -1] = len(items)
    array[workers_at : workers_at + indptr.size] = indptr.ravel()
    return dataclasses.replace(plan, tensors=dataclasses.replace(plan.tensors, host=torch.from_numpy(array)))


def arrays(plan):
    return PlanArrays(plan.tensors.host.numpy())


def _drop(items):
    return np.delete(items, 3, axis=0)


def _twice(items):
    return np.concatenate([items, items[3:4]])


def _shorten(items):
    items[3, Item.KEY_END] -= 1
    return items


def _gap(items):
    at = int((items[:, Item.KEY_START] > 0).argmax())
    items[at, Item.KEY_START] += 64
    return items


def _head(items):
    items[3, Item.HEAD_START] += 1
    return items


@pytest.mark.parametrize("fault", [_drop, _twice, _shorten, _gap, _head])
def test_a_plan_that_misses_or_repeats_work_is_refused(fault):
    plan = make("300@1000 + 5*1@4000")
    with pytest.raises(SennitError, match="a bug in Sennit"):
        planning.check_coverage(change(plan, fault(arrays(plan).items.copy())))


def test_a_segment_that_no_strand_has_is_noticed():
    plan, other = make("1@50 + 1@60"), make("1@50")
    with pytest.raises(SennitError, match="a bug in Sennit"):
        planning.check_coverage(dataclasses.replace(plan, tensors=other.tensors))


def test_statistics_are_of_the_times_between_start_and_end(monkeypatch):
    clock = iter([tick for time in (5, 1, 3, 2, 4) for tick in (0, time * 1000)])
    monkeypatch.setattr(planning.time, "perf_counter_ns", lambda: next(clock))
    found = planning.measure("1@9", repeat=5, warmup=0)
    assert (found.minimum, found.lower_quartile, found.median, found.upper_quartile) == (1, 2, 3, 4)


def test_nothing_is_collected_while_plans_are_timed(monkeypatch):
    seen = []
    make_plan = planning.make_plan
    monkeypatch.setattr(planning, "make_plan", lambda *a, **k: seen.append(gc.isenabled()) or make_plan(*a, **k))
    planning.measure("1@9", repeat=4, warmup=2)
    assert seen == [True] + [False] * 6
    assert gc.isenabled()


def test_a_wrong_plan_is_not_timed(sennit, monkeypatch):
    make_plan = planning.make_plan

    def wrong(*arguments, **options):
        plan = make_plan(*arguments, **options)
        return change(plan, _drop(arrays(plan).items))

    monkeypatch.setattr(planning, "make_plan", wrong)
    result = sennit("bench", "plan", "9*1@500", "--repeat", "1")
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("repeat", [0, -1])
def test_a_count_that_is_not_positive_is_refused(repeat):
    with pytest.raises(InvalidInput, match="repeat"):
        planning.measure("1@9", repeat=repeat)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_every_workload_and_says_which_figures_are_from_elsewhere(sennit, width):
    result = sennit("bench", "plan", "--repeat", "1", width=width)
    assert result.exit_code == 0
    rows = {text: line for text in planning.WORKLOADS for line in result.stdout.splitlines() if line.startswith(text)}
    assert set(rows) == set(planning.WORKLOADS)
    for text, figure in planning.FLASHINFER_MICROSECONDS.items():
        assert str(int(figure)) in rows[text].split()
    assert "not in this run" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= width


def test_json_and_the_file_have_one_object_a_batch(sennit, tmp_path):
    path = tmp_path / "planning.json"
    result = sennit("bench", "plan", "3@9", "128*1@8192", "--repeat", "2", "--json", "--out", str(path))
    record = json.loads(result.stdout)
    assert record == json.loads(path.read_text())
    assert record["planner"] in ("compiled", "NumPy")
    assert {"cpu", "processors"} <= set(record["hardware"])
    first, second = record["batches"]
    assert (first["batch"], first["repeat"], first["flashinfer"]) == ("3@9", 2, None)
    assert (second["batch"], second["flashinfer"]) == ("128*1@8192", 157.0)


def test_all_batches_are_checked_before_any_is_measured(sennit, monkeypatch):
    monkeypatch.setattr(planning, "measure", lambda *arguments, **options: pytest.fail("measured"))
    for last in ("3@", f"{2**31 - 1}@{2**31 - 1}"):
        result = sennit("bench", "plan", "2*1@9", last)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: batch: expected ")
