"""Caches whose layers differ: groups and their memory, windows, owners, pipeline stages, encoder-decoder use."""

from __future__ import annotations

import itertools

import pytest
import torch
from kvcache_twin import (
    SCALE,
    Fault,
    StepFault,
    Twin,
    assert_right,
    assert_same_state,
    attend_all,
    gqa_spec,
    host_state,
    make_cache,
    mla_spec,
    whole_state,
)
from solving import DEVICES, each_backend_and_specs

from sennit.errors import IncompleteStep, InvalidInput, OutOfPages, PagesReleased
from sennit.kvcache import KVCache

FULL = gqa_spec()
LOCAL = gqa_spec(window_left=6)
SINKS = gqa_spec(window_left=9, num_sink_tokens=3)
CACHES = {
    "full and window": [FULL, LOCAL, FULL],
    "windows and sinks": [LOCAL, SINKS],
    "latent and heads": [mla_spec(), gqa_spec(6, 1, head_dim_qk=12, head_dim_vo=5)],
    "two dtypes": [FULL, LOCAL.replace(kv_dtype=torch.float16)],
    "keys in float64": [FULL, FULL.replace(kv_dtype=torch.float64)],
    "soft caps": [FULL.replace(logits_soft_cap=5.0), LOCAL.replace(logits_soft_cap=2.0), FULL, LOCAL],
}


@each_backend_and_specs(CACHES)
@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (3, "HND"), (16, "NHD")])
def test_steps_store_and_attend_as_a_dictionary_of_tensors_does(specs, page_size, layout, backend, device):
    """Chunks shorter and longer than the windows, decode, forks, trims, with NaN in every free slot."""
    cache = make_cache(specs, num_pages=150, page_size=page_size, kv_layout=layout, backend=backend, device=device)
    twin = Twin(cache, seed=page_size)
    a, b, c = twin.add(), twin.add(), twin.add()
    twin.step([(b, 7), (a, 1), (c, 0)], verify=True)
    twin.step([(a, 25), (c, 17), (b, 1)], verify=True)
    d, e = twin.fork(b), twin.fork(c, cache.shortest(c))
    twin.step([(d, 2), (a, 1), (b, 1), (e, 1)], verify=True)
    twin.trim(a, cache.shortest(a))
    twin.step([(a, 9), (c, 0), (e, 30)], verify=True)
    twin.remove(b)
    for _ in range(4):
        twin.step([(a, 1), (d, 1)], verify=True, padding=3)
    twin.check()
    cache.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_over_the_mirror_attends_to_the_same_pages(device, monkeypatch):
    """What a GPU does, on any device: the tables of all groups from their device copy, also after pages were freed."""
    cache = make_cache([FULL, LOCAL], device=device, num_pages=60, kv_layout="NHD")
    monkeypatch.setattr("sennit.step.most_entries_sent", lambda device: -1)
    twin = Twin(cache)
    a, b = twin.add(5), twin.add(91)
    c = twin.fork(b, 90)
    with pytest.raises(Fault):
        twin.step([(c, 5), (a, 3)], fault=StepFault(2))
    twin.step([(b, 2), (c, 1), (a, 1)], verify=True)
    twin.trim(b, cache.shortest(b))
    twin.step([(a, 60), (c, 1), (b, 7)], verify=True)
    twin.check()
    cache.check()
    assert cache._mirror.pages.shape[0] == 2


def test_layers_that_store_alike_share_a_group_and_plans_belong_to_specs():
    capped = FULL.replace(logits_soft_cap=5.0)
    cache = make_cache([FULL, LOCAL, capped, LOCAL, FULL])
    assert [group.name for group in cache.stats().groups] == ["layers 0, 2, 4", "layers 1, 3 with window_left=6"]
    twin = Twin(cache)
    a = twin.add(9)
    with cache.step([(a, 1)]) as step:
        assert step.plan(0) is step.plan(4)
        assert step.plan(1) is step.plan(3)
        assert len({id(step.plan(layer)) for layer in range(5)}) == 3
        assert step.plan(2).spec == capped
        attend_all(cache, step)


