"""Batches over layers with windows: memory of a window's size, forks near a sequence's end, room for many steps."""

from __future__ import annotations

import random

import pytest
import torch
from batches import drain
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import reference_tokens, tiny_model

import sennit.hf.sizing
from sennit import AttentionSpec
from sennit.cache.groups import PageGroup
from sennit.cache.pages import PagePool
from sennit.cache.sequences import Sequences
from sennit.errors import CapacityExceeded, InvalidInput
from sennit.hf import Batcher
from sennit.hf.sizing import default_tokens, longest_alone
from sennit.kvcache import KVCache

WINDOW, PAGE = 7, 4
SPEC = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=2, dtype=torch.float32)
LOCAL = SPEC.replace(window_left=WINDOW - 1)
SIZES = {"page_size": PAGE, "max_batch_tokens": 16, "max_requests": 3}


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def test_prompts_far_longer_than_the_memory_of_windows_are_served_in_steps() -> None:
    model = tiny_model("mistral", sliding_window=WINDOW)
    prompts = [random_prompt(length, length) for length in (900, 3, 450, 200)]
    with Batcher(model, num_tokens=100_000, **SIZES) as batcher:
        # For each of three requests 6 positions behind, two pages of slack, and a step of 16 tokens.
        assert batcher.cache.num_pages == 3 * (2 + 2) + 4
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=6)
        _, done = drain(batcher)
        assert batcher.stats().preemptions == 0
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, 6), i
        assert done[i].finish_reason == "length"


def test_windows_leave_the_memory_to_the_other_layers() -> None:
    model = tiny_model("gemma2", sliding_window=WINDOW)
    with Batcher(model, num_tokens=400, **SIZES) as batcher:
        pages = {group.name: group.num_pages for group in batcher.cache.stats().groups}
        assert sorted(pages.values()) == [16, 100]
        batcher.submit(prompt := random_prompt(380), max_new_tokens=6)
        _, done = drain(batcher)
    assert done[0].token_ids == reference_tokens(model, prompt, 6)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_prompt_that_continues_a_finished_request_is_forked_and_an_older_prefix_is_not(name: str) -> None:
    model = tiny_model(name, sliding_window=WINDOW)
    first = random_prompt(40)
    with Batcher(model, num_tokens=400, **SIZES) as batcher:
        batcher.submit(first, max_new_tokens=6)
        _, done = drain(batcher)
        longer = first + done[0].token_ids + random_prompt(5, 1)
        batcher.submit(longer, max_new_tokens=6)
        _, done = drain(batcher)
        # All but the last generated token, which was never computed.
        assert (batcher.stats().forks, batcher.stats().tokens_shared) == (1, 45)
        assert done[1].token_ids == reference_tokens(model, longer, 6)
        older = first[:30] + random_prompt(9, 2)
        batcher.submit(older, max_new_tokens=6)
        _, done = drain(batcher)
        assert batcher.stats().forks == 1
        assert done[2].token_ids == reference_tokens(model, older, 6)


@pytest.mark.parametrize(("name", "running"), [("mistral", 3), ("llama", 1)])
def test_prompts_that_begin_alike_wait_for_each_other_only_where_they_can_share(name: str, running: int) -> None:
    model, common = tiny_model(name), random_prompt(16)
    prompts = [common + random_prompt(4, seed) for seed in range(3)]
    with Batcher(model, num_tokens=400, **(SIZES | {"max_batch_tokens": 64})) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=4)
        batcher.step()
        assert batcher.stats().running == running
        _, done = drain(batcher)
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, 4), i


def test_a_cache_too_small_for_the_window_ends_a_request_with_its_capacity() -> None:
    model, prompt = tiny_model("mistral", sliding_window=100), random_prompt(20)
    with Batcher(model, num_tokens=32, **SIZES) as batcher:
        batcher.submit(prompt, max_new_tokens=50)
        _, done = drain(batcher)
    assert done[0].finish_reason == "capacity"
    assert done[0].token_ids == reference_tokens(model, prompt, 32 + 1 - 20)


@pytest.mark.parametrize("num_tokens", [9, 10, 12, 15, 20, 27, 33, 34, 35, 36])
def test_windows_in_all_layers_pass_any_prompt_through_a_cache_that_holds_little_more_than_one(num_tokens: int) -> None:
    """From the fewest pages that a window and a new token take to those of a whole step."""
    model, prompts = tiny_model("mistral", sliding_window=WINDOW), [random_prompt(n, n) for n in (50, 3, 61)]
    with Batcher(model, page_size=1, num_tokens=num_tokens, max_batch_tokens=27, max_requests=3) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=4)
        _, done = drain(batcher)
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, 4), i


