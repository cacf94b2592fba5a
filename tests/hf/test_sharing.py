"""Sequences share what is computed, wait for what is being computed, and are kept until their room is needed."""

from __future__ import annotations

import pytest
import torch

from sennit import AttentionSpec
from sennit.hf.queue import RequestQueue
from sennit.hf.requests import Request
from sennit.hf.sampling import Sampling
from sennit.hf.sharing import SharedSequences
from sennit.hf.text import TextStream
from sennit.kvcache import KVCache

TOKENS = list(range(20))


@pytest.fixture
def cache() -> KVCache:
    spec = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    return KVCache([spec], page_size=4, num_tokens=64, device="cpu")


def shared(cache: KVCache, max_retained: int = 8) -> SharedSequences:
    return SharedSequences(cache, share=True, max_retained=max_retained)


def compute(cache: KVCache, sequences: SharedSequences, sequence: int, tokens: list[int], count: int) -> None:
    """Put ``count`` more tokens of a sequence into the cache."""
    with cache.step([(sequence, count)]) as step:
        q = torch.zeros(count, 1, 2)
        step.attend(0, q, q, q, sm_scale=1.0)
    sequences.computed(sequence, tokens, cache.length(sequence))


def begin(cache: KVCache, sequences: SharedSequences, tokens: list[int], count: int) -> int:
    started = sequences.start(tokens)
    assert started is not None
    sequences.started(started[0], tokens, started[1])
    compute(cache, sequences, started[0], tokens, count)
    return started[0]


def test_a_prefix_that_is_being_computed_is_waited_for(cache: KVCache) -> None:
    sequences = shared(cache)
    first = begin(cache, sequences, TOKENS, 9)
    assert sequences.start([*TOKENS[:16], 99]) is None
    # Less than a page more is not worth a step.
    started = sequences.start([*TOKENS[:12], 99])
    assert started is not None
    assert started[1] == 9
    compute(cache, sequences, first, TOKENS, 11)
    started = sequences.start([*TOKENS[:16], 99])
    assert started is not None
    assert started[1] == 16


def test_only_what_is_in_the_cache_is_forked(cache: KVCache) -> None:
    sequences = shared(cache)
    first = begin(cache, sequences, TOKENS, 18)
    started = sequences.start(TOKENS)
    assert started is not None
    assert started[1] == 18 == cache.length(started[0]) == cache.length(first)


def test_one_token_is_always_left_to_compute(cache: KVCache) -> None:
    sequences = shared(cache)
    begin(cache, sequences, TOKENS, 20)
    for length in (20, 16, 13):
        started = sequences.start(TOKENS[:length])
        assert started is not None
        assert started[1] == length - 1


def test_a_sequence_that_was_dropped_is_neither_forked_nor_waited_for(cache: KVCache) -> None:
    sequences = shared(cache)
    sequences.drop(begin(cache, sequences, TOKENS, 9))
    assert sequences.start(TOKENS) == (cache.sequences[-1], 0)


def test_the_retained_sequence_used_longest_ago_goes_first(cache: KVCache) -> None:
    sequences = shared(cache)
    prompts = [[i * 10 + j for j in range(8)] for i in range(3)]
    kept = [begin(cache, sequences, prompt, 8) for prompt in prompts]
    for sequence in kept:
        sequences.retire(sequence)
    fork = sequences.start(prompts[0])  # the oldest is used again
    assert fork is not None
    sequences.drop(fork[0])
    for expected in ([kept[0], kept[2]], [kept[0]], []):
        new = cache.add()
        free = cache.free_pages
        assert sequences.make_room([(new, 4 * free + 1)])
        cache.remove(new)
        assert cache.sequences == expected
    assert not sequences.make_room([(cache.add(), 65)])
    assert sequences.evictions == 3


def test_no_more_sequences_are_retained_than_allowed(cache: KVCache) -> None:
    sequences = shared(cache, max_retained=2)
    for i in range(4):
        sequences.retire(begin(cache, sequences, [i * 10 + j for j in range(8)], 8))
    assert sequences.num_retained == 2
    assert len(cache.sequences) == 2
    assert sequences.evictions == 0


def test_a_sequence_shorter_than_a_page_is_not_retained(cache: KVCache) -> None:
    sequences = shared(cache)
    sequences.retire(begin(cache, sequences, [1, 2, 3], 3))
    assert cache.sequences == []


def test_a_request_that_has_outgrown_the_cache_while_it_waited_ends(cache: KVCache) -> None:
    queue = RequestQueue(shared(cache), capacity=64, max_batch_tokens=8, max_step_tokens=8, max_requests=4)
    for length in (65, 64):
        queue.waiting.append(Request(length, [1] * length, 5, Sampling(), frozenset(), False, TextStream(None)))
    chunks = queue.schedule()
    assert [(e.request, e.finish_reason) for e in queue.ended] == [(65, "capacity")]
    assert [(r.id, n) for r, n in chunks] == [(64, 8)]
