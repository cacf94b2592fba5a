"""The page pool: all or nothing, last freed first used, and exact restoring."""

from __future__ import annotations

import numpy as np
import pytest

from sennit.cache.pages import PagePool
from sennit.errors import CacheCorrupt, OutOfPages


def ints(*values):
    return np.array(values, np.int32)


def state(pool):
    return pool.num_free, pool.free.tolist(), pool.refs.tolist()


def test_a_new_pool_hands_out_pages_in_ascending_order():
    pool = PagePool(5)
    assert pool.alloc(2).tolist() == [0, 1]
    assert pool.alloc(3).tolist() == [2, 3, 4]
    assert pool.num_free == 0


def test_alloc_takes_all_or_nothing_and_names_the_numbers():
    pool = PagePool(4)
    pool.alloc(1)
    before = state(pool)
    with pytest.raises(OutOfPages, match="5 pages are needed and 3 of 4 are free") as caught:
        pool.alloc(5)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (5, 3, 4)
    assert state(pool) == before
    assert pool.alloc(0).tolist() == []
    assert state(pool) == before


def test_the_page_freed_last_is_used_first():
    pool = PagePool(6)
    pages = pool.alloc(6)
    pool.release(pages[[4]])
    pool.release(pages[[1, 3]])
    assert pool.alloc(3).tolist() == [1, 3, 4]


def test_a_shared_page_is_free_only_after_its_last_holder_let_go():
    pool = PagePool(3)
    pages = pool.alloc(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.refs.tolist() == [1, 0, 0]
    assert pool.num_free == 2
    pool.release(pages[:1])
    assert pool.num_free == 3
    pool.check()


def test_restore_undoes_allocations_and_unsharing_in_the_exact_order():
    rng = np.random.default_rng(3)
    pool = PagePool(32)
    held = pool.alloc(32)
    rng.shuffle(held)
    pool.release(held[:20])  # a shuffled free list
    source = held[20:22]
    for _ in range(3):
        pool.share(source)
    before = state(pool)
    mark = pool.mark(np.repeat(source, 2), count=12)
    pool.alloc(7)
    pool.unshare(np.repeat(source, 2))
    pool.alloc(5)
    assert state(pool) != before
    pool.restore(mark)
    assert state(pool) == before
    pool.restore(mark)  # absolute values: once more changes nothing
    assert state(pool) == before


def test_restore_puts_back_pages_that_were_taken_and_released_since():
    """What a window does in one step: fresh pages, and shared ones of several holders, go back before the end."""
    rng = np.random.default_rng(4)
    pool = PagePool(24)
    held = pool.alloc(24)
    rng.shuffle(held)
    pool.release(held[:12])
    shared = held[12:14]
    pool.share(shared)
    before = state(pool)
    mark = pool.mark(np.repeat(shared, 2), count=5)
    fresh = pool.alloc(5)
    pool.release(np.concatenate([np.repeat(shared, 2), fresh[[3, 1]]]))
    assert pool.refs[shared].tolist() == [0, 0]
    assert pool.num_free == 12 - 5 + 4
    pool.check()
    pool.restore(mark)
    assert state(pool) == before
    pool.check()


def test_unshare_counts_every_occurrence():
    pool = PagePool(2)
    page = pool.alloc(1)
    pool.share(page)
    pool.share(page)
    pool.unshare(np.repeat(page, 2))
    assert pool.refs.tolist() == [1, 0]


def test_clear_frees_every_page_in_the_order_of_a_new_pool():
    pool = PagePool(7)
    pool.release(pool.alloc(5)[[2, 0, 3]])
    pool.clear()
    assert state(pool) == state(PagePool(7))


def test_an_empty_pool_is_ordinary():
    pool = PagePool(0)
    assert pool.alloc(0).tolist() == []
    pool.check()
    with pytest.raises(OutOfPages):
        pool.alloc(1)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda pool: pool.refs.__setitem__(0, 0), "a page is lost"),
        (lambda pool: pool.refs.__setitem__(pool.free[-1], 1), "free and have holders"),
        (lambda pool: pool._stack.__setitem__(0, pool._stack[1]), "distinct"),
        (lambda pool: pool._stack.__setitem__(0, 99), "ids below 6"),
        (lambda pool: setattr(pool, "num_free", pool.num_free - 1), "a page is lost"),
        (lambda pool: setattr(pool, "num_free", -1), "free list"),
    ],
)
def test_check_finds_damage(damage, text):
    pool = PagePool(6)
    pool.alloc(3)
    pool.check()
    damage(pool)
    with pytest.raises(CacheCorrupt, match=text):
        pool.check()


def test_random_use_keeps_every_page_either_free_or_held():
    rng = np.random.default_rng(11)
    pool = PagePool(50)
    held: list[np.ndarray] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.integers(len(held))))
        elif held and rng.random() < 0.3:
            pages = held[rng.integers(len(held))]
            pool.share(pages)
            held.append(pages)
        else:
            count = int(rng.integers(0, 8))
            free = pool.num_free
            if count > free:
                with pytest.raises(OutOfPages):
                    pool.alloc(count)
                assert pool.num_free == free
            else:
                held.append(pool.alloc(count))
        pool.check()
        expected = np.bincount(np.concatenate([*held, ints()]), minlength=50)
        assert pool.refs.tolist() == expected.tolist()
