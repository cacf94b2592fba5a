"""Sequences and page tables, integers only: sharing, copy-on-write, and steps that leave no trace when taken back."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sennit.cache.demand import pages_to_copy
from sennit.cache.groups import PageGroup
from sennit.cache.invariants import check_sequences
from sennit.cache.pages import PagePool
from sennit.cache.sequences import Sequences
from sennit.errors import CacheCorrupt, InvalidInput, OutOfPages, StepClosed, StepOpen, UnknownSequence

STEP = object()  # the owner of a reservation


def make(num_pages=16, page_size=4):
    return Sequences([PageGroup(PagePool(num_pages), page_size)])


def grown(sequences, *lengths):
    """One new sequence of each length."""
    ids = [sequences.add() for _ in lengths]
    write(sequences, list(zip(ids, lengths, strict=True)))
    return ids


def write(sequences, items):
    reservation = sequences.reserve(STEP, items)
    check_sequences(sequences)
    sequences.commit(STEP)
    check_sequences(sequences)
    return reservation


def state(sequences):
    """Everything that an operation may change, in a form that compares."""
    tables, pools = sequences.tables, [group.pool for group in sequences.groups]
    rows = {seq: tables.pages[:, slot, : tables.page_counts[slot]].tolist() for seq, slot in sequences.slots.items()}
    lengths = {seq: sequences.length(seq) for seq in sequences.slots}
    released = {seq: tables.released[:, slot].tolist() for seq, slot in sequences.slots.items()}
    free, refs = [pool.free.tolist() for pool in pools], [pool.refs.tolist() for pool in pools]
    return rows, lengths, released, free, refs, sequences.next_id, tables.free_slots[:]


def test_the_integer_parts_import_no_torch():
    code = "import sys, sennit.cache.invariants; assert 'torch' not in sys.modules"
    probe = (
        "import sys, types, pathlib; package = types.ModuleType('sennit'); "
        "package.__path__ = [str(pathlib.Path(sys.argv[1]))]; sys.modules['sennit'] = package; " + code
    )
    import sennit.cache

    root = sennit.cache.__path__[0].removesuffix("/cache")
    subprocess.run([sys.executable, "-c", probe, root], check=True)


def test_a_step_takes_exactly_the_pages_that_its_tokens_fill():
    sequences = make()
    (a,) = grown(sequences, 4)
    assert sequences.pages(a).tolist() == [0]
    assert sequences.pages_needed([(a, 0)]) == 0
    assert sequences.pages_needed([(a, 1)]) == sequences.pages_needed([(a, 4)]) == 1
    assert sequences.pages_needed([(a, 5)]) == 2
    write(sequences, [(a, 5)])
    assert sequences.length(a) == 9
    assert sequences.pages(a).tolist() == [0, 1, 2]


def test_pages_follow_the_order_of_the_batch():
    sequences = make()
    a, b = sequences.add(), sequences.add()
    write(sequences, [(b, 5), (a, 3)])
    assert sequences.pages(b).tolist() == [0, 1]
    assert sequences.pages(a).tolist() == [2]


def test_a_fork_shares_full_and_partly_filled_pages():
    sequences = make()
    (a,) = grown(sequences, 10)
    b = sequences.fork(a)
    assert sequences.pages(b).tolist() == sequences.pages(a).tolist() == [0, 1, 2]
    assert sequences.groups[0].pool.num_free == 13
    c = sequences.fork(a, 5)
    assert sequences.pages(c).tolist() == [0, 1]
    assert sequences.groups[0].pool.refs[:3].tolist() == [3, 3, 2]
    assert sequences.length(sequences.fork(a, 0)) == 0
    check_sequences(sequences)


def test_writing_to_a_shared_page_copies_it_for_the_writer_alone():
    sequences = make()
    (a,) = grown(sequences, 6)
    b = sequences.fork(a)
    assert sequences.pages_needed([(b, 1)]) == 1
    reservation = write(sequences, [(b, 1)])
    assert (reservation.copies[0].source.tolist(), reservation.copies[0].target.tolist()) == ([1], [2])
    assert sequences.pages(a).tolist() == [0, 1]
    assert sequences.pages(b).tolist() == [0, 2]
    assert sequences.groups[0].pool.refs[:3].tolist() == [2, 1, 1]
    assert sequences.pages_needed([(a, 1)]) == 0, "the other holder is alone now"


def test_a_fork_at_a_page_boundary_needs_no_copy():
    sequences = make()
    (a,) = grown(sequences, 8)
    b = sequences.fork(a)
    reservation = write(sequences, [(a, 1), (b, 1)])
    assert len(reservation.copies[0].source) == 0
    assert sequences.pages(a).tolist() == [0, 1, 2]
    assert sequences.pages(b).tolist() == [0, 1, 3]


def test_when_all_holders_write_the_longest_one_keeps_the_page():
    sequences = make()
    (a,) = grown(sequences, 3)
    forks = [sequences.fork(a, 1), sequences.fork(a, 2)]
    reservation = write(sequences, [(forks[0], 1), (a, 1), (forks[1], 1)])
    assert reservation.copies[0].source.tolist() == [0, 0]
    assert sequences.pages(a).tolist() == [0], "shorter holders would overwrite what the longest one has stored"
    assert [sequences.pages(fork).tolist() for fork in forks] == [[1], [2]]


def test_holders_that_do_not_write_keep_the_page_and_every_writer_copies():
    sequences = make()
    (a,) = grown(sequences, 3)
    b, c = sequences.fork(a), sequences.fork(a)
    assert sequences.pages_needed([(b, 1), (c, 1)]) == 2
    assert sequences.pages_needed([(a, 1), (b, 1), (c, 1)]) == 2
    assert sequences.pages_needed([(a, 0), (b, 1), (c, 1)]) == 2, "a request without tokens writes nothing"
    write(sequences, [(a, 0), (b, 1), (c, 1)])
    assert sequences.pages(a).tolist() == [0]


def test_a_fork_inside_a_page_that_is_full_for_the_parent_copies_that_page():
    sequences = make()
    (a,) = grown(sequences, 12)
    b = sequences.fork(a, 2)
    reservation = write(sequences, [(a, 1), (b, 1)])
    assert reservation.copies[0].source.tolist() == [0]
    assert sequences.pages(a)[0] == 0
    assert sequences.pages(b)[0] == reservation.copies[0].target[0] != 0


def test_pages_to_copy_agrees_with_a_plain_loop():
    rng = np.random.default_rng(5)
    for _ in range(300):
        writers = int(rng.integers(0, 12))
        pages = rng.integers(0, 5, writers).astype(np.int32)
        refs_of = np.array(
            [np.sum(pages == page) + (rng.integers(0, 3) if rng.random() < 0.5 else 0) for page in range(5)]
        )
        lengths = rng.integers(1, 4, writers)
        copied = set(pages_to_copy(pages, refs_of[pages].astype(np.int32), lengths).tolist())
        for page in set(pages.tolist()):
            group = [w for w in range(writers) if pages[w] == page]
            stay = [w for w in group if w not in copied]
            if refs_of[page] > len(group):
                assert not stay
            else:
                assert len(stay) == 1
                assert lengths[stay[0]] == max(lengths[w] for w in group)


def test_trim_drops_whole_pages_and_keeps_shared_ones_alive():
    sequences = make()
    (a,) = grown(sequences, 14)
    b = sequences.fork(a, 9)
    sequences.trim(a, 5)
    assert sequences.length(a) == 5
    assert sequences.pages(a).tolist() == [0, 1]
    assert sequences.pages(b).tolist() == [0, 1, 2]
    assert sequences.groups[0].pool.refs[:4].tolist() == [2, 2, 1, 0]
    sequences.trim(a, 5)
    sequences.trim(a, 0)
    assert sequences.pages(a).tolist() == []
    check_sequences(sequences)


def test_writing_after_a_trim_into_a_shared_page_copies_it():
    sequences = make()
    (a,) = grown(sequences, 8)
    b = sequences.fork(a)
    sequences.trim(a, 6)
    assert write(sequences, [(a, 1)]).copies[0].source.tolist() == [1]
    assert sequences.pages(b).tolist() == [0, 1]


def test_sequences_may_be_removed_in_any_order():
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]):
        sequences = make()
        (a,) = grown(sequences, 10)
        b = sequences.fork(a, 6)
        c = sequences.fork(b)
        ids = [a, b, c]
        write(sequences, [(b, 3), (c, 1)])
        for i in order:
            sequences.remove(ids[i])
            check_sequences(sequences)
        assert sequences.groups[0].pool.num_free == 16


def test_ids_are_never_used_again():
    sequences = make()
    a = sequences.add()
    sequences.remove(a)
    b = sequences.add()
    sequences.clear()
    assert len({a, b, sequences.add()}) == 3
    with pytest.raises(UnknownSequence, match="it was removed, and ids are not used again"):
        sequences.length(a)
    with pytest.raises(UnknownSequence, match="ids are integers that come from add"):
        sequences.length(77)
    with pytest.raises(UnknownSequence):
        sequences.length([0])


def test_tables_grow_in_both_directions_and_keep_their_contents():
    sequences = make(num_pages=400)
    ids = grown(sequences, *range(40))
    write(sequences, [(ids[3], 300)])
    assert sequences.tables.pages.shape[1] >= 40
    assert sequences.tables.pages.shape[2] >= 75
    for i, seq in enumerate(ids):
        assert sequences.length(seq) == i + 300 * (i == 3)
    check_sequences(sequences)


def test_out_of_pages_names_the_numbers_and_changes_nothing():
    sequences = make(num_pages=5)
    a, b = grown(sequences, 6, 4)
    c = sequences.fork(a)
    before = state(sequences)
    with pytest.raises(
        OutOfPages, match="9 tokens over 2 sequences needs 4 pages of 4 tokens, 1 of them copies"
    ) as caught:
        sequences.reserve(STEP, [(c, 7), (b, 2)])
    assert (caught.value.needed, caught.value.free, caught.value.total) == (4, 2, 5)
    assert state(sequences) == before
    write(sequences, [(c, 1), (b, 2)])


@pytest.mark.parametrize(
    ("items", "error", "text"),
    [
        (lambda a, b: [(a, 1), (99, 1)], UnknownSequence, "99"),
        (lambda a, b: [(a, 1), (b, 2), (a, 3)], InvalidInput, "every sequence once, got sequence 0 more than once"),
        (lambda a, b: [(a, 1), (b, -1)], InvalidInput, r"0 or more, got \(1, -1\)"),
        (lambda a, b: [(a, 1.0)], InvalidInput, r"\(0, 1.0\)"),
        (lambda a, b: [(a, True)], InvalidInput, "True"),
        (lambda a, b: [(a, "3")], InvalidInput, "'3'"),
        (lambda a, b: [(a, None)], InvalidInput, "None"),
        (lambda a, b: [(a, np.array([1]))], InvalidInput, "array"),
        (lambda a, b: [(a, 2**40)], InvalidInput, "1099511627776"),
        (lambda a, b: [(a, 2**80)], InvalidInput, "0 or more"),
        (lambda a, b: [a, b], InvalidInput, "pairs"),
        (lambda a, b: {a: 1}, InvalidInput, "pairs"),
        (lambda a, b: [([a], 1)], InvalidInput, "pairs"),
        (lambda a, b: None, InvalidInput, "pairs"),
        (lambda a, b: [(a, 1, 1)], InvalidInput, "pairs"),
    ],
)
def test_a_bad_batch_is_refused_and_changes_nothing(items, error, text):
    sequences = make()
    a, b = grown(sequences, 6, 3)
    before = state(sequences)
    for call in (lambda items: sequences.reserve(STEP, items), sequences.pages_needed):
        with pytest.raises(error, match=text):
            call(items(a, b))
    assert state(sequences) == before
    assert sequences.open_step is None


def test_numpy_counts_are_integers():
    sequences = make()
    a, b = sequences.add(), sequences.add()
    write(sequences, [(a, np.int32(5)), (b, np.uint8(2))])
    assert (sequences.length(a), sequences.length(b)) == (5, 2)


def test_an_empty_batch_and_requests_without_tokens_are_ordinary():
    sequences = make()
    (a,) = grown(sequences, 3)
    before = state(sequences)
    assert write(sequences, []).max_pages == 0
    reservation = write(sequences, [(a, 0), (empty := sequences.add(), 0)])
    assert reservation.kv_lens.tolist() == [3, 0]
    sequences.remove(empty)
    assert state(sequences)[:5] == before[:5]


def test_without_append_nothing_grows():
    sequences = make(num_pages=2)
    (a,) = grown(sequences, 7)
    sequences.fork(a)
    before = state(sequences)
    reservation = sequences.reserve(STEP, [(a, 100)], append=False)
    check_sequences(sequences)
    assert (reservation.q_lens.tolist(), reservation.kv_lens.tolist()) == ([100], [7])
    sequences.commit(STEP)
    assert state(sequences) == before


def test_rollback_restores_tables_counts_and_the_order_of_the_free_list():
    sequences = make(num_pages=40)
    a, b, gone = grown(sequences, 9, 6, 20)
    sequences.remove(gone)
    c, d = sequences.fork(a, 7), sequences.fork(a)
    before = state(sequences)
    sequences.reserve(STEP, [(c, 3), (a, 30), (b, 2), (d, 1)])
    assert state(sequences) != before
    check_sequences(sequences)
    sequences.rollback(STEP)
    assert state(sequences) == before
    check_sequences(sequences)
    sequences.rollback(STEP)
    assert state(sequences) == before


def test_a_step_is_open_until_it_is_committed_or_rolled_back():
    sequences = make()
    (a,) = grown(sequences, 3)
    sequences.reserve(STEP, [(a, 2)])
    before = state(sequences)
    operations = [
        sequences.add,
        sequences.clear,
        lambda: sequences.fork(a),
        lambda: sequences.trim(a, 1),
        lambda: sequences.remove(a),
        lambda: sequences.reserve(STEP, [(a, 1)]),
        lambda: sequences.pages_needed([(a, 1)]),
    ]
    for operation in operations:
        with pytest.raises(StepOpen, match="a step of this cache is open"):
            operation()
        assert state(sequences) == before
    assert sequences.length(a) == 3
    assert sequences.pages(a).tolist() == [0]
    sequences.commit(STEP)
    assert sequences.length(a) == 5
    with pytest.raises(StepClosed):
        sequences.commit(STEP)


def test_only_the_owner_of_a_reservation_commits_it_or_rolls_it_back():
    sequences = make()
    (a,) = grown(sequences, 3)
    closed, before = sequences.open_step, state(sequences)
    sequences.reserve(STEP, [(a, 2)])
    inside = state(sequences)
    for stranger in (object(), None, a):
        with pytest.raises(StepClosed):
            sequences.commit(stranger)
        sequences.rollback(stranger)
        assert state(sequences) == inside
        assert sequences.open_step is not None
    sequences.rollback(STEP)
    assert (sequences.open_step, state(sequences)) == (closed, before)


class Equal:
    """Found in a dictionary at the place of a number, and not a number."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return self.number == other