@pytest.mark.parametrize(
    "other",
    [
        gqa_spec(4, 4),
        gqa_spec(head_dim_qk=16),
        gqa_spec(head_dim_vo=4),
        gqa_spec().replace(kv_dtype=torch.float16),
        gqa_spec(window_left=9),
        mla_spec(),
    ],
    ids=["heads", "qk", "vo", "dtype", "window", "latent"],
)
def test_layers_that_store_different_things_have_pools_and_tables_of_their_own(other):
    cache = make_cache([gqa_spec(), gqa_spec(), other])
    assert [group.num_pages for group in cache.stats().groups] == [40, 40]
    twin = Twin(cache)
    a, b = twin.add(3), twin.add(5)
    twin.trim(a, 0)
    twin.step([(b, 9), (a, 2)], verify=True)
    assert len({cache.page_table(a, layer).data.tobytes() for layer in (0, 1)}) == 1
    pointers = [p.data_ptr() for layer in range(3) for p in _pools(cache, layer)]
    assert len(set(pointers)) == len(pointers)
    twin.check()


def _pools(cache, layer):
    pools = cache.pools(layer)
    return [pools] if isinstance(pools, torch.Tensor) else list(pools)


# Windows with their tensors


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (4, 1), (4, 7), (4, 40), (16, 1), (16, 40)])
def test_long_generation_stays_in_the_pages_of_its_window(chunk, page_size):
    """Freed pages are used again at once: with room for nothing else, any other page would be overwritten."""
    spec = gqa_spec(window_left=6, num_sink_tokens=2)
    pages = -(-6 // page_size) + -(-2 // page_size) + 2 + -(-chunk // page_size)
    cache = make_cache([spec], num_pages=pages, page_size=page_size)
    twin = Twin(cache)
    a = twin.add()
    for _ in range(30):
        twin.step([(a, chunk)], verify=True)
        twin.check()
    assert cache.length(a) == 30 * chunk
    assert cache.stats().free_pages >= 1


@pytest.mark.slow
def test_a_window_of_1023_over_100000_tokens_attends_right_in_the_pages_of_two_windows():
    spec = gqa_spec(2, 1, head_dim_qk=4, head_dim_vo=4, window_left=1023, num_sink_tokens=4)
    cache = make_cache([spec], num_pages=70, page_size=16)
    a, generator, used = cache.add(), torch.Generator().manual_seed(5), set()
    k, v = (torch.randn(100_000, 1, 4, generator=generator) for _ in range(2))
    for start in range(0, 100_000, 20):
        rows = slice(start, start + 20)
        q = torch.randn(20, 2, 4, generator=generator)
        with cache.step([(a, 20)]) as step:
            out = step.attend(0, q, k[rows], v[rows], sm_scale=SCALE)
        if start % 10_000 == 9_980:
            assert_right(spec, [(out, q, k[: rows.stop], v[: rows.stop])])
            cache.check()
        if start > 2000:
            used.add(cache.stats().used_pages)
    assert cache.length(a) == 100_000
    assert used == {65, 66}


def test_reading_a_windowed_layer_gives_nan_where_pages_were_released():
    cache = make_cache([LOCAL, FULL], kv_layout="HND")
    twin = Twin(cache)
    a = twin.add(21)
    for t in cache.read(a, 0):
        assert t.shape == (21, 2, 8)
        assert t[:12].isnan().all()
        assert not t[12:].isnan().any()
    assert not any(t.isnan().any() for t in cache.read(a, 1))
    assert cache.page_table(a, 0).tolist()[:3] == [-1, -1, -1]
    assert (cache.page_table(a, layer=1) >= 0).all()
    twin.check()


def test_a_cut_that_a_window_cannot_make_names_the_shortest_and_changes_nothing():
    cache = make_cache([FULL, LOCAL])
    twin = Twin(cache)
    a = twin.add(21)
    assert cache.shortest(a) == 18
    assert cache.shortest(twin.add(5)) == 0
    before = whole_state(cache)
    for cut in (lambda: cache.fork(a, 17), lambda: cache.trim(a, length=17), lambda: cache.trim(a, length=1)):
        with pytest.raises(PagesReleased, match="any length from 18 to its 21 is possible") as caught:
            cut()
        assert (caught.value.sequence, caught.value.shortest) == (a, 18)
        assert_same_state(whole_state(cache), before)
    b = twin.fork(a, 18)
    twin.step([(b, 2), (a, 1)], verify=True)
    twin.trim(a, 0)
    twin.step([(a, 30), (b, 30)], verify=True)
    twin.check()


# Sizes


def test_every_group_has_room_for_the_tokens_asked_for():
    cache = KVCache([FULL, LOCAL, mla_spec()], num_tokens=100, page_size=16, device="cpu")
    assert [group.num_pages for group in cache.stats().groups] == [7, 7, 7]
    assert (cache.num_pages, cache.num_tokens, cache.free_pages) == (21, 112, 21)


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        # Window of 31 tokens: 2 pages of 16; 3 sinks: 1; and 2 of slack. Steps of 64 tokens: 4 pages, of 2048: 128.
        ({"max_sequences": 3, "max_step_tokens": 64}, 3 * 5 + 4),
        ({"max_sequences": 3}, 3 * 5 + 128),
        ({"max_sequences": 1, "max_step_tokens": 1}, 6),
        ({"max_sequences": 1000}, 300),  # no more than room for all tokens
        ({}, 300),
    ],
)
def test_a_window_takes_what_its_sequences_need(options, pages):
    specs = [FULL, gqa_spec(window_left=31, num_sink_tokens=3)]
    cache = KVCache(specs, num_tokens=4800, device="cpu", **options)
    assert [group.num_pages for group in cache.stats().groups] == [300, pages]
    assert cache.num_tokens == 4800


