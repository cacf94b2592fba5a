"""The compiled planner writes, word for word, what the planner in NumPy does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sennit.errors import BuildFailed, BuildUnavailable
from sennit.jit import building
from sennit.plan import work
from sennit.plan.batch import Batch
from sennit.plan.cost import KernelConfig, Strand
from sennit.plan.plan import make_plan
from sennit.plan.segments import Segments, Window
from sennit.plan.tensors import Layout
from sennit.spec import AttentionSpec

GROUPS = 20
UNWRITTEN = -7


def random_strand(rng, name, heads, may_be_dealt):
    times = rng.choice([0.1, 0.5, 1.0, 2.0, 3.7, 14.0], 4).tolist()
    workers = int(rng.integers(1, 200)) if rng.random() < 0.5 else None
    rows, step = int(rng.choice([8, 16, 64, 128])), int(rng.choice([16, 32, 64, 128]))
    row_step = int(rng.choice([1, 4, rows])) if rng.random() < 0.5 else None
    haste = float(rng.choice([1.0, 1.7]))
    more = {"workers": workers, "haste": haste, "row_step": row_step, "heads": heads}
    dealt = float(rng.choice([0, 0, 1.0, 1.1, 2.0])) if may_be_dealt else 0.0
    return Strand(name, rows, step, *times, **more, dealt=dealt)


def random_config(rng, num_kv_heads):
    heads = [n for n in (1, 2, 8) if num_kv_heads % n == 0]
    names = ("wide", "narrow")[: int(rng.choice([1, 2, 2]))]
    combine = str(rng.choice(work.COMBINES))
    may_be_dealt = combine != "sum" or len(names) == 1
    strands = tuple(random_strand(rng, name, int(rng.choice(heads)), may_be_dealt) for name in names)
    workers = max([int(rng.choice([1, 2, 3, 7, 132, 264])), *(strand.workers or 1 for strand in strands)])
    return KernelConfig("random", strands, workers, combine)


def random_window(rng):
    left = None if rng.random() < 0.3 else int(rng.choice([0, 5, 100, 3000]))
    right = None if rng.random() < 0.5 else int(rng.choice([0, 2, 50]))
    return None if left is right is None else Window(left, right, int(rng.choice([0, 1, 4, 70])))


def random_segments(rng):
    count = int(rng.choice([0, 1, 2, 5, 30, 130]))
    q_len = rng.choice([1, 5, 2000, 5000] if rng.random() < 0.3 else [0, 1, 1, 1, 4, 7, 33, 300], count)
    kv_len = np.where(rng.random(count) < 0.1, 0, q_len + rng.integers(0, int(rng.choice([3, 200, 9000])), count))
    none = np.zeros(count, np.int64)
    trees = rng.random() < 0.2
    tree_len = np.where(rng.random(count) < 0.3, np.minimum(q_len, kv_len), 0) if trees else none
    causal = ((rng.random(count) < 0.8) | (tree_len > 0)).astype(np.int64)
    return Segments(
        request=np.arange(count),
        q_start=q_len.cumsum() - q_len,
        q_len=q_len,
        kv_start=kv_len.cumsum() - kv_len,
        kv_len=kv_len,
        key_offset=none,
        causal=causal,
        tree_len=tree_len,
        tree_at=none,
        mask_at=none - 1,
        trees=[None] * count if trees else (),
        window=random_window(rng) if rng.random() < 0.5 else None,
        inexact=bool(rng.random() < 0.15),
    )


def random_cutting(rng):
    return work.Cutting(
        group_size=int(rng.choice([1, 2, 4, 7, 16])),
        num_kv_heads=int(rng.choice([1, 2, 8])),
        page_size=[None, 1, 16, 7][int(rng.integers(4))],
        split_size=int(rng.choice([32, 100, 1024])) if rng.random() < 0.3 else None,
        alone=bool(rng.random() < 0.2),
    )


def random_case(rng, num_configs):
    cutting = random_cutting(rng)
    return random_segments(rng), [random_config(rng, cutting.num_kv_heads) for _ in range(num_configs)], cutting


def written(function, segments, configs, cutting):
    """The work, and the array from behind its header."""
    found, write = function(segments, configs, cutting)
    strands, workers = len(found.config.strands), found.config.num_workers
    layout = Layout(len(segments), found.num_items, found.num_merges, strands, workers, 0, 0)
    array = np.full(layout.offsets[-1], UNWRITTEN, np.int32)
    write(array, layout)
    return found, array[layout.offsets[0] :]


@pytest.mark.compiler
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_segments_and_configurations_give_the_same_words(group):
    assert work.planner() is not None
    for seed in range(10 * group, 10 * group + 10):
        rng = np.random.default_rng(seed)
        case = random_case(rng, int(rng.integers(1, 4)))
        found, array = written(work.make_work, *case)
        expected, words = written(work.make_work_in_numpy, *case)
        assert found == expected, seed
        assert (array == words).all(), seed
        assert not (array == UNWRITTEN).any()


def plan_something():
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    wide = Strand("wide", 8, 4, 1.0, 2.0, 1.0, 0.5)
    return make_plan(
        Batch.parse("9@40 + 3*1@90", page_size=4), spec=spec, owner="test", backend="none",
        configs=(KernelConfig("one", (wide,), 3),), page_size=4, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.compiler
def test_without_a_compiler_numpy_plans_the_same(monkeypatch):
    compiled = plan_something().tensors.host
    monkeypatch.setattr(work, "planner", lambda: None)
    assert torch.equal(plan_something().tensors.host, compiled)


def raising(error):
    def load(source):
        raise error

    return load


def test_a_planner_that_cannot_be_built_is_done_without_and_one_that_should_have_been_is_told(monkeypatch, recwarn):
    monkeypatch.setattr("sennit.jit.load", raising(BuildUnavailable("no compiler")))
    assert work.planner.__wrapped__() is None
    assert not recwarn
    monkeypatch.setattr("sennit.jit.load", raising(BuildFailed("error: line 1")))
    with pytest.warns(UserWarning, match="error: line 1"):
        assert work.planner.__wrapped__() is None


def test_too_little_memory_is_an_error_with_what_to_do(monkeypatch):
    monkeypatch.setattr(work, "planner", lambda: SimpleNamespace(plan=lambda *_: 1))
    with pytest.raises(MemoryError, match="larger split_size"):
        plan_something()


@pytest.mark.compiler
def test_what_is_planned_between_planning_and_writing_changes_nothing():
    rng = np.random.default_rng(3)
    one, other = (random_case(rng, 1) for _ in range(2))
    expected = written(work.make_work_in_numpy, *one)[1]
    found, write = work.make_work(*one)
    work.make_work(*other)  # as a signal's handler may, which runs at any time
    written(work.make_work, *other)
    layout = Layout(
        len(one[0]), found.num_items, found.num_merges, len(found.config.strands), found.config.num_workers, 0, 0
    )
    array = np.full(layout.offsets[-1], UNWRITTEN, np.int32)
    write(array, layout)
    assert (array[layout.offsets[0] :] == expected).all()


def test_every_word_of_a_plan_is_written():
    first = plan_something().tensors.host
    spoilt = [np.full(first.numel(), 77, np.int32) for _ in range(50)]  # whose memory the next plan may get
    del spoilt
    assert torch.equal(plan_something().tensors.host, first)


@pytest.mark.compiler
def test_a_users_flags_come_before_those_that_keep_plans_the_same(monkeypatch):
    monkeypatch.setenv("SENNIT_CXXFLAGS", "-Ofast -ffp-contract=fast")
    assert building._job(work.planner_source()).flags[-4:] == (
        "-Ofast", "-ffp-contract=fast", "-fno-fast-math", "-ffp-contract=off",
    )  # fmt: skip