@pytest.mark.parametrize(
    "wrong", [True, np.True_, 1.0, np.float64(1), np.float32(1), 1 + 0j, Equal(1), "1", None, (1,)]
)
def test_what_only_equals_an_id_is_not_one(wrong):
    sequences = make()
    grown(sequences, 6, 3)
    before = state(sequences)
    uses = [
        lambda: sequences.length(wrong),
        lambda: sequences.pages(wrong),
        lambda: sequences.fork(wrong),
        lambda: sequences.fork(wrong, 0),
        lambda: sequences.trim(wrong, 0),
        lambda: sequences.remove(wrong),
        lambda: sequences.pages_needed([(wrong, 1)]),
        lambda: sequences.reserve(STEP, [(0, 1), (wrong, 1)]),
    ]
    for use in uses:
        with pytest.raises(UnknownSequence, match="ids are integers that come from add"):
            use()
        assert state(sequences) == before
        assert sequences.open_step is None


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_ids(kind):
    sequences = make()
    _, b = grown(sequences, 6, 3)
    seq = kind(b)
    assert sequences.length(seq) == 3
    assert sequences.pages(seq).tolist() == sequences.pages(b).tolist()
    assert sequences.length(sequences.fork(seq, kind(2))) == 2
    write(sequences, [(seq, kind(2))])
    sequences.trim(seq, kind(4))
    assert sequences.length(b) == 4
    sequences.remove(seq)
    with pytest.raises(UnknownSequence, match="it was removed"):
        sequences.length(seq)


