"""What has gone wrong in TVM's PagedKVCache, a test for each: none of it happens here."""

from __future__ import annotations

import inspect

import pytest
import torch
from kvcache_twin import SCALE, Twin, assert_same_state, gqa_spec, make_cache, mla_spec, whole_state
from solving import each_backend

from sennit.errors import CacheCorrupt, PagesReleased, SennitError
from sennit.kvcache import KVCache

FULL, LOCAL = gqa_spec(), gqa_spec(window_left=6)


@pytest.mark.parametrize("specs", [[FULL], [FULL, LOCAL]], ids=["one group", "two groups"])
@pytest.mark.parametrize(
    "items", [[(0, 3), (1, 10**4)], [(0, 3), (99, 1)], [(0, 3), (0, 1)], [(0, 3), (1, -1)]],
    ids=["too many tokens", "unknown", "twice", "negative"],
)  # fmt: skip
def test_a_begin_that_fails_leaves_lengths_and_contents_as_they_were(specs, items):
    cache = make_cache(specs)
    twin = Twin(cache)
    twin.add(5)
    twin.add(9)
    before = whole_state(cache)
    with pytest.raises(SennitError), cache.step(items):
        pytest.fail("the block must not run")
    assert_same_state(whole_state(cache), before)
    twin.check()
    twin.step([(0, 3), (1, 1)], verify=True)


def test_popping_tokens_after_a_window_slid_never_frees_a_live_page():
    """Pages that one sequence has left behind or lets go of are live in others, and the other way round."""
    cache = make_cache([LOCAL, gqa_spec(window_left=6, num_sink_tokens=3)])
    twin = Twin(cache)
    a = twin.add(16)
    forks = [twin.fork(a, length) for length in (15, 16, 16)]
    twin.step([(a, 9), (forks[1], 1)], verify=True)
    for seq in (a, *forks):
        twin.trim(seq, cache.shortest(seq))
        cache.check()
        twin.check()
    twin.step([(seq, 2) for seq in (a, *forks)], verify=True)
    with pytest.raises(PagesReleased):
        cache.trim(a, length=cache.shortest(a) - 1)
    for seq in (forks[0], a):
        twin.remove(seq)
        cache.check()
    twin.step([(seq, 11) for seq in forks[1:]], verify=True)
    twin.check()


@each_backend
@pytest.mark.parametrize("window_left", [0, 1, 5, 16, 17])
def test_the_window_is_applied_inside_a_chunk(window_left, backend, device):
    """Each row of a long chunk sees its own window: none of what is far behind it, all of what is just behind it."""
    spec = gqa_spec(window_left=window_left)
    cache = make_cache([spec], backend=backend, device=device)
    a = cache.add()
    rows = 40
    q, k, v = (torch.zeros(rows, heads, 8, device=device) for heads in (4, 2, 2))
    v[:, :, 0] = torch.arange(rows, dtype=torch.float32, device=device)[:, None]
    with cache.step([(a, rows)]) as step:
        out = step.attend(0, q, k, v, sm_scale=SCALE).cpu()
    for row in range(rows):  # equal logits: the mean of the positions in the window
        first = max(0, row - window_left)
        assert torch.allclose(out[row, :, 0], torch.tensor((first + row) / 2), rtol=1e-6)


@pytest.mark.parametrize("specs", [[FULL], [FULL, LOCAL, mla_spec()]], ids=["one group", "three groups"])
@pytest.mark.parametrize("append", [True, False])
def test_an_empty_batch_and_requests_without_tokens_are_ordinary(specs, append):
    cache = make_cache(specs)
    twin = Twin(cache)
    twin.step([], append=append, verify=True)
    a, b = twin.add(7), twin.add()
    before = whole_state(cache)
    for items in ([], [(a, 0)], [(b, 0), (a, 0)]):
        twin.step(items, append=append, verify=True)
        assert_same_state(whole_state(cache), before)
    cache.check()


def test_layers_of_different_kinds_do_not_share_one_page_table():
    cache = make_cache([FULL, LOCAL, FULL])
    twin = Twin(cache)
    a, b = twin.add(30), twin.add(3)
    twin.step([(b, 9)], verify=True)
    full, local = cache.page_table(b, layer=0), cache.page_table(b, layer=1)
    assert full.tolist() != local.tolist()
    assert full.tolist() == cache.page_table(b, layer=2).tolist()
    assert (cache.page_table(a, layer=0) >= 0).all()
    assert (cache.page_table(a, layer=1)[:-3] == -1).all()
    twin.check()


def test_misuse_raises_sennits_own_errors_and_no_bare_assertion():
    cache = make_cache([FULL, LOCAL])
    twin = Twin(cache)
    a = twin.add(21)
    q, k = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8)

    def attend(layer, *tensors, **options):
        with cache.step([(a, 1)]) as step:
            step.attend(layer, *tensors, **options)

    misuses = [
        lambda: cache.trim(a, length=3),
        lambda: cache.fork(a, 3),
        lambda: cache.fork(a, 22),
        lambda: cache.remove(7),
        lambda: cache.page_table(a),
        lambda: cache.read(a, 2),
        lambda: cache.missing_pages([(a, -1)]),
        lambda: cache.step([(a, 1)]).__enter__().__enter__(),
        lambda: twin.step([(a, 9)], append=False),
        lambda: attend(2, q, k, k, sm_scale=SCALE),
        lambda: attend(0, q, k, k),
        lambda: attend(0, q, k, sm_scale=SCALE),
        lambda: attend(0, q[:0], k, k, sm_scale=SCALE),
        lambda: KVCache([FULL], num_tokens=8, device="cpu", kv_owner={0: 0}),
        lambda: KVCache([FULL], num_tokens=8, device="cpu", layers=range(2)),
    ]
    for misuse in misuses:
        with pytest.raises(SennitError) as caught:
            misuse()
        assert not isinstance(caught.value, CacheCorrupt)
        if cache._sequences.open_step is not None:  # of the step that was entered twice
            cache._sequences.rollback(cache._sequences.open_step.owner)
    twin.check()
    cache.check()


def test_everything_but_the_layers_of_a_cache_is_given_by_name():
    """A positional constructor is a promise about the order of its arguments for ever."""
    kinds = [p.kind for p in inspect.signature(KVCache).parameters.values()]
    assert kinds[0] == inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds[1:]) == {inspect.Parameter.KEYWORD_ONLY}
    for operation, positional in ((KVCache.step, ["self", "items"]), (KVCache.trim, ["self", "seq"])):
        parameters = inspect.signature(operation).parameters.values()
        assert [p.name for p in parameters if p.kind != inspect.Parameter.KEYWORD_ONLY] == positional
