"""Times of items that are measured give the times of a configuration back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sennit.bench.items import ItemTimes, compared_times
from sennit.bench.planning import item_counts, item_strands, strand_times
from sennit.plan.batch import Batch
from sennit.plan.cost import KernelConfig, Strand
from sennit.plan.plan import make_plan
from sennit.spec import AttentionSpec

SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
CONFIG = KernelConfig(
    "two",
    (
        Strand("wide", 64, 32, item_time=4.0, compute_time=8.0, memory_time=2.0, split_time=2.0),
        Strand("narrow", 16, 32, item_time=2.0, compute_time=2.0, memory_time=3.0, split_time=1.0),
    ),
    24,
    "max",
)


def plan_of(text):
    return make_plan(
        Batch.parse(text, page_size=16), spec=SPEC, owner="test", backend="none", configs=(CONFIG,), page_size=16,
        device=torch.device("cpu"),
    )  # fmt: skip


def times_of(plan, per_strand):
    """Items that take exactly what ``per_strand [strands, 3]`` says, each from zero."""
    durations = (per_strand[item_strands(plan)].T * item_counts(plan)).sum(axis=0)
    return ItemTimes(plan, np.zeros_like(durations), durations)


def measured_times(found):
    return [list(strand["measured_us"].values()) for strand in compared_times(found).values()]


def test_items_planned_for_a_configuration_cost_what_it_says():
    plan = plan_of("300@900 + 70*1@1700")
    times = times_of(plan, strand_times(CONFIG))
    assert times.loads == pytest.approx(plan.schedule.loads)
    assert times.makespan == times.end.max()


def test_times_are_told_from_several_plans():
    true = np.array([[5.0, 1.5, 8.0], [1.25, 0.75, 0.5]])
    found = [times_of(plan_of(text), true) for text in ("300@900 + 70*1@1700", "900@900 + 10*1@5000")]
    assert np.array(measured_times(found)) == pytest.approx(true)


def test_what_cannot_be_told_is_none():
    found = times_of(plan_of("30*1@64"), strand_times(CONFIG))
    assert measured_times([found]) == [[None] * 3, [None] * 3]


def test_a_time_that_fits_best_below_zero_is_not_told():
    true = np.array([[-5.0, 1.5, 8.0], [1.25, 0.75, 0.5]])
    found = [times_of(plan_of(text), true) for text in ("300@900 + 70*1@1700", "900@900 + 10*1@5000")]
    wide, narrow = compared_times(found).values()
    assert wide["measured_us"].pop("item and head") is None
    assert wide["untold"] == {"item and head": "what fits best is below zero"}
    assert list(wide["measured_us"].values()) == pytest.approx([1.5, 8.0])
    assert narrow["untold"] == {}