def test_items_that_open_a_step_while_they_are_read_are_refused():
    """What the items' own code does happens before it is looked at whether a step is open."""
    sequences = make()
    a, b = grown(sequences, 3, 2)

    def items():
        sequences.reserve(STEP, [(b, 5)])
        yield a, 2

    for use in (lambda: sequences.reserve(object(), items()), lambda: sequences.pages_needed(items())):
        with pytest.raises(StepOpen):
            use()
        check_sequences(sequences)
        sequences.commit(STEP)
    assert (sequences.length(a), sequences.length(b)) == (3, 12)


def test_items_may_change_the_cache_while_they_are_read():
    sequences = make()
    (a,) = grown(sequences, 9)

    def items():
        sequences.trim(a, 1)
        for _ in range(20):
            sequences.add()
        yield a, 4

    write(sequences, items())
    assert sequences.length(a) == 5
    assert len(sequences.pages(a)) == 2


@pytest.mark.parametrize("length", [-1, 7, 1.5, True, None, "2"])
def test_lengths_outside_the_sequence_are_refused(length):
    sequences = make()
    (a,) = grown(sequences, 6)
    before = state(sequences)
    with pytest.raises(InvalidInput, match="from 0 to the 6 tokens stored"):
        sequences.trim(a, length)
    if length is not None:  # for a fork it means all tokens
        with pytest.raises(InvalidInput, match="from 0 to the 6 tokens stored"):
            sequences.fork(a, length)
    assert state(sequences) == before