@pytest.mark.parametrize(("window_left", "sinks"), [(0, 0), (1, 0), (6, 0), (6, 5), (13, 1)])
@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_as_many_sequences_as_were_said_always_fit(window_left, sinks, page_size):
    """Whatever their lengths: all of them decode, and one after the other takes a whole step of new tokens."""
    spec = gqa_spec(window_left=window_left, num_sink_tokens=sinks)
    cache = make_cache(
        [spec], num_pages=10**4, page_size=page_size, max_sequences=3, max_step_tokens=11, backend="reference"
    )
    twin = Twin(cache)
    seqs = [twin.add() for _ in range(3)]
    for length, seq in itertools.product(range(6), seqs):
        twin.step([(seq, 9), *((other, 1) for other in seqs if other != seq)])
        twin.step([(other, 1) for other in seqs])
        twin.step([(seq, 11 - length)])
    twin.check()
    assert cache.num_pages * page_size < 3 * (window_left + sinks + 4 * page_size) + 11 + page_size


@pytest.mark.parametrize("budget", [10**5, 123_457, 10**6])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_memory_is_divided_so_that_groups_hold_the_same_tokens(page_size, budget):
    specs = [FULL, LOCAL, mla_spec(), FULL, gqa_spec(4, 4, dtype=torch.float64)]
    cache = KVCache(specs, memory=budget, page_size=page_size, device="cpu")
    pages = {group.num_pages for group in cache.stats().groups}
    assert len(pages) == 1
    assert cache.memory().total_bytes <= budget
    larger = KVCache(specs, num_tokens=(pages.pop() + 1) * page_size, page_size=page_size, device="cpu")
    assert larger.memory().total_bytes > budget


