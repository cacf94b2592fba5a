"""Windows and layer groups, integers only: what is released, what is kept, and what is all or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from test_sequences import assert_marked_cells_suffice, grown, state, write

from sennit.cache.groups import PageGroup
from sennit.cache.invariants import check_sequences
from sennit.cache.pages import PagePool
from sennit.cache.sequences import Sequences
from sennit.errors import CacheCorrupt, OutOfPages, PagesReleased

STEP = object()  # the owner of a reservation


def windowed(window_left, sinks=0, *, num_pages=60, page_size=4):
    return Sequences([PageGroup(PagePool(num_pages), page_size, window_left, sinks)])


def hybrid(*windows, num_pages=60, page_size=4):
    """A group of all tokens, and one for each ``(window_left, num_sink_tokens)``."""
    full = PageGroup(PagePool(num_pages), page_size, name="layer 0")
    local = [PageGroup(PagePool(num_pages), page_size, *w, f"layer {i}") for i, w in enumerate(windows, start=1)]
    return Sequences([full, *local])


def held(sequences, seq, group=0):
    """Tokens of a sequence whose page is there."""
    pages = sequences.pages(seq, group)
    return [token for token in range(sequences.length(seq)) if pages[token // sequences.page_size] != -1]


def needed(length, window_left, sinks):
    """Tokens that rows from position ``length`` on can see, and the last one: the cache keeps its page in any case."""
    return {token for token in range(length) if token >= length - max(window_left, 1) or token < sinks}


def test_pages_behind_the_window_are_freed_and_their_cells_say_so():
    sequences = windowed(5)
    (a,) = grown(sequences, 8)
    assert sequences.pages(a).tolist() == [0, 1], "the row at position 8 sees token 3"
    write(sequences, [(a, 1)])
    assert sequences.pages(a).tolist() == [-1, 1, 2], "the row at position 9 does not"
    assert sequences.groups[0].pool.num_free == 58
    write(sequences, [(a, 30)])
    assert held(sequences, a) == [*range(32, 39)], "the row at position 39 sees tokens 34 to 38"
    assert sequences.groups[0].pool.num_free == 58
    sequences.remove(a)
    assert sequences.groups[0].pool.num_free == 60
    check_sequences(sequences)


def test_pages_of_sink_tokens_stay():
    sequences = windowed(5, sinks=6)
    (a,) = grown(sequences, 40)
    assert held(sequences, a) == [*range(8), *range(32, 40)], "two pages hold the 6 sinks, two the tokens 35 to 39"


@pytest.mark.parametrize("tokens", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_window_of_1023_holds_the_same_number_of_pages_however_many_tokens_are_generated(tokens):
    """Of pages of 16 the window covers 64, or 65 where it begins inside one, and the sinks are in one more."""
    sequences = windowed(1023, sinks=4, num_pages=70, page_size=16)
    seq, pool, used = sequences.add(), sequences.groups[0].pool, set()
    for length in range(1, tokens + 1):
        sequences.reserve(STEP, [(seq, 1)])
        sequences.commit(STEP)
        if length > 1100:
            used.add((length % 16, 70 - pool.num_free))
    assert sequences.length(seq) == tokens
    assert used == {(offset, 65 if offset in (0, 15) else 66) for offset in range(16)}
    check_sequences(sequences)


@pytest.mark.parametrize("sinks", [0, 1, 4, 7])
@pytest.mark.parametrize("window_left", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_what_rows_can_see_is_held_and_not_a_page_more(window_left, sinks, page_size):
    """Every length, reached in one chunk, token by token, and in between, however much longer than the window."""
    for chunk in (1, 2, 5, 23):
        sequences = windowed(window_left, sinks, page_size=page_size)
        seq = sequences.add()
        for length in range(chunk, 47, chunk):
            write(sequences, [(seq, chunk)])
            wanted = needed(length, window_left, sinks)
            pages = {token // page_size for token in wanted}
            assert held(sequences, seq) == [token for token in range(length) if token // page_size in pages]


@pytest.mark.parametrize("sinks", [0, 1, 4, 7])
@pytest.mark.parametrize("window_left", [0, 1, 3, 4, 11])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_cut_is_right_or_refused_at_every_length(window_left, sinks, page_size):
    """Fork and trim succeed exactly where all that later rows see is held, and then the pages are the same."""
    for stored in (5, 12, 29, 40):
        sequences = windowed(window_left, sinks, num_pages=200, page_size=page_size)
        (seq,) = grown(sequences, stored)
        there = set(held(sequences, seq))
        possible = [length for length in range(stored + 1) if needed(length, window_left, sinks) <= there]
        assert {0, stored} <= set(possible)
        run = next(n for n in range(stored, -1, -1) if n == 0 or n - 1 not in possible)
        assert sequences.shortest(seq) == run, "every length from here on is possible"
        for length in range(stored + 1):
            before, pages = state(sequences), sequences.pages(seq)
            if length in possible:
                fork, other = sequences.fork(seq, length), sequences.fork(seq)
                sequences.trim(other, length)
                kept = pages[: -(-length // page_size)].tolist()
                assert sequences.pages(fork).tolist() == sequences.pages(other).tolist() == kept
                check_sequences(sequences)
                write(sequences, [(fork, 3), (other, 2 * page_size + 1)])
                for one in (fork, other):
                    assert needed(sequences.length(one), window_left, sinks) <= set(held(sequences, one))
                assert sequences.pages(seq).tolist() == pages.tolist(), "nobody's pages but their own have changed"
                sequences.remove(fork)
                sequences.remove(other)
            else:
                for cut in (sequences.fork, sequences.trim):
                    with pytest.raises(PagesReleased, match=f"cannot go back to {length} tokens") as caught:
                        cut(seq, length)
                    assert caught.value.shortest == run
                    assert (caught.value.sequence, caught.value.length) == (seq, length)
                    assert state(sequences) == before
            check_sequences(sequences)


@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize("max_trim", [1, 4, 9])
def test_the_last_max_trim_tokens_can_always_be_taken_back(max_trim, sinks):
    rng = np.random.default_rng(max_trim)
    group = PageGroup(PagePool(60), 4, 6, sinks, max_trim=max_trim)
    sequences = Sequences([group])
    seq, longest = sequences.add(), 0
    for _ in range(200):
        write(sequences, [(seq, int(rng.integers(1, 12)))])
        assert len(sequences.pages(seq)[sequences.pages(seq) >= 0]) <= group.kept_at_most()
        longest = max(longest, sequences.length(seq))
        back = min(max(longest - int(rng.integers(0, max_trim + 1)), 0), sequences.length(seq))
        sequences.trim(seq, back)
        assert needed(back, 6, sinks) <= set(held(sequences, seq))
        check_sequences(sequences)


def test_a_sequence_cut_into_its_sinks_grows_and_slides_again():
    sequences = windowed(4, sinks=5)
    (a,) = grown(sequences, 30)
    assert sequences.shortest(a) == 28
    sequences.trim(a, 7)
    assert sequences.shortest(a) == 0
    write(sequences, [(a, 2)])
    assert held(sequences, a) == [*range(9)]
    write(sequences, [(a, 20)])
    assert held(sequences, a) == [*range(8), *range(24, 29)]


def test_a_page_that_a_fork_still_sees_outlives_the_window_of_the_other():
    sequences = windowed(4)
    (a,) = grown(sequences, 9)
    b = sequences.fork(a)
    shared = sequences.pages(a).tolist()
    write(sequences, [(a, 20)])
    assert sequences.pages(b).tolist() == shared
    assert held(sequences, b) == [4, 5, 6, 7, 8]
    assert sequences.groups[0].pool.refs[shared[1:]].tolist() == [1, 1]
    write(sequences, [(b, 20)])
    assert 60 - sequences.groups[0].pool.num_free == 4, "two pages each, and none of those shared"


def test_forks_whose_windows_leave_a_shared_page_in_one_step_free_it_once():
    sequences = windowed(4)
    (a,) = grown(sequences, 8)
    forks = [sequences.fork(a) for _ in range(3)]
    write(sequences, [(seq, 9) for seq in (a, *forks)])
    assert 60 - sequences.groups[0].pool.num_free == 4 * 2
    assert sequences.groups[0].pool.refs.max() == 1


def test_a_step_larger_than_the_window_stores_all_its_tokens_until_it_ends():
    sequences = windowed(4)
    (a,) = grown(sequences, 6)
    reservation = sequences.reserve(STEP, [(a, 40)])
    assert (reservation.kv_lens.tolist(), reservation.max_pages) == ([46], 12)
    assert 60 - sequences.groups[0].pool.num_free == 12
    sequences.commit(STEP)
    assert 60 - sequences.groups[0].pool.num_free == 2


def test_pages_are_copied_for_a_writer_and_released_in_the_same_step():
    sequences = windowed(4)
    (a,) = grown(sequences, 6)
    b = sequences.fork(a)
    source = sequences.pages(b)[1]
    reservation = write(sequences, [(b, 12)])
    assert reservation.copies[0].source.tolist() == [source]
    assert sequences.pages(b).tolist()[:3] == [-1, -1, -1]
    assert sequences.pages(a).tolist() == [0, 1]
    assert sequences.groups[0].pool.refs[reservation.copies[0].target].tolist() == [0]


def test_rollback_restores_released_pages_in_the_order_of_the_free_list():
    sequences = hybrid((5, 2), (9, 0))
    a, b = grown(sequences, 30, 11)
    c, d = sequences.fork(a), sequences.fork(b, 10)
    before = state(sequences)
    for half_done in range(4):
        sequences.reserve(STEP, [(a, 30), (c, 2), (b, 7), (d, 1)])
        step = sequences.open_step
        if half_done:  # as a commit that is interrupted after so many groups
            for group in range(half_done):
                sequences._release(group, step.slots, step.changes[group])
        assert state(sequences) != before
        sequences.rollback(STEP)
        assert state(sequences) == before
        check_sequences(sequences)


def test_without_append_rows_attend_to_what_is_held_or_are_refused():
    sequences = windowed(5)
    (a,) = grown(sequences, 23)
    there = set(held(sequences, a))
    for count in range(30):
        before = state(sequences)
        seen = {token for row in range(23 - count, 23) for token in range(max(row - 5, 0), 23)}
        if seen <= there:
            sequences.reserve(STEP, [(a, count)], append=False)
            sequences.commit(STEP)
        else:
            with pytest.raises(PagesReleased, match=f"rows from position {23 - count} on") as caught:
                sequences.reserve(STEP, [(a, count)], append=False)
            assert (caught.value.sequence, caught.value.length, caught.value.shortest) == (a, 23 - count, 21)
            assert sequences.open_step is None
        assert state(sequences) == before


# Groups


def test_all_groups_have_the_same_lengths_and_tables_of_their_own():
    sequences = hybrid((5, 0))
    a, b = grown(sequences, 10, 4)
    assert sequences.pages(a).tolist() == [0, 1, 2]
    assert sequences.pages(a, group=1).tolist() == [-1, 1, 2]
    write(sequences, [(b, 3)])
    assert sequences.pages(b).tolist() == [3, 4]
    assert sequences.pages(b, group=1).tolist() == [3, 0], "the page freed by the window is used again"


def test_a_group_that_is_full_is_named_and_no_group_has_changed():
    sequences = Sequences(
        [PageGroup(PagePool(20), 4, name="layer 0"), PageGroup(PagePool(6), 4, 7, name="layer 1 with window_left=7")]
    )
    (a,) = grown(sequences, 20)
    b = sequences.fork(a)
    before = state(sequences)
    with pytest.raises(
        OutOfPages, match=r"needs 8 pages of 4 tokens in layer 1 with window_left=7 and 4 of 6 are free"
    ) as caught:
        sequences.reserve(STEP, [(a, 14), (b, 13)])
    assert (caught.value.needed, caught.value.free, caught.value.total) == (8, 4, 6)
    assert state(sequences) == before
    assert sequences.missing_pages([(a, 14), (b, 13)], 0) == 4
    assert sequences.pages_needed([(a, 14), (b, 13)]) == 16
    write(sequences, [(a, 14)])


def test_missing_pages_is_what_the_worst_group_lacks():
    sequences = hybrid((5, 0), num_pages=8)
    (a,) = grown(sequences, 26)  # 7 pages in one group, 2 in the other
    assert sequences.missing_pages([(a, 1)], 0) == 0
    assert sequences.missing_pages([(a, 1)], 1) == 0
    assert sequences.missing_pages([(a, 6)], 0) == 0
    assert sequences.missing_pages([(a, 6)], 1) == 1
    assert sequences.missing_pages([(a, 7)], 0) == 1
    assert sequences.missing_pages([(a, 7)], 3) == 4
    assert sequences.missing_pages([], 0) == 0
    b = sequences.fork(a)
    assert sequences.missing_pages([(a, 2), (b, 2)], 0) == 0, "of two writers of a page one gets a copy"
    assert sequences.missing_pages([(a, 3), (b, 2)], 0) == 1


def test_a_cut_that_one_group_cannot_make_changes_none():
    sequences = hybrid((5, 0), (12, 0))
    (a,) = grown(sequences, 43)
    assert sequences.shortest(a) == 41, "the next row of 41 tokens sees 36 to 40, and 0 to 35 are gone in one group"
    before = state(sequences)
    for cut in (sequences.fork, sequences.trim):
        with pytest.raises(PagesReleased, match="any length from 41 to its 43"):
            cut(a, 40)  # the longer window would allow it
        assert state(sequences) == before
    sequences.trim(a, 41)
    assert [len(sequences.pages(a, group)) for group in range(3)] == [11, 11, 11]


def test_marked_cells_bring_a_mirror_up_to_date_after_windows_slid():
    sequences = hybrid((3, 0), (6, 5), page_size=2)
    assert_marked_cells_suffice(sequences, seed=9, operations=800, most=8)
    assert sequences.tables.released.any(), "windows have slid"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda s: s.tables.pages.__setitem__((1, 0, 7), -1), "expected pages below 60, got -1"),
        (lambda s: s.tables.pages.__setitem__((1, 0, 2), 50), "behind a window still holds its page"),
        (lambda s: s.tables.pages.__setitem__((0, 0, 2), -1), "expected pages below 60, got -1"),
        (lambda s: s.tables.released.__setitem__((1, 0), 5), "expected pages below 60, got -1"),
        (lambda s: s.tables.released.__setitem__((1, 0), 1), "expected pages below 60, got -1"),
        (lambda s: s.groups[1].pool.refs.__setitem__(0, 2), "page 0: 1 tables hold it, and its count is 2"),
    ],
    ids=["live page", "page behind", "page of a full group", "less released", "sinks released", "count"],
)
def test_check_finds_damage_to_a_window(damage, text):
    sequences = hybrid((5, 3))
    grown(sequences, 30, 2)
    check_sequences(sequences)
    damage(sequences)
    with pytest.raises(CacheCorrupt, match=text):
        check_sequences(sequences)


def test_check_finds_pages_that_were_released_too_early():
    sequences = windowed(5)
    (a,) = grown(sequences, 30)
    slot, pool = sequences.slots[a], sequences.groups[0].pool
    pool.release(sequences.tables.pages[0, slot, 6:7].copy())
    sequences.tables.pages[0, slot, 6], sequences.tables.released[0, slot] = -1, 7
    with pytest.raises(CacheCorrupt, match=r"pages up to 7 are released, which may be from 0.* to 6"):
        check_sequences(sequences)


def test_pages_that_others_hold_do_not_come_back_when_a_window_passes_them():
    sequences = windowed(15, num_pages=8)
    (a,) = grown(sequences, 16)
    fork = sequences.fork(a)
    missing = sequences.missing_pages([(fork, 40)], 0, 4)
    assert missing > 0
    for _ in range(4):
        write(sequences, [(fork, 4)])
    with pytest.raises(OutOfPages):
        write(sequences, [(fork, 4)])
    sequences.remove(a)
    sequences.trim(fork, sequences.length(fork))
    assert sequences.missing_pages([(fork, 40)], 0, 4) == 0
    for _ in range(10):
        write(sequences, [(fork, 4)])


def test_rows_without_append_are_told_the_shortest_length_of_all_windows():
    sequences = Sequences([PageGroup(PagePool(60), 4, 7), PageGroup(PagePool(60), 4, 6)])
    (a,) = grown(sequences, 30)
    with pytest.raises(PagesReleased, match=f"only those from {sequences.shortest(a)} on") as caught:
        sequences.reserve(STEP, [(a, 5)], append=False)
    assert caught.value.shortest == sequences.shortest(a) == 30