def mirror(sequences, device):
    """What a device mirror would hold after taking the cells that are marked."""
    tables = sequences.tables
    if device is None or device.shape != tables.pages.shape:
        device = tables.pages.copy()
    rows, cols = tables.dirty_cells()
    device[:, rows, cols] = tables.pages[:, rows, cols]
    tables.mark_clean()
    return device


def assert_marked_cells_suffice(sequences, *, seed, operations, most):
    """Random operations on at most so many sequences, with a mirror that is told of marked cells only, now and then."""
    rng = np.random.default_rng(seed)
    device = mirror(sequences, None)
    for _ in range(operations):
        ids = list(sequences.slots)
        choice = rng.integers(6)
        if choice == 0 and len(ids) < most:
            sequences.add()
        elif choice in (1, 2) and 0 < len(ids) < most:
            seq = ids[rng.integers(len(ids))]
            cut = sequences.fork if choice == 1 else sequences.trim
            cut(seq, int(rng.integers(sequences.shortest(seq), sequences.length(seq) + 1)))
        elif choice == 3 and len(ids) > 2 * most // 3:
            sequences.remove(ids[rng.integers(len(ids))])
        elif ids:
            batch = rng.choice(ids, size=int(rng.integers(min(len(ids), 5) + 1)), replace=False)
            try:
                sequences.reserve(STEP, [(int(seq), int(rng.integers(6))) for seq in batch])
            except OutOfPages:
                sequences.remove(ids[0])
                continue
            if rng.random() < 0.7:
                device = mirror(sequences, device)
            sequences.commit(STEP) if rng.random() < 0.6 else sequences.rollback(STEP)
        if rng.random() < 0.6:
            device = mirror(sequences, device)
            for seq, slot in sequences.slots.items():
                for group in range(len(sequences.groups)):
                    pages = sequences.pages(seq, group)
                    mirrored = device[group, slot, : sequences.tables.page_counts[slot]]
                    assert len(mirrored) == len(pages)
                    assert mirrored[pages >= 0].tolist() == pages[pages >= 0].tolist()
        check_sequences(sequences)


