"""The cache in ordinary use: contents, attention, sharing and memory, against a dictionary of tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kvcache_twin import (
    SCALE,
    Fault,
    StepFault,
    Twin,
    assert_right,
    attend_all,
    gqa_spec,
    host_state,
    make_cache,
    mla_spec,
    whole_state,
)
from solving import DEVICES, each_backend_and_specs

import sennit
from sennit.attention import BatchAttention
from sennit.cache.capacity import byte_budget, parse_bytes
from sennit.cache.groups import PageGroup
from sennit.cache.pages import PagePool
from sennit.cache.sequences import Sequences
from sennit.cache.storage import TableMirror
from sennit.errors import CacheCorrupt, IncompleteStep, InvalidInput, OutOfPages, UnsupportedFeature
from sennit.kvcache import KVCache

STEP = object()  # the owner of a reservation
SPECS = {
    "gqa": gqa_spec(),
    "mha bfloat16": gqa_spec(2, 2, dtype=torch.bfloat16),
    "uneven dims": gqa_spec(6, 1, head_dim_qk=12, head_dim_vo=5),
    "latent": mla_spec(),
    "float64": gqa_spec(dtype=torch.float64),
}


@each_backend_and_specs({name: [spec] * 2 for name, spec in SPECS.items()})
@pytest.mark.parametrize("layout", ["NHD", "HND", None])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_steps_store_and_attend_as_a_dictionary_of_tensors_does(specs, page_size, layout, backend, device):
    """Prefill, chunked prefill, decode, requests without tokens and forks, mixed, with NaN in every free slot."""
    cache = make_cache(specs, num_pages=90, page_size=page_size, kv_layout=layout, backend=backend, device=device)
    twin = Twin(cache, seed=page_size)
    a, b, c = twin.add(), twin.add(), twin.add()
    twin.step([(b, 7), (a, 1), (c, 0)], verify=True)
    twin.step([(a, 5), (c, 17), (b, 1)], verify=True)
    d, e = twin.fork(b), twin.fork(c, 10)
    twin.step([(d, 2), (a, 1), (b, 1), (e, 1)], verify=True)
    twin.trim(a, 4)
    twin.step([(a, 1), (c, 0), (e, 3)], verify=True)
    twin.remove(b)
    twin.step([(a, 1), (d, 1)], verify=True)
    twin.check()
    cache.check()


def test_positions_and_last_rows_follow_the_order_of_the_batch():
    cache = make_cache()
    twin = Twin(cache)
    a, b, c = twin.add(5), twin.add(), twin.add(2)
    with cache.step([(c, 3), (a, 0), (b, 2)]) as step:
        assert step.positions.tolist() == [2, 3, 4, 0, 1]
        assert step.last_rows.tolist() == [2, 4]
        assert step.positions.dtype == step.last_rows.dtype == torch.int64
        assert step.num_tokens == 5
        assert str(step.batch) == "3@5 + 0@5 + 2@2"
        attend_all(cache, step)


@pytest.mark.parametrize("items", [[], "no tokens"], ids=["no requests", "no tokens"])
def test_an_empty_step_is_ordinary(items):
    cache = make_cache()
    twin = Twin(cache)
    a, b = twin.add(5), twin.add()
    before = whole_state(cache)[0]
    items = [(a, 0), (b, 0)] if items else []
    with cache.step(items) as step:
        assert step.num_tokens == 0
        assert step.positions.tolist() == step.last_rows.tolist() == []
        for layer in range(2):
            out = step.attend(layer, torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), sm_scale=1.0)
            assert out.shape == (0, 4, 8)
    assert host_state(cache) == before
    twin.check()


def test_rows_beyond_the_step_give_zeros_and_are_not_stored():
    cache = make_cache([gqa_spec()])
    twin = Twin(cache)
    a = twin.add()
    q, k, v = twin.random(6, 4, 8), twin.random(6, 2, 8), twin.random(6, 2, 8)
    with cache.step([(a, 4)]) as step:
        out = step.attend(0, q, k, v, sm_scale=SCALE)
    assert_right(gqa_spec(), [(out[:4], q[:4], k[:4], v[:4])])
    assert torch.all(out[4:] == 0)
    assert torch.equal(cache.read(a, 0)[0], k[:4])


def test_layers_may_attend_in_any_order_with_out_and_lse():
    cache = make_cache()
    twin = Twin(cache)
    a = twin.add(3)
    with cache.step([(a, 2)]) as step:
        for layer in (1, 0):
            q, (k, v) = twin.random(2, 4, 8), twin.new_keys(gqa_spec(), 2)
            target = torch.full((2, 4, 8), torch.nan)
            out, lse = step.attend(layer, q, k, v, sm_scale=SCALE, out=target, return_lse=True)
            assert out is target
            stored = [torch.cat(pair) for pair in zip(twin.stored[a][layer], (k, v), strict=True)]
            assert_right(gqa_spec(), [(target, q, *stored)])
            assert lse.shape == (2, 4)
            assert lse.isfinite().all()


def test_equal_specs_share_one_plan_and_different_ones_do_not():
    few = gqa_spec(num_qo_heads=2)
    cache = make_cache([gqa_spec(), few, gqa_spec(), few])
    twin = Twin(cache)
    a = twin.add(9)
    with cache.step([(a, 1)], split_size=4) as step:
        assert step.plan(0) is step.plan(2)
        assert step.plan(1) is step.plan(3)
        assert step.plan(0) is not step.plan(1)
        assert step.plan(1).spec == few
        assert step.plan(0).split_size == 4
        attend_all(cache, step)
    assert cache.length(a) == 10


def test_a_fork_costs_nothing_and_the_first_write_copies_one_page():
    cache = make_cache()
    twin = Twin(cache)
    a = twin.add(10)
    free = cache.stats().free_pages
    b = twin.fork(a)
    assert cache.stats().free_pages == free
    assert cache.stats().shared_pages == 3
    assert cache.pages_needed([(b, 1)]) == 1
    twin.step([(b, 2)], verify=True)
    assert cache.stats().free_pages == free - 1
    assert cache.page_table(a).tolist()[:2] == cache.page_table(b).tolist()[:2]
    assert cache.page_table(a)[2] != cache.page_table(b)[2]
    twin.step([(a, 2)], verify=True)
    twin.check()
    assert cache.stats().free_pages == free - 1, "the last holder writes in place"


@pytest.mark.parametrize("lengths", [(7, 5, 6), (5, 6, 7), (6, 6, 6), (7, 7, 5)])
def test_all_holders_of_a_page_written_in_one_step_need_one_copy_less_than_they_are(lengths):
    cache = make_cache()
    twin = Twin(cache)
    origin = twin.add(7)
    forks = [twin.fork(origin, length) for length in lengths]
    twin.remove(origin)
    items = [(fork, 1) for fork in forks]
    assert cache.pages_needed(items) == 2
    with pytest.raises(Fault):
        twin.step(items, fault=StepFault(2))  # everything is written, and taken back
    twin.check()
    twin.step(items, verify=True)
    twin.check()
    cache.check()


def test_trim_frees_whole_pages_and_never_touches_what_others_share():
    cache = make_cache()
    twin = Twin(cache)
    a = twin.add(15)
    b = twin.fork(a)
    twin.trim(a, 5)
    twin.check()
    assert len(cache.page_table(a)) == 2
    assert cache.stats().free_pages == 36
    twin.step([(a, 9)], verify=True)
    twin.check()
    twin.remove(b)
    twin.trim(a, 0)
    assert cache.stats().free_pages == 40
    twin.step([(a, 6)], verify=True)
    twin.check()


def test_ids_are_listed_in_order_and_never_used_again():
    cache = make_cache()
    a, b = cache.add(), cache.add()
    c = cache.fork(a)
    cache.remove(b)
    assert cache.sequences == [a, c]
    assert a in cache
    assert b not in cache
    assert "a" not in cache
    assert [] not in cache
    cache.clear()
    assert cache.sequences == []
    assert cache.add() not in (a, b, c)
    assert cache.stats().free_pages == cache.num_pages


@pytest.mark.parametrize("spec", [gqa_spec(), mla_spec()], ids=["gqa", "latent"])
def test_without_append_rows_attend_to_what_is_stored_and_nothing_grows(spec):
    """A decoder's queries over an encoder's tokens: more of them than keys, with shared pages and none free."""
    cache = make_cache([spec] * 2, num_pages=3)
    twin = Twin(cache)
    a = twin.add(10)
    b = twin.fork(a)
    before = whole_state(cache)[0]
    q = twin.random(14, spec.num_qo_heads, spec.head_dim_qk)
    with cache.step([(a, 13), (b, 1)], append=False, causal=False) as step:
        assert step.positions.tolist() == [*range(-3, 10), 9]
        for layer in range(2):
            with pytest.raises(InvalidInput, match="append=False"):
                step.attend(layer, q, q, q, sm_scale=SCALE)
            out = step.attend(layer, q, sm_scale=SCALE)
            pairs = [(out[:13], q[:13], *twin.stored[a][layer]), (out[13:], q[13:], *twin.stored[b][layer])]
            assert_right(spec, pairs, causal=False)
    assert host_state(cache) == before
    twin.check()
    with pytest.raises(IncompleteStep), cache.step([(a, 1)], append=False):
        pass


def test_causal_may_differ_by_request():
    cache = make_cache([gqa_spec()])
    twin = Twin(cache)
    a, b = twin.add(), twin.add()
    q, k, v = twin.random(8, 4, 8), twin.random(8, 2, 8), twin.random(8, 2, 8)
    with cache.step([(a, 4), (b, 4)], causal=[False, True]) as step:
        out = step.attend(0, q, k, v, sm_scale=SCALE)
    assert_right(gqa_spec(), [(out[:4], q[:4], k[:4], v[:4])], causal=False)
    assert_right(gqa_spec(), [(out[4:], q[4:], k[4:], v[4:])], causal=True)


def test_read_gives_copies():
    cache = make_cache()
    twin = Twin(cache)
    a = twin.add(6)
    cache.read(a, 0)[0].fill_(7.0)
    cache.page_table(a).fill(0)
    twin.check()
    assert [t.shape for t in cache.read(cache.add(), 1)] == [(0, 2, 8), (0, 2, 8)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", SPECS)
def test_pools_are_aligned_views_of_one_allocation_and_tables_say_where_tokens_are(name, layout):
    cache = make_cache([SPECS[name]] * 3, page_size=4, kv_layout=layout)
    twin = Twin(cache)
    a = twin.add(10)
    storages, ranges = set(), []
    for layer in range(3):
        pools = cache.pools(layer)
        for pool, rows in zip(pools if isinstance(pools, tuple) else [pools], twin.stored[a][layer], strict=False):
            storages.add(pool.untyped_storage().data_ptr())
            ranges.append((pool.data_ptr(), pool.data_ptr() + pool.nbytes))
            assert pool.data_ptr() % 64 == 0
            page = pool[cache.page_table(a)[1]]
            page = page.transpose(0, 1) if layout == "HND" and not SPECS[name].latent else page
            assert torch.equal(page, rows[4:8])
    assert len(storages) == 1
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges)), "pools do not overlap"


def test_steps_work_inside_and_outside_inference_mode():
    with torch.inference_mode():
        cache = make_cache()
        twin = Twin(cache)
        a = twin.add(5)
    twin.step([(a, 3)], verify=True)
    with torch.inference_mode():
        twin.step([(a, 3)], verify=True)
        b = twin.fork(a)
    twin.step([(b, 1), (a, 1)], verify=True)


def test_graph_buffers_hold_the_pages_of_a_step_and_a_replay_commits():
    cache = make_cache([gqa_spec()] * 2)
    twin = Twin(cache)
    a, b = twin.add(30), twin.add(2)
    attention = BatchAttention(gqa_spec(), page_size=4, kv_layout=cache.kv_layout, device="cpu")
    buffers = attention.buffers(max_requests=2, max_tokens=2, max_pages=9)  # fewer than two rows of the longest table
    twin.step([(a, 1), (b, 1)], into=buffers, verify=True)
    twin.check()
    with cache.step([(a, 1), (b, 1)], into=buffers):
        pass  # a captured graph would be replayed here
    assert (cache.length(a), cache.length(b)) == (32, 4)
    with pytest.raises(IncompleteStep, match="layers 1 of 2"), cache.step([(a, 1)], into=buffers) as step:
        step.attend(0, twin.random(1, 4, 8), *twin.new_keys(gqa_spec(), 1), sm_scale=SCALE)
    with pytest.raises(sennit.CapacityExceeded), cache.step([(a, 1), (b, 2)], into=buffers):
        pass
    assert (cache.length(a), cache.length(b)) == (32, 4)


def test_graph_buffers_need_one_spec_for_all_layers():
    cache = make_cache([gqa_spec(), gqa_spec(num_qo_heads=2)])
    attention = BatchAttention(gqa_spec(), page_size=4, kv_layout=cache.kv_layout, device="cpu")
    with pytest.raises(UnsupportedFeature, match="one for each spec"):
        cache.step([], into=attention.buffers(max_requests=1, max_tokens=1, max_pages=1))


# Memory


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("500MB", 500_000_000),
        ("2kb", 2000),
        ("3 KiB", 3072),
        ("12b", 12),
        (".5TiB", 2**39),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read_with_their_units(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "4", "GiB", "4 G", "4 Gi", "-1GiB", "1e3MB", "4GiBs", "4,5GiB", "4 PiB"])
def test_sizes_without_a_known_unit_are_refused(text):
    with pytest.raises(InvalidInput, match="a number and a unit"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["9" * 400 + "B", "9" * 400 + ".5TiB", "9223372036854775809B", "99999999999TiB"])
def test_sizes_beyond_any_machine_are_refused(text):
    with pytest.raises(InvalidInput, match=r"memory: expected at most 8388608.00 TiB"):
        parse_bytes(text)


@pytest.mark.parametrize("memory", [0, -1, 0.0, 1.5, -0.5, float("nan"), True, None, [1], 2**63, 10**30, float("inf")])
def test_memory_out_of_range_is_refused(memory):
    with pytest.raises(InvalidInput, match="memory"):
        byte_budget(memory, torch.device("cpu"))


def test_a_fraction_is_of_what_is_free(monkeypatch):
    monkeypatch.setattr("sennit.cache.capacity.free_bytes", lambda device: 1_000_000)
    cache = KVCache([gqa_spec()], memory=0.25, page_size=4, device="cpu")
    assert cache.num_pages == 250_000 // (4 * 2 * 2 * 8 * 4)
    assert KVCache([gqa_spec()], memory=1.0, page_size=4, device="cpu").num_pages == 1_000_000 // 512


def test_free_memory_of_the_host_is_positive_with_and_without_proc(monkeypatch):
    from sennit.cache import capacity

    cpu = torch.device("cpu")
    assert 0 < capacity.free_bytes(cpu) < 2**50
    monkeypatch.setattr(capacity.Path, "exists", lambda path: False)
    assert 0 < capacity.free_bytes(cpu) < 2**50


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", SPECS)
def test_the_allocation_is_as_large_as_the_budget_allows_and_not_larger(name, page_size):
    spec = SPECS[name]
    page = 3 * page_size * spec.kv_bytes_per_token
    for budget in (page * 10 + 7000, 123_457):
        cache = KVCache([spec] * 3, memory=budget, page_size=page_size, device="cpu")
        assert cache.memory().total_bytes <= budget
        larger = KVCache([spec] * 3, num_tokens=(cache.num_pages + 1) * page_size, page_size=page_size, device="cpu")
        assert larger.memory().total_bytes > budget


def test_memory_divides_exactly_where_pools_need_no_padding():
    page = 2 * 16 * gqa_spec().kv_bytes_per_token
    assert KVCache([gqa_spec()] * 2, memory=page * 5, device="cpu").num_pages == 5
    assert KVCache([gqa_spec()] * 2, memory=page * 5 - 1, device="cpu").num_pages == 4


def test_too_little_memory_says_what_a_page_takes():
    page = 2 * 16 * gqa_spec().kv_bytes_per_token
    with pytest.raises(InvalidInput, match=f"at least {page} bytes, which one page of 16 tokens takes in 2 layers"):
        KVCache([gqa_spec()] * 2, memory=page - 1, device="cpu")


def test_capacity_in_tokens_is_rounded_up_to_pages():
    assert KVCache([gqa_spec()], num_tokens=33, device="cpu").num_pages == 3
    assert KVCache([gqa_spec()], num_tokens=np.int64(32), device="cpu").num_pages == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "memory, num_tokens: expected exactly one of the two, got none"),
        ({"memory": "1MiB", "num_tokens": 5}, "got both"),
        ({"num_tokens": 0}, "num_tokens: expected a positive integer"),
        ({"num_tokens": 1.5}, "num_tokens"),
        ({"num_tokens": True}, "num_tokens"),
        ({"num_tokens": 2**31, "page_size": 1}, "num_tokens: expected at most 2147483647 pages, got 2147483648, which"),
        ({"num_tokens": 10**30}, "num_tokens: expected at most 2147483647 pages, got 10{30}, which is 625"),
        ({"memory": "1EiB", "page_size": 1}, "memory: expected a number and a unit"),
        ({"memory": "1000TiB", "page_size": 1}, "memory: expected at most 2147483647 pages, got 1000TiB, which is 858"),
        ({"num_tokens": 8, "page_size": 0}, "page_size"),
        ({"num_tokens": 8, "page_size": 1.0}, "page_size"),
        ({"num_tokens": 8, "page_size": True}, "page_size"),
        ({"num_tokens": 8, "page_size": 2**31}, "page_size: expected a positive integer, at most 2147483647"),
        ({"num_tokens": 8, "page_size": 2**62}, "page_size"),
        ({"num_tokens": 8, "kv_layout": ""}, "kv_layout"),
        ({"num_tokens": 8, "kv_layout": False}, "kv_layout"),
        ({"num_tokens": 8, "kv_layout": "DHN"}, "kv_layout"),
        ({"num_tokens": 8, "device": "nowhere"}, "device"),
        ({"num_tokens": 8, "backend": "nothing"}, "backend"),
        ({"num_tokens": 8, "specs": []}, "specs: expected AttentionSpecs, one a layer, got none"),
        ({"num_tokens": 8, "specs": gqa_spec()}, r"specs: expected a list .* use|\[spec\] \* 32"),
        ({"num_tokens": 8, "specs": [gqa_spec(), "x"]}, "specs: .* str"),
        ({"num_tokens": 8, "specs": 3}, "specs"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(InvalidInput, match=text):
        KVCache(**{"specs": [gqa_spec()], "device": "cpu"} | arguments)


def test_committing_token_trees_is_refused_by_name():
    cache = make_cache()
    a = cache.add()
    before = host_state(cache)
    for use in (
        lambda: cache.accept({}),
        lambda: cache.step([(a, sennit.Tree([-1, 0]))]).__enter__(),
        lambda: cache.pages_needed([(a, sennit.Tree([-1]))]),
    ):
        with pytest.raises(UnsupportedFeature, match="committed yet") as caught:
            use()
        assert caught.value.feature == "token trees"
        assert host_state(cache) == before


def test_stats_and_memory_add_up_and_print():
    cache = make_cache(num_pages=40, page_size=4)
    twin = Twin(cache)
    a = twin.add(10)
    twin.fork(a, 6)
    stats = cache.stats()
    assert (stats.num_pages, stats.free_pages, stats.used_pages, stats.shared_pages) == (40, 37, 3, 2)
    assert (stats.num_sequences, stats.num_tokens, stats.page_size) == (2, 16, 4)
    assert str(stats) == "3 of 40 pages of 4 used (2 shared), 37 free; 2 sequences, 16 tokens"
    memory = cache.memory()
    assert memory.bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert memory.bytes_per_page == 4 * memory.bytes_per_token
    assert memory.k_pool_bytes == memory.v_pool_bytes == 40 * 4 * 2 * 8 * 4
    assert memory.total_bytes == 40 * memory.bytes_per_page == cache._storages[0].buffer.nbytes
    assert memory.num_tokens == 160
    assert str(memory) == (
        "40.00 KiB: 160 tokens of 256 B in 40 pages of 4; 2 layers with 10.00 KiB of keys and 10.00 KiB of values "
        "each; page tables 1.00 KiB"
    )
    assert make_cache([mla_spec()]).memory().v_pool_bytes == 0
    assert "2 sequences, 16 tokens" in repr(cache)
    with cache.step([(a, 3)]) as step:
        assert cache.stats().used_pages == 4, "what an open step has reserved is used"
        attend_all(cache, step)


def test_pages_needed_is_what_a_step_takes():
    cache = make_cache()
    twin = Twin(cache)
    a, b = twin.add(6), twin.add(4)
    c = twin.fork(a)
    for items in ([(a, 2), (c, 3), (b, 1)], [(a, 0)], [(c, 9), (b, 4)]):
        needed, free = cache.pages_needed(items), cache.stats().free_pages
        twin.step(items)
        assert free - cache.stats().free_pages == needed


def test_a_full_cache_still_takes_tokens_that_fit_its_pages():
    cache = make_cache(num_pages=3)
    twin = Twin(cache)
    a = twin.add(9)
    twin.step([(a, 3)], verify=True)
    with pytest.raises(OutOfPages):
        twin.step([(a, 1)])
    twin.trim(a, 8)
    twin.step([(a, 4)], verify=True)
    twin.check()


def test_check_finds_what_was_written_from_outside():
    cache = make_cache()
    Twin(cache).add(6)
    cache.check()
    cache._sequences.groups[0].pool.refs[0] += 1
    with pytest.raises(CacheCorrupt, match="page 0: 1 tables hold it, and its count is 2"):
        cache.check()


# The device's copy of the tables


@pytest.mark.parametrize("device", DEVICES)
def test_the_mirror_gives_the_rows_of_the_tables_after_any_operations(device):
    rng = np.random.default_rng(4)
    sequences = Sequences([PageGroup(PagePool(300), page_size=2)])
    mirror = TableMirror(torch.device(device))
    for _ in range(300):
        if len(sequences.slots) < 3 or rng.random() < 0.1:
            sequences.add()
        ids = list(sequences.slots)
        seq = ids[rng.integers(len(ids))]
        choice = rng.random()
        if choice < 0.15:
            sequences.fork(seq, int(rng.integers(sequences.length(seq) + 1)))
        elif choice < 0.3:
            sequences.trim(seq, int(rng.integers(sequences.length(seq) + 1)))
        elif choice < 0.4:
            sequences.remove(seq)
        elif choice < 0.41:
            sequences.clear()
        else:
            items = [(int(s), int(rng.integers(9))) for s in rng.choice(ids, min(len(ids), 4), replace=False)]
            if sequences.pages_needed(items) > sequences.groups[0].pool.num_free:
                sequences.remove(ids[0])
                continue
            reservation = sequences.reserve(STEP, items)
            rows = mirror.rows(sequences.tables, reservation.slots, reservation.max_pages).cpu().numpy()
            for row, slot in zip(rows[0], reservation.slots, strict=True):
                count = sequences.tables.page_counts[slot]
                assert row[:count].tolist() == sequences.tables.pages[0, slot, :count].tolist()
            mirror.check(sequences.tables)
            sequences.commit(STEP) if rng.random() < 0.6 else sequences.rollback(STEP)
        mirror.check(sequences.tables)


def test_a_wrong_cell_in_the_mirror_is_found():
    sequences = Sequences([PageGroup(PagePool(8), page_size=2)])
    seq = sequences.add()
    sequences.reserve(STEP, [(seq, 5)])
    sequences.commit(STEP)
    mirror = TableMirror(torch.device("cpu"))
    mirror.check(sequences.tables)
    mirror.update(sequences.tables)
    mirror.pages[0, sequences.slots[seq], 1] += 1
    with pytest.raises(CacheCorrupt, match="slot 0: page 1 on cpu is not 1"):
        mirror.check(sequences.tables)
    sequences.reserve(STEP, [(seq, 1)])
    sequences.tables.mark_dirty(np.array([0]), np.array([0]), np.array([3]))
    mirror.check(sequences.tables)  # what is known to have changed may differ
    mirror.update(sequences.tables)
    mirror.check(sequences.tables)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_over_the_mirror_attends_to_the_same_pages(device, monkeypatch):
    """What a GPU does, on any device: tables from their device copy, through growth, forks and a rollback."""
    cache = make_cache(device=device, num_pages=60, kv_layout="NHD")
    monkeypatch.setattr("sennit.step.most_entries_sent", lambda device: -1)
    twin = Twin(cache)
    a, b = twin.add(5), twin.add(90)
    c = twin.fork(b, 87)
    with pytest.raises(Fault):
        twin.step([(c, 5), (a, 3)], fault=StepFault(2))
    twin.step([(b, 2), (c, 1), (a, 1)], verify=True)
    twin.step([(a, 60), (c, 1)], verify=True)
    twin.check()
    cache.check()
    assert cache._mirror.pages.numel() > 0
