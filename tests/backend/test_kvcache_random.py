"""20,000 random operations on a small cache against a plain dictionary of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvcache_twin import Fault, Twin, gqa_spec, host_state, make_cache, mla_spec

from sennit.errors import IncompleteStep, InvalidInput, OutOfPages, UnknownSequence


class RandomUse:
    """Draws operations, does them on both sides, and compares."""

    def __init__(self, cache, seed):
        self.cache = cache
        self.twin = Twin(cache, seed)
        self.rng = np.random.default_rng(seed)
        self.seen = {}

    def run(self, count):
        names = ["add", "fork", "trim", "remove", "step", "failing_step", "bad_step", "poison", "clear"]
        chances = np.array([10, 14, 12, 8, 40, 10, 5, 0.9, 0.1])
        for done in range(count):
            name = str(self.rng.choice(names, p=chances / chances.sum()))
            touched = getattr(self, name)()
            self.seen[name] = self.seen.get(name, 0) + 1
            self.cache.check()
            self.twin.assert_agrees(None if done % 100 == 0 else touched)

    def note(self, event):
        self.seen[event] = self.seen.get(event, 0) + 1

    def pick(self):
        ids = list(self.twin.stored)
        return ids[self.rng.integers(len(ids))] if ids else self.twin.add()

    def add(self):
        return [self.twin.add()] if len(self.twin.stored) < 14 else self.remove()

    def fork(self):
        if len(self.twin.stored) >= 14:
            return self.remove()
        seq = self.pick()
        length = None if self.rng.random() < 0.3 else int(self.rng.integers(self.cache.length(seq) + 1))
        return [seq, self.twin.fork(seq, length)]

    def trim(self):
        seq = self.pick()
        stored = self.cache.length(seq)
        self.twin.trim(seq, int(self.rng.integers(max(0, stored - 6), stored + 1)))
        return [seq]

    def remove(self):
        self.twin.remove(self.pick())
        return []

    def items(self):
        ids = list(self.twin.stored)
        chosen = self.rng.permutation(ids)[: self.rng.integers(0, 6)]
        longest = 30 if self.rng.random() < 0.1 else 5
        return [(int(seq), int(self.rng.integers(0, longest))) for seq in chosen]

    def assert_unchanged(self, before):
        """Host state as before, and every sequence's content as the dictionary has it."""
        assert host_state(self.cache) == before
        self.twin.assert_agrees()

    def step(self):
        items = self.items()
        needed, free, before = self.cache.pages_needed(items), self.cache.stats().free_pages, host_state(self.cache)
        try:
            self.twin.step(items, verify=self.rng.random() < 0.1)
        except OutOfPages:
            assert needed > free
            self.assert_unchanged(before)
            self.note("out of pages")
            return self.remove()
        assert needed == free - self.cache.stats().free_pages
        return [seq for seq, _ in items]

    def failing_step(self):
        items, before = self.items(), host_state(self.cache)
        if self.cache.pages_needed(items) > self.cache.stats().free_pages:
            return self.remove()
        if self.rng.random() < 0.5:
            with pytest.raises(Fault):
                self.twin.step(items, fault_after=int(self.rng.integers(self.cache.num_layers + 1)))
            self.note("raised inside")
        else:
            with pytest.raises(IncompleteStep):
                self.twin.step(items, leave_after=int(self.rng.integers(self.cache.num_layers)))
            self.note("left early")
        self.assert_unchanged(before)
        return []

    def bad_step(self):
        seq = self.pick()
        bad, error = [
            ([(seq, 1), (seq, 1)], InvalidInput),
            ([(seq, 2), (10**9, 1)], UnknownSequence),
            ([(seq, -1)], InvalidInput),
            ([(seq, 0.5)], InvalidInput),
        ][self.rng.integers(4)]
        before = host_state(self.cache)
        with pytest.raises(error), self.cache.step(bad):
            pass
        self.assert_unchanged(before)
        return []

    def poison(self):
        """What a page holds after it was freed must not matter."""
        free = torch.from_numpy(self.cache._sequences.groups[0].pool.free).long()
        for layer in range(self.cache.num_layers):
            pools = self.cache.pools(layer)
            for pool in [pools] if isinstance(pools, torch.Tensor) else pools:
                pool[free] = torch.nan
        return []

    def clear(self):
        self.cache.clear()
        self.twin.stored.clear()
        return []


@pytest.mark.slow
def test_20000_random_operations_agree_with_a_dictionary_of_tensors():
    use = RandomUse(make_cache(num_pages=40, page_size=4), seed=2024)
    use.run(20_000)
    rare = {
        event: use.seen.get(event, 0) for event in ("out of pages", "raised inside", "left early", "clear", "poison")
    }
    assert min(rare.values()) >= 10, f"the mix must reach every case often: {rare}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("specs", "page_size", "layout"),
    [
        ([gqa_spec()] * 2, 1, "NHD"),
        ([gqa_spec(num_qo_heads=3, num_kv_heads=1, head_dim_qk=6, head_dim_vo=4)] * 2, 3, "HND"),
        ([mla_spec()] * 3, 4, None),
    ],
    ids=["pages of one token", "uneven dims", "latent"],
)
def test_random_operations_on_other_layouts_agree_with_a_dictionary_of_tensors(specs, page_size, layout, seed):
    cache = make_cache(specs, num_pages=100 // page_size, page_size=page_size, kv_layout=layout)
    RandomUse(cache, seed).run(150)