@pytest.mark.parametrize("num_tokens", [WINDOW, WINDOW + 1])
def test_a_prompt_longer_than_a_cache_that_holds_no_window_and_step_is_refused(num_tokens: int) -> None:
    model = tiny_model("mistral", sliding_window=WINDOW)
    with Batcher(model, page_size=1, num_tokens=num_tokens, max_batch_tokens=27, max_requests=3) as batcher:
        with pytest.raises(CapacityExceeded):
            batcher.submit(random_prompt(50))
        batcher.submit(prompt := random_prompt(3), max_new_tokens=3)
        _, done = drain(batcher)
    assert done[0].token_ids == reference_tokens(model, prompt, 3)


def test_the_longest_sequence_alone_is_endless_only_where_every_layer_has_a_window() -> None:
    options = {"num_tokens": 200, "page_size": PAGE, "max_sequences": 1, "max_step_tokens": 4, "device": "cpu"}
    assert longest_alone(KVCache([SPEC, LOCAL], **options)) == 200
    assert longest_alone(KVCache([LOCAL], **options)) is None
    # A window of 7 keeps two pages and may need two more, and the step's tokens have a page of their own.
    assert longest_alone(KVCache([LOCAL], **(options | {"num_tokens": 17}))) is None
    assert longest_alone(KVCache([LOCAL], **(options | {"num_tokens": 16}))) == 16


@pytest.mark.parametrize("specs", [[SPEC, LOCAL], [LOCAL, LOCAL], [SPEC, LOCAL, LOCAL, SPEC.replace(head_dim=4)]])
@pytest.mark.parametrize("free", [400, 4_000, 100_000, 10**9])
def test_default_sizes_take_their_part_of_the_memory_as_the_cache_divides_it(
    specs: list[AttentionSpec], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sennit.hf.sizing, "free_bytes", lambda device: free)
    sizes = {"page_size": PAGE, "max_requests": 2, "max_batch_tokens": 8}
    tokens = default_tokens(1000, specs, torch.device("cpu"), **sizes)

    def bytes_of(count: int) -> int:
        options = {"max_sequences": 2, "max_step_tokens": 8, "page_size": PAGE, "device": "cpu"}
        stats = KVCache(specs, num_tokens=count, **options).stats()
        pages = {"window" in group.name: group.num_pages for group in stats.groups}
        return sum(s.kv_bytes_per_token * PAGE * pages[s.window_left is not None] for s in specs)

    assert bytes_of(tokens) <= free // 4 or tokens == PAGE
    assert tokens == 1000 or bytes_of(tokens + PAGE) > free // 4


sequences = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), min_size=1, max_size=3)


@given(sequences, st.integers(1, 20), st.integers(1, 24), st.sampled_from([1, 3, 4]), st.integers(0, 2**32))
def test_what_fits_in_steps_never_runs_out_of_pages(
    known: list[tuple[int, int]], step_tokens: int, pages: int, page_size: int, seed: int
) -> None:
    """Whatever the order, as long as no step has more tokens than were said."""
    cache, rng = Sequences([PageGroup(PagePool(pages), page_size, WINDOW - 1)]), random.Random(seed)

    def compute(items: dict[int, int]) -> None:
        cache.reserve(rng, items.items())
        cache.commit(rng)

    pending = {}
    for before, after in known:
        sequence = cache.add()
        for _ in range(before):
            if not cache.missing_pages([(sequence, 1)], 0):
                compute({sequence: 1})
        pending[sequence] = after
    if cache.missing_pages(pending.items(), 0, step_tokens):
        return
    while any(pending.values()):
        items, budget = {}, rng.randint(1, step_tokens)
        for sequence in rng.sample(list(pending), len(pending)):
            items[sequence] = rng.randint(0, min(budget, pending[sequence]))
            budget -= items[sequence]
            pending[sequence] -= items[sequence]
        compute(items)


def test_layers_without_a_window_need_all_pages_whatever_the_steps() -> None:
    cache = KVCache([SPEC, LOCAL], page_size=PAGE, num_tokens=40, device="cpu")
    a = cache.add()
    assert cache.missing_pages([(a, 44)], max_step_tokens=4) == 1
    assert cache.missing_pages([(a, 40)], max_step_tokens=4) == 0
    assert cache.missing_pages([(a, 36)], max_step_tokens=4, spare=2) == 1
    with pytest.raises(InvalidInput, match="max_step_tokens"):
        cache.missing_pages([(a, 1)], max_step_tokens=0)