def test_marked_cells_bring_a_mirror_up_to_date_after_any_operations():
    sequences = make(num_pages=60, page_size=2)
    assert_marked_cells_suffice(sequences, seed=8, operations=1500, most=30)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda s: s.tables.lengths.__setitem__(0, 1), "slot 0: 1 tokens take 1 pages"),
        (lambda s: s.tables.pages.__setitem__((0, 0, 0), 5), "tables hold it"),
        (lambda s: s.tables.pages.__setitem__((0, 0, 0), 99), "expected pages below 16"),
        (lambda s: s.tables.pages.__setitem__((0, 0, 0), s.tables.pages[0, 0, 1]), "occurs twice"),
        (lambda s: s.tables.pages.__setitem__((0, 0, 9), 3), "past a sequence's last page"),
        (lambda s: s.groups[0].pool.refs.__setitem__(0, 2), "page 0: 1 tables hold it, and its count is 2"),
        (lambda s: s.tables.free_slots.append(0), "once each"),
        (lambda s: s.tables.lengths.__setitem__(5, 1), "free slots"),
    ],
)
def test_check_finds_damage(damage, text):
    sequences = make()
    grown(sequences, 6, 2)
    check_sequences(sequences)
    damage(sequences)
    with pytest.raises(CacheCorrupt, match=text):
        check_sequences(sequences)


def test_check_finds_a_step_that_writes_into_a_shared_page(monkeypatch):
    monkeypatch.setattr("sennit.cache.sequences.pages_to_copy", lambda pages, refs, lengths: np.empty(0, np.int64))
    sequences = make()
    (a,) = grown(sequences, 6)
    sequences.fork(a)
    sequences.reserve(STEP, [(a, 1)])
    with pytest.raises(CacheCorrupt, match="which other tables hold too"):
        check_sequences(sequences)