def test_memory_that_a_window_does_not_need_goes_to_the_other_groups():
    page = 16 * FULL.kv_bytes_per_token
    assert [g.num_pages for g in KVCache([FULL, LOCAL], memory=100 * page, device="cpu").stats().groups] == [50, 50]
    options = {"max_sequences": 2, "max_step_tokens": 16}  # windows take 2 * (1 + 2) + 1 pages
    cache = KVCache([FULL, LOCAL], memory=100 * page, device="cpu", **options)
    assert [group.num_pages for group in cache.stats().groups] == [93, 7]
    assert cache.memory().total_bytes == 100 * page
    small = KVCache([FULL, LOCAL], memory=10 * page, device="cpu", **options)
    assert [group.num_pages for group in small.stats().groups] == [5, 5]
    only = KVCache([LOCAL], memory=100 * page, device="cpu", **options)
    assert only.num_pages == 7, "where all layers have windows, nobody else could use the rest"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_sequences": 1.0}, "max_sequences"),
        ({"max_sequences": True}, "max_sequences"),
        ({"max_sequences": 1, "max_step_tokens": 0}, "max_step_tokens"),
        ({"max_step_tokens": 64}, "max_step_tokens: expected None without max_sequences, got 64"),
    ],
)
def test_wrong_sizes_are_refused(options, text):
    with pytest.raises(InvalidInput, match=text):
        KVCache([FULL, LOCAL], num_tokens=64, device="cpu", **options)


def test_too_little_memory_says_what_a_page_takes_in_all_groups():
    page = 16 * (FULL.kv_bytes_per_token + 2 * LOCAL.kv_bytes_per_token)
    with pytest.raises(InvalidInput, match=f"at least {page} bytes, which one page of 16 tokens takes in 3 layers"):
        KVCache([FULL, LOCAL, LOCAL], memory=page - 1, device="cpu")
    with pytest.raises(
        InvalidInput, match=r"fits into the free memory .* 1073741824 pages of 1048576 tokens in 1 layers, 7 pages"
    ):
        KVCache([FULL, LOCAL], num_tokens=2**50, page_size=2**20, device="cpu", max_sequences=2, max_step_tokens=1)


def test_stats_and_memory_of_groups_add_up_and_print():
    cache = make_cache([FULL, LOCAL, FULL, mla_spec()], num_pages=40)
    twin = Twin(cache)
    a = twin.add(21)
    twin.fork(a, 19)
    stats = cache.stats()
    assert [(g.num_pages, g.free_pages, g.used_pages, g.shared_pages) for g in stats.groups] == [
        (40, 34, 6, 5),
        (40, 37, 3, 2),
        (40, 34, 6, 5),
    ]
    assert (stats.num_pages, stats.free_pages, stats.used_pages, stats.shared_pages) == (120, 105, 15, 12)
    assert str(stats) == (
        "layers 0, 2: 6 of 40 pages of 4 used (5 shared), 34 free; layer 1 with window_left=6: 3 of 40 pages of 4 used "
        "(2 shared), 37 free; layer 3: 6 of 40 pages of 4 used (5 shared), 34 free; 2 sequences, 40 tokens"
    )
    memory = cache.memory()
    assert [group.num_layers for group in memory.groups] == [2, 1, 1]
    assert [group.bytes_per_token for group in memory.groups] == [256, 128, 96]
    assert [group.total_bytes for group in memory.groups] == [s.buffer.nbytes for s in cache._storages]
    assert (memory.num_layers, memory.num_pages, memory.bytes_per_token, memory.bytes_per_page) == (4, 120, 480, 1920)
    assert memory.total_bytes == sum(group.total_bytes for group in memory.groups) == 40 * 1920
    assert str(memory) == (
        "75.00 KiB: layers 0, 2: 160 tokens of 256 B in 40 pages of 4; 2 layers with 10.00 KiB of keys and "
        "10.00 KiB of values each; layer 1 with window_left=6: 160 tokens of 128 B in 40 pages of 4; 1 layers with "
        "10.00 KiB of keys and 10.00 KiB of values each; layer 3: 160 tokens of 96 B in 40 pages of 4; 1 layers with "
        "15.00 KiB of keys each; page tables 3.00 KiB"
    )
    assert "2 layers of AttentionSpec" in repr(cache)


