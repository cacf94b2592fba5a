"""The planner: every key of every row is computed once, workers finish together, and fixed splits stay fixed."""

from __future__ import annotations

import itertools
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch

from sennit.backends.hopper.configs import kernel_configs as hopper_configs
from sennit.check.oracle import token_positions
from sennit.errors import InvalidInput
from sennit.plan import work
from sennit.plan.batch import Batch
from sennit.plan.cost import KernelConfig, Strand, place, share_workers
from sennit.plan.plan import make_plan
from sennit.plan.schedule import Item, Merge
from sennit.plan.segments import from_batch
from sennit.plan.tensors import PlanArrays
from sennit.plan.tree import Tree
from sennit.spec import AttentionSpec

GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
WIDE = Strand("wide", 128, 128, item_time=1.0, compute_time=1.85, memory_time=2.06, split_time=1.0)
NARROW = Strand("narrow", 16, 64, item_time=0.5, compute_time=0.4, memory_time=1.03, split_time=0.4)
HALF = replace(WIDE, workers=66)  # half as many workers, of an SM each
CONFIGS = [
    *(KernelConfig(f"both-{combine}", (WIDE, NARROW), 132, combine) for combine in ("sum", "max")),
    *(KernelConfig(f"both-{combine}", (HALF, NARROW), 132, combine) for combine in ("turns", "apart")),
    KernelConfig("dealt", (replace(WIDE, dealt=1.1), replace(NARROW, dealt=1.0)), 132, "max"),
]
SMALL_STRANDS = (
    Strand("wide", 8, 4, 1.0, 2.0, 1.0, 0.5, row_step=2),
    Strand("narrow", 4, 4, 0.5, 0.4, 1.03, 0.4, heads=2),
)
SMALL = {
    "sum": KernelConfig("small", SMALL_STRANDS, 7, "sum"),
    "max": KernelConfig("small", SMALL_STRANDS, 7, "max"),
    "turns": KernelConfig("small", (replace(SMALL_STRANDS[0], workers=3), SMALL_STRANDS[1]), 7, "turns"),
    "apart": KernelConfig("small", (replace(SMALL_STRANDS[0], workers=4), SMALL_STRANDS[1]), 8, "apart"),
    "dealt": KernelConfig("small", tuple(replace(strand, dealt=1.1) for strand in SMALL_STRANDS), 7, "max"),
}


def plan_of(text, config, spec=GQA, page_size=16, **options):
    return make_plan(
        Batch.parse(text, page_size=page_size), spec=spec, owner="test", backend="none", configs=(config,),
        page_size=page_size, device=torch.device("cpu"), **options,
    )  # fmt: skip


def imbalance(plan):
    return float(plan.loads.max() / plan.loads.mean())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "text",
    [
        "34*1@8192",
        "127*1@1024 + 1@131072",
        "2048@2048 + 128*1@2048",
        "128*1@8192",
        "4096@8192 + 128*1@8192",
        "4096*1@256",
        "67*1@8192",
        "1@131072",
        "8192@8192",
        "8*2048@2048 + 512@512",
        "64*4@4096",
        "300*1@700 + 17@90000",
    ],
)
def test_workers_finish_within_five_percent_of_each_other(text, config):
    plan = plan_of(text, config)
    assert plan.schedule.num_items >= 132
    assert imbalance(plan) <= 1.05


def random_text(rng):
    def request():
        kv_len = int(rng.choice([0, 1, rng.integers(1, 60)]))
        q_len = int(rng.choice([0, 1, 1, rng.integers(0, kv_len + 3)]))
        return f"{q_len}@{kv_len}"

    return " + ".join(request() for _ in range(rng.integers(0, 9)))


WINDOWS = {
    "plain": {},
    "window": {"window_left": 5},
    "sinks": {"window_left": 6, "num_sink_tokens": 5},
    "both-sides": {"window_left": 3, "window_right": 2, "num_sink_tokens": 2},
    "right": {"window_right": 3},
}


def visible_pairs(q_len, kv_len, *, causal=True, parents=None, window_left=None, window_right=None, num_sink_tokens=0):
    """bool [q_len, kv_len]: what each row sees, from the definition."""
    rows, keys = (t.numpy() for t in token_positions(q_len, kv_len, parents))
    seen = visible(q_len, kv_len, causal, parents)
    distance = rows[:, None] - keys
    near = np.ones_like(seen)
    if window_left is not None:
        near &= distance <= window_left
    if window_right is not None:
        near &= distance >= -window_right
    return seen & (near | (keys < num_sink_tokens))


