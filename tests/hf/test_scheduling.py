"""Scheduling decisions and the prefix index are pure functions of integers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.hf.prefixes import PrefixIndex
from sennit.hf.scheduling import cut_to_pages, growing_room, share_budget

PAGE = 4


def pages(chunks: Sequence[tuple[int, int]]) -> int:
    """Pages of chunks that each begin on a new page."""
    return sum(-(-tokens // PAGE) for _, tokens in chunks)


running = st.lists(st.integers(1, 40), max_size=8).map(lambda counts: list(enumerate(counts)))


@given(running, st.integers(8, 60))
def test_budget_serves_every_decode_then_prompts_in_start_order(pending: list[tuple[int, int]], budget: int) -> None:
    chunks = dict(share_budget(pending, max_tokens=budget))
    decodes = [sequence for sequence, tokens in pending if tokens == 1]
    assert all(chunks[sequence] == 1 for sequence in decodes)
    left = budget - len(decodes)
    for sequence, tokens in pending:
        if tokens > 1:
            assert chunks.get(sequence, 0) == min(tokens, left)
            left -= min(tokens, left)
    assert list(chunks) == sorted(chunks)


@given(running, st.integers(8, 60), st.integers(0, 30))
def test_chunks_fit_the_free_pages_and_decodes_are_never_cut(
    pending: list[tuple[int, int]], budget: int, free: int
) -> None:
    wanted = share_budget(pending, max_tokens=budget)
    got = cut_to_pages(wanted, missing_pages=lambda chunks: max(0, pages(chunks) - free))
    ones = [chunk for chunk in wanted if chunk[1] == 1]
    if got is None:
        assert pages(ones) > free or (not ones and free == 0)
        return
    assert pages(got) <= free
    assert [chunk for chunk in wanted if chunk[1] == 1] == [chunk for chunk in got if chunk[0] in dict(ones)]
    assert all(0 < tokens <= dict(wanted)[sequence] for sequence, tokens in got)
    # Nothing that would still fit is left out: the first chunk that was cut cannot have one token more.
    cut = next(((s, n) for s, n in wanted if dict(got).get(s, 0) < n), None)
    if cut is not None:
        sequence, _ = cut
        before = [c for c in got if c[1] == 1 and c[0] in dict(ones)]
        before += [c for c in got if c[0] < sequence and c[0] not in dict(ones)]
        assert pages([*before, (sequence, dict(got).get(sequence, 0) + 1)]) > free


def test_nothing_pending_gives_nothing() -> None:
    assert share_budget([], max_tokens=8) == []
    assert cut_to_pages([], missing_pages=pages) == []


def test_a_lone_sequence_needs_no_room_to_grow_beside_others() -> None:
    assert growing_room(0) == 0
    assert growing_room(3) == 4


sequences = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=6)


@given(sequences, st.lists(st.integers(0, 1), max_size=14), st.lists(st.integers(0, 8), min_size=6), st.data())
def test_index_finds_the_longest_common_prefix(
    known: list[list[int]], tokens: list[int], shortest: list[int], data: st.DataObject
) -> None:
    index = PrefixIndex(block_size=3)
    lengths = {}
    for sequence, theirs in enumerate(known):
        steps = sorted(data.draw(st.lists(st.integers(0, len(theirs)), min_size=1, max_size=3)))
        for length in steps:
            index.extend(sequence, theirs, length=length)
        lengths[sequence] = steps[-1]
    for sequence in data.draw(st.sets(st.integers(0, 5))):
        index.remove(sequence)
        lengths.pop(sequence, None)

    def common(sequence: int) -> int:
        limit = min(lengths[sequence], len(tokens))
        return next((i for i in range(limit) if known[sequence][i] != tokens[i]), limit)

    expected = max((n for sequence in lengths if (n := common(sequence)) >= shortest[sequence]), default=0)
    found, length = index.find(tokens, shortest=shortest.__getitem__)
    if expected < 3:
        assert (found, length) == (None, 0)
    else:
        assert found is not None
        assert length == expected == common(found)
        assert length >= shortest[found]


def test_index_verifies_tokens_when_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.hash", lambda value: 7)
    index = PrefixIndex(block_size=2)
    index.extend(0, [1, 2, 3, 4], length=4)
    index.extend(1, [5, 6, 7, 8], length=4)
    assert index.find([5, 6, 7, 9]) == (1, 3)
    assert index.find([9, 9, 9, 9]) == (None, 0)


def test_index_forgets_everything_that_is_removed() -> None:
    index = PrefixIndex(block_size=2)
    index.extend(0, [1, 2, 3, 4], length=4)
    assert 0 in index
    index.remove(0)
    index.remove(0)
    assert 0 not in index
    assert index.find([1, 2, 3, 4]) == (None, 0)
    assert not index._holders


def test_index_offers_only_what_has_been_computed() -> None:
    index = PrefixIndex(block_size=2)
    index.extend(0, [1, 2, 3, 4, 5, 6], length=3)
    assert index.find([1, 2, 3, 4, 5, 6]) == (0, 3)
    index.extend(0, [1, 2, 3, 4, 5, 6], length=6)
    assert index.find([1, 2, 3, 4, 5, 6]) == (0, 6)