def test_a_scheduler_asks_for_missing_pages_alone():
    cache = make_cache([FULL, LOCAL], num_pages=9)
    twin = Twin(cache)
    a, b = twin.add(13), twin.add(6)
    for items in ([(a, 3)], [(a, 4)], [(a, 9), (b, 2)], [(a, 30)], [(a, 3), (b, 20)], []):
        missing, before = cache.missing_pages(items), whole_state(cache)
        for spare in (1, 5):
            assert cache.missing_pages(items, spare=spare) >= missing
        if missing:
            with pytest.raises(OutOfPages) as caught:
                twin.step(items)
            assert missing == caught.value.needed - caught.value.free
            assert_same_state(whole_state(cache), before)
        else:
            twin.step(items)
    for spare in (-1, 1.0, None, True):
        with pytest.raises(InvalidInput, match="spare"):
            cache.missing_pages([], spare=spare)


def test_out_of_pages_in_one_group_names_it_and_leaves_no_trace():
    cache = make_cache([FULL, LOCAL], num_pages=100, max_sequences=2, max_step_tokens=4)  # 9 pages for the window
    twin = Twin(cache)
    a, b = twin.add(30), twin.add(5)
    before = whole_state(cache)
    with pytest.raises(
        OutOfPages,
        match=r"30 tokens over 2 sequences needs 7 pages of 4 tokens in layer 1 with window_left=6 and 5 of 9",
    ):
        twin.step([(a, 14), (b, 16)])
    assert_same_state(whole_state(cache), before)
    twin.step([(a, 10), (b, 2)], verify=True)
    twin.check()


def test_page_tables_of_several_groups_need_a_layer():
    cache = make_cache([FULL, LOCAL])
    twin = Twin(cache)
    a = twin.add(5)
    with pytest.raises(
        InvalidInput, match="layer: expected a layer, since 2 groups have tables of their own, got None"
    ):
        cache.page_table(a)
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        cache.page_table(a, layer=2)
    assert cache.page_table(a, layer=1).tolist() == [0, 1]


# Pipeline stages


def test_a_stage_names_its_layers_as_the_whole_model_does():
    specs = [FULL, LOCAL, FULL]
    stage, whole = make_cache(specs, layers=range(8, 11)), make_cache(specs)
    assert (stage.layers, whole.layers, stage.num_layers) == (range(8, 11), range(3), 3)
    assert stage.stats().groups[1].name == "layer 9 with window_left=6"
    one, other = Twin(stage, seed=4), Twin(whole, seed=4)
    for twin in (one, other):
        a = twin.add(13)
        twin.step([(a, 4)], verify=True)
        twin.check()
    for layer in range(3):
        for ours, theirs in zip(stage.read(a, layer + 8), whole.read(a, layer), strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    with stage.step([(a, 1)]) as step:
        for wrong in (0, 7, 11, -1, 8.0, True, None):
            for use in (step.plan, stage.pools, lambda layer: stage.read(a, layer), lambda n: stage.page_table(a, n)):
                if not (wrong is None and use not in (step.plan, stage.pools)):
                    with pytest.raises(InvalidInput, match="layer: expected an integer from 8 to 10"):
                        use(wrong)
        attend_all(stage, step)
    q, k, v = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    missing = r"layers 8, 10 of range\(8, 11\) did not attend"
    with pytest.raises(IncompleteStep, match=missing), stage.step([(a, 1)]) as step:
        step.attend(9, q, k, v, sm_scale=SCALE)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (range(8, 11), "as many layers as there are specs, 2, got 3 in range"),
        (range(0), "as many layers"),
        (range(0, 4, 2), "a range of step 1"),
        (range(1, -1, -1), "a range of step 1"),
        (range(-2, 0), "a range of step 1"),
        ([8, 9], "a range of step 1"),
        (2, "a range of step 1"),
    ],
)
def test_wrong_ranges_of_layers_are_refused(layers, text):
    with pytest.raises(InvalidInput, match=f"layers: expected {text}"):
        KVCache([FULL, LOCAL], num_tokens=64, device="cpu", layers=layers)