def visible(q_len, kv_len, causal, parents):
    if parents is None:
        row = kv_len - q_len + np.arange(q_len)[:, None]
        return (np.arange(kv_len) <= row) | (not causal)
    seen = np.zeros((q_len, kv_len), bool)
    first = kv_len - len(parents)
    for i in range(q_len):
        node = len(parents) - q_len + i
        seen[i, :first] = True
        while node >= 0:
            seen[i, first + node], node = True, parents[node]
    return seen


def random_parents(rng, q_len, kv_len):
    if q_len > kv_len or rng.random() < 0.4:
        return None
    return [int(rng.integers(-1, node)) for node in range(int(rng.integers(q_len, min(kv_len, q_len + 9) + 1)))]


@pytest.mark.parametrize("combine", SMALL)
@pytest.mark.parametrize("split_size", [None, 4, 10])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("trees", [False, True])
def test_every_row_head_and_visible_key_is_computed_once_and_hidden_ranges_never(combine, split_size, window, trees):
    rng = np.random.default_rng(3)
    config = SMALL[combine]
    spec = AttentionSpec(num_qo_heads=6, num_kv_heads=2, head_dim=8, dtype=torch.float32, **WINDOWS[window])
    for page_size in [4, 3, 16, 1, 5] * 8:
        text = random_text(rng)
        lengths = Batch.parse(text, page_size=page_size)
        pairs = list(zip(lengths.q_lens.tolist(), lengths.kv_lens.tolist(), strict=True))
        parents = [random_parents(rng, *pair) if trees else None for pair in pairs]
        causal = [bool(rng.random() < 0.7) or bool(nodes) for nodes in parents]
        plan = plan_of(
            text, config, spec, page_size=page_size, split_size=split_size, causal=causal,
            tree=[None if nodes is None else Tree(nodes) for nodes in parents] if trees else None,
        )  # fmt: skip
        count = [np.zeros((2, q * 3, k), int) for q, k in pairs]
        seen = [
            visible_pairs(*pair, causal=flag, parents=nodes, **WINDOWS[window])
            for pair, flag, nodes in zip(pairs, causal, parents, strict=True)
        ]
        written = [np.zeros((2, q * 3), int) for q, _ in pairs]
        partial_rows = np.zeros(plan.schedule.num_partial_rows, int)
        planned, parts_of = {}, {}
        for item in plan.schedule.items.T.tolist():
            r, row, rows, head, heads, first, last, partial, hole_start, hole_end, merge, *_ = item
            assert rows > 0
            assert heads > 0
            assert 0 <= first <= hole_start <= hole_end <= last <= pairs[r][1]
            keys = np.r_[first:hole_start, hole_end:last].astype(int)
            count[r][head : head + heads, row : row + rows, keys] += 1
            planned[r, row, rows, head] = planned.get((r, row, rows, head), 0) + len(keys)
            if len(keys) and window != "plain" and not trees:
                pages = np.unique(keys // page_size)
                reachable = visible_pairs(*pairs[r], causal=False, **{**WINDOWS[window], "window_right": None})
                assert (
                    reachable.any(axis=0)[
                        np.minimum(pages[:, None] * page_size + np.arange(page_size), pairs[r][1] - 1)
                    ]
                    .any(axis=1)
                    .all()
                )
            if partial < 0:
                written[r][head : head + heads, row : row + rows] += 1
            else:
                partial_rows[partial : partial + heads * rows] += 1
                for h in range(heads):
                    parts_of.setdefault(merge + h, set()).add((r, row, rows, head + h, partial + h * rows))
        read_rows = np.zeros_like(partial_rows)
        for index, (r, row, rows, head, first, parts, stride, *_) in enumerate(plan.schedule.merges.T.tolist()):
            assert parts > 1
            assert parts_of[index] == {(r, row, rows, head, first + part * stride) for part in range(parts)}
            written[r][head, row : row + rows] += 1
            for part in range(parts):
                read_rows[first + part * stride : first + part * stride + rows] += 1
        for r, sees in enumerate(seen):
            assert (count[r][:, sees.repeat(3, axis=0)] == 1).all()
            assert count[r].max(initial=0) <= 1
            assert (written[r] == 1).all()
        for (r, row, rows, _), keys in planned.items():
            useful = seen[r][row // 3 : -(-(row + rows) // 3)].any(axis=0).sum()
            slack = 4 * 3 + (split_size or 0) + 2 * len(parents[r] or ())
            assert keys <= useful + slack, (text, page_size)
        assert (partial_rows == 1).all()
        assert (read_rows == 1).all()


@pytest.mark.parametrize("combine", SMALL)
@pytest.mark.parametrize("window", WINDOWS)
def test_workers_take_all_items_and_their_predicted_loads_are_the_time_of_their_items(combine, window):
    rng = np.random.default_rng(4)
    config = SMALL[combine]
    spec = AttentionSpec(num_qo_heads=6, num_kv_heads=2, head_dim=8, dtype=torch.float32, **WINDOWS[window])
    for _ in range(100):
        plan = plan_of(random_text(rng), config, spec, page_size=4)
        indptr = plan.schedule.worker_indptr
        assert indptr[0, 0] == 0
        assert indptr[-1, -1] == plan.schedule.num_items
        assert (np.diff(indptr.ravel()) >= 0).all()
        for s, strand in enumerate(config.strands):
            for worker in range(7):
                items = plan.schedule.items[:, indptr[s, worker] : indptr[s, worker + 1]]
                steps = -(-(items[Item.HOLE_START] - items[Item.KEY_START]) // strand.key_step)
                steps = np.maximum(steps - (items[Item.HOLE_END] - items[Item.KEY_END]) // strand.key_step, 1)
                step_times = config.step_times(np.full(len(steps), s), items[Item.NUM_ROWS])
                times = items[Item.NUM_HEADS] * (strand.item_time + steps * step_times)
                times = times + items[Item.NUM_HEADS] * strand.split_time * (items[Item.PARTIAL_ROW] >= 0)
                assert plan.schedule.loads[s, worker] == pytest.approx(times.sum())


def best_makespan(heads, base, unit, split, workers):
    """Exhaustive search: every way to share the units of every head among workers."""
    loads = {(0.0,) * workers}
    for units in heads:
        shares = [s for s in itertools.product(range(units + 1), repeat=workers) if sum(s) == units]
        costs = [tuple((base + n * unit + (split if n < units else 0)) if n else 0.0 for n in s) for s in shares]
        loads = {
            tuple(sorted(round(a + b, 6) for a, b in zip(load, cost, strict=True))) for load in loads for cost in costs
        }
    return min(max(load) for load in loads)


def test_small_plans_are_within_ten_percent_of_the_best_assignment():
    rng = np.random.default_rng(5)
    spec = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    for _ in range(150):
        workers = int(rng.integers(2, 4))
        config = KernelConfig("one", (Strand("narrow", 4, 4, 0.5, 0.4, 1.03, 0.4),), workers)
        units = rng.integers(4, 11, int(rng.integers(1, 5 if workers == 2 else 4))).tolist()
        plan = plan_of(" + ".join(f"1@{4 * n}" for n in units), config, spec)
        best = best_makespan(units, 0.5, 1.03, 0.4, workers)
        assert plan.loads.max() <= 1.10 * best + 1e-9, (units, workers)


def items_of(plan, request):
    """The strand-independent description of one request's items and merges, without partial rows."""
    items = plan.schedule.items[:, plan.schedule.items[Item.SEGMENT] == request][[1, 2, 3, 4, 5, 6, 8, 9]]
    merges = plan.schedule.merges[:, plan.schedule.merges[Merge.SEGMENT] == request]
    heads = np.repeat(items, items[3], axis=1)  # one column a head
    first = np.concatenate([np.arange(n) for n in items[3]]) if items.size else np.empty(0, int)
    heads[2] += first
    heads[3] = 1
    return sorted(map(tuple, heads.T)), sorted(map(tuple, merges[[1, 2, 3, 5]].T))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_fixed_splits_of_a_request_do_not_depend_on_its_neighbours(config):
    alone = plan_of("70@3000 + 1@5000", config, split_size=512)
    among = plan_of("4096@8192 + 70@3000 + 1@5000 + 60*1@9000", config, split_size=512)
    for request in (0, 1):
        assert items_of(alone, request) == items_of(among, request + 1)


def test_side_by_side_strands_share_a_step_that_either_alone_would_slow():
    config = KernelConfig("two", (WIDE, NARROW), 4, "max")
    batch = Batch.parse("24*20@4096", page_size=16)
    segments = from_batch(batch, needed=batch.pages_needed(16), causal=True)
    strand, time = place(segments, 4, 8, config, alone=False)
    preferred, alone_time = place(segments, 4, 8, config, alone=True)
    assert time <= alone_time
    assert len(set(preferred.tolist())) == 1


def test_shares_of_the_device_are_rounded_to_whichever_ends_first():
    config = KernelConfig("apart", (HALF, NARROW), 132, "apart")
    # In halves of an SM 64.6 and 1.4: 65 and 1 would take 1.4 times as long as the rest, 64 and 2 as long.
    assert share_workers(config, np.array([64.6 * 66, 1.4 * 132])).tolist() == [64, 4]
    assert share_workers(config, np.array([1.4 * 66, 64.6 * 132])).tolist() == [2, 128]
    assert share_workers(config, np.array([33.2 * 66, 32.8 * 132])).tolist() == [33, 66]


def test_dealing_makes_no_step_more_than_a_tenth_longer():
    cut, dealt = CONFIGS[1], CONFIGS[-1]
    rng = np.random.default_rng(8)
    changed = 0
    for _ in range(60):
        requests = [(int(rng.choice([1, 200, 2000])), int(rng.integers(1, 9000))) for _ in range(rng.integers(1, 40))]
        text = " + ".join(f"{min(q, k)}@{k}" for q, k in requests)
        longest = [plan_of(text, config).loads.max() for config in (cut, dealt)]
        assert longest[1] <= 1.1 * longest[0] + 1e-9, text
        changed += longest[0] != longest[1]
    assert changed > 10


def test_strands_that_are_cut_together_cannot_be_dealt():
    with pytest.raises(InvalidInput, match=r"strands: expected no dealt strand .*, got \['wide'\]"):
        KernelConfig("both", (replace(WIDE, dealt=1.1), NARROW), 132, "sum")
    assert KernelConfig("one", (replace(WIDE, dealt=1.1),), 132, "sum").max_merges == 132


# Where workers deal whole tiles of a chunk, its keys are on the bus once; and rows that are moved to the other strand
# still need the cores that both share.
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("64*1@8192", ["narrow"]),
        ("64*4@4096", ["narrow"]),
        ("8192@8192", ["wide"]),
        ("4*2048@2048", ["wide"]),
        ("2048@16384 + 64*1@16384", ["wide", "narrow"]),
        ("2048@2048 + 128*1@2048", ["wide", "narrow"]),
    ],
)
def test_a_step_takes_the_form_of_the_hopper_kernel_that_has_the_strands_it_needs(text, kinds):
    plan = make_plan(
        Batch.parse(text, page_size=16), spec=GQA, owner="test", backend="none", configs=hopper_configs(GQA, 132),
        page_size=16, device=torch.device("cpu"),
    )  # fmt: skip
    config = plan.schedule.line.config
    assert [strand.name for strand in config.strands] == kinds
    if len(kinds) == 2:
        prefills = plan.batch.q_lens >= 128
        assert (prefills[plan.schedule.line.segment] == (plan.schedule.line.strand == 0)).all()


@pytest.mark.parametrize("workers", [1, 4])
def test_one_strand_that_could_share_the_device_has_all_of_it(workers):
    config = KernelConfig("one", (replace(WIDE, workers=workers),), workers, "apart")
    plan = plan_of("256@256", config)
    assert (plan.loads > 0).sum() == workers


def test_the_tensor_form_reads_back_as_the_plan():
    plan = plan_of("9@40 + 3*1@900", CONFIGS[0])
    arrays = PlanArrays(plan.tensors.host.numpy())
    assert (arrays.items == plan.schedule.items.T).all()
    assert (arrays.merges == plan.schedule.merges.T).all()
    assert (arrays.worker_indptr == plan.schedule.worker_indptr).all()
    assert arrays.segments[:, 1].tolist() == plan.batch.q_starts.tolist()
    assert arrays.segments[:, 4].tolist() == plan.batch.kv_lens.tolist()


@pytest.mark.parametrize("window", WINDOWS)
def test_fixed_splits_are_refused_from_exactly_one_chunk_too_many_on(monkeypatch, window):
    rng = np.random.default_rng(5)
    spec = AttentionSpec(num_qo_heads=6, num_kv_heads=2, head_dim=8, dtype=torch.float32, **WINDOWS[window])
    for _ in range(20):
        text = random_text(rng)
        chunks = len(plan_of(text, SMALL["max"], spec, split_size=4).schedule.line)
        monkeypatch.setattr(work, "MOST_CHUNKS", chunks)
        plan_of(text, SMALL["max"], spec, split_size=4)
        if chunks:
            monkeypatch.setattr(work, "MOST_CHUNKS", chunks - 1)
            with pytest.raises(InvalidInput, match=r"^split_size: expected at most \d+ work items, got "):
                plan_of(text, SMALL["max"], spec, split_size=4)
        monkeypatch.undo()


@pytest.mark.parametrize("shape", [(1, 2**31 - 1), (2**28, 2**31 - 1), (2**28, 1)])
def test_too_many_chunks_or_tiles_are_refused_without_memory_for_them(shape):
    batch = Batch.ragged(qo_indptr=[0, shape[0]], kv_indptr=[0, shape[1]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match=r"^split_size: expected at most 16777216 work items, got \d+ or more"):
        make_plan(
            batch, spec=GQA.replace(num_qo_heads=8), owner="test", backend="none", configs=(SMALL["max"],),
            page_size=None, device=torch.device("cpu"), causal=False, split_size=32,
        )  # fmt: skip
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**16  # KiB