# Layers that read another's keys and values


def test_a_layer_reads_its_owners_keys_and_stores_none():
    cache = make_cache(
        [FULL, LOCAL, gqa_spec(num_qo_heads=2), gqa_spec(window_left=3)], kv_owner={6: 4, 7: 5}, layers=range(4, 8)
    )
    assert [(group.name, group.num_pages) for group in cache.stats().groups] == [
        ("layers 4, 6", 40), ("layers 5, 7 with window_left=6", 40)
    ]  # fmt: skip
    assert [group.num_layers for group in cache.memory().groups] == [1, 1]
    assert cache.kv_owner == {6: 4, 7: 5}
    twin = Twin(cache)
    a = twin.add(13)
    b = twin.fork(a, 12)
    twin.step([(a, 9), (b, 1)], verify=True)
    twin.step([(b, 3)], append=False, verify=True)
    for layer, owner in cache.kv_owner.items():
        assert all(one is other for one, other in zip(cache.pools(layer), cache.pools(owner), strict=True))
        for one, other in zip(cache.read(b, layer), cache.read(b, owner), strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    twin.check()


def test_a_layer_attends_after_its_owner_and_without_keys():
    cache = make_cache([FULL, FULL, FULL], kv_owner={0: 2})
    a = cache.add()
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    with cache.step([(a, 3)]) as step:
        step.attend(1, q, k, k, sm_scale=SCALE)
        with pytest.raises(InvalidInput, match="layer 2 first, which stores the keys that layer 0 reads, got 0"):
            step.attend(0, q, sm_scale=SCALE)
        with pytest.raises(InvalidInput, match="keys of this step's tokens"):
            step.attend(2, q, sm_scale=SCALE)
        step.attend(2, q, k, k, sm_scale=SCALE)
        for given in ((k, k), (k, None), (None, k)):
            with pytest.raises(InvalidInput, match="k, v: expected None, since layer 0 reads those of layer 2"):
                step.attend(0, q, *given, sm_scale=SCALE)
        step.attend(0, q, sm_scale=SCALE)
    with cache.step([(a, 1)], append=False) as step:  # what is read was written before: any order will do
        for layer in (0, 1, 2):
            step.attend(layer, q[:1], sm_scale=SCALE)


@pytest.mark.parametrize(
    ("owners", "text"),
    [
        ({1: 1}, r"kv_owner\[1\]: expected a layer with keys and values of its own, got layer 1"),
        ({1: 2, 2: 0}, r"kv_owner\[1\]: .* got layer 2; name layer 0"),
        ({1: 4}, "kv_owner: expected layers from 0 to 3, got 1: 4"),
        ({4: 1}, "kv_owner: expected layers from 0 to 3"),
        ({1: -1}, "kv_owner: expected layers from 0 to 3"),
        ({1.0: 0}, "kv_owner: expected layers"),
        ({True: 0}, "kv_owner: expected layers"),
        ({"1": 0}, "kv_owner: expected layers"),
        ([(1, 0)], "kv_owner: expected a dictionary"),
        ({1: 3}, r"kv_owner\[1\]: expected an owner with num_kv_heads=2, as layer 1 has, got layer 3 with 1"),
        (
            {0: 2},
            r"kv_owner\[0\]: expected an owner that keeps all .* window_left=None, got layer 2 with window_left=6",
        ),
    ],
)
def test_owners_that_do_not_fit_are_refused(owners, text):
    with pytest.raises(InvalidInput, match=text):
        KVCache([FULL, FULL, LOCAL, mla_spec()], num_tokens=64, device="cpu", kv_owner=owners)


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        (gqa_spec(window_left=9, num_sink_tokens=3), True),
        (gqa_spec(window_left=4, num_sink_tokens=1), True),
        (gqa_spec(window_left=10, num_sink_tokens=3), False),
        (gqa_spec(window_left=4, num_sink_tokens=4), False),
        (gqa_spec(), False),
    ],
)
def test_an_owner_keeps_at_least_what_the_layer_sees(spec, fits):
    options = {"num_tokens": 64, "device": "cpu", "kv_owner": {1: 0}}
    if fits:
        assert len(KVCache([SINKS, spec], **options).stats().groups) == 1
    else:
        with pytest.raises(InvalidInput, match=r"kv_owner\[1\]: expected an owner that keeps all that layer 1 sees"):
            KVCache([SINKS, spec], **options)


# Encoder-decoder use, padding, raw views


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["latent and heads", "two dtypes"])
def test_rows_attend_to_what_is_stored_without_storing_anything(name, causal):
    """More rows than stored tokens, as many, fewer and none, over shared pages and with no page free."""
    specs = [spec.replace(window_left=None) for spec in CACHES[name]]
    cache = make_cache(specs, num_pages=5)
    twin = Twin(cache)
    a, b, empty = twin.add(10), twin.add(5), twin.add()
    c = twin.fork(a, 9)
    assert cache.free_pages == 0
    before = whole_state(cache)
    for rows in ((14, 5, 3, 9), (1, 0, 0, 2), (0, 0, 0, 0), (3, 11, 1, 9)):
        twin.step(list(zip((a, b, empty, c), rows, strict=True)), append=False, causal=causal, verify=True)
        assert_same_state(whole_state(cache), before)
    twin.check()


def test_rows_over_a_window_are_right_or_refused():
    cache = make_cache([LOCAL])
    twin = Twin(cache)
    a, b = twin.add(5), twin.add(21)
    twin.step([(a, 5), (b, 3)], append=False, causal=False, verify=True)
    before = whole_state(cache)
    for append in (4, 9, 21, 30):
        with pytest.raises(PagesReleased, match="without append only those from 18 on can attend"):
            twin.step([(a, 1), (b, append)], append=False)
        assert_same_state(whole_state(cache), before)


@pytest.mark.parametrize("name", CACHES)
def test_rows_beyond_the_step_give_zeros_and_are_not_stored(name):
    cache = make_cache(CACHES[name])
    twin = Twin(cache)
    a, b = twin.add(6), twin.add()
    for padding in (1, 5, 64):
        twin.step([(a, 3), (b, 4)], padding=padding, verify=True)
    twin.step([], padding=4, verify=True)
    twin.step([(a, 1), (b, 2)], padding=2, append=False, causal=False, verify=True)
    twin.check()


def test_what_is_written_through_a_view_of_the_pools_is_read_and_attended_to():
    cache = make_cache([FULL, gqa_spec(window_left=60), mla_spec()])
    twin = Twin(cache)
    a = twin.add(21)
    for layer in range(3):
        for tensor in (t for t in twin.stored[a][layer] if t is not None):
            tensor[17] = 0.5
        page = int(cache.page_table(a, layer)[4])
        for pool in _pools(cache, layer):
            assert pool._base is not None
            assert pool.untyped_storage().data_ptr() == cache._storages[layer].buffer.data_ptr()
            pool[page][(slice(None), 1) if pool.dim() == 4 and cache.kv_layout == "HND" else 1] = 0.5
    twin.check()
    twin.step([(a, 1)], verify=True)
    twin.step([(a, 3)], append=False, causal=False, verify=True)


def test_pools_of_all_groups_are_aligned_and_do_not_overlap():
    cache = make_cache([FULL, LOCAL, mla_spec(), FULL], page_size=3)
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for layer in range(4) for p in _pools(cache, layer))
    assert all(start % 64 == 0 for start, _ in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_graph_buffers_serve_a_windowed_cache_of_one_spec():
    cache = make_cache([LOCAL] * 2)
    twin = Twin(cache)
    a, b = twin.add(30), twin.add(2)
    buffers = cache._parts.attentions[0].buffers(max_requests=2, max_tokens=2, max_pages=12)
    for _ in range(6):
        twin.step([(a, 1), (b, 1)], into=buffers, verify=True)
        twin.check()
    before = host_state(cache)
    assert before["released"] == {a: [7], b: [0]}
