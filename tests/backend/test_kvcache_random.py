"""20,000 random operations on caches of every kind against a plain dictionary of tensors, hypothesis' among them."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from kvcache_twin import fill_with_nan, gqa_spec

from sennit.check.operations import KINDS, OPERATIONS, RandomUse, make_cache
from sennit.check.twin import Disagreement
from sennit.errors import CacheCorrupt
from sennit.kvcache import KVCache

OPERATIONS_IN_CI = 20_000
STEPS = 40  # of one run of the machine
# What must have come up often, for the numbers above to mean something.
RARE = ["out of pages", "pages released", "raised inside", "left early", "layers compared", "clear", "attend_only"]


class Drawn:
    """What `RandomUse` asks of its generator, drawn by hypothesis, so that a failure shrinks."""

    def __init__(self, draw):
        self.draw = draw

    def random(self, count=None):
        numbers = [self.draw(st.integers(0, 999)) / 1000 for _ in range(count or 1)]
        return numbers if count else numbers[0]

    def integers(self, low, high=None, count=None):
        low, high = (0, low) if high is None else (low, high)
        numbers = [self.draw(st.integers(low, high - 1)) for _ in range(1 if count is None else count)]
        return numbers[0] if count is None else numbers

    def permutation(self, count):
        return Array(self.draw(st.permutations(range(count))))


class Array(list):
    def __getitem__(self, key):
        return Array(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def tolist(self):
        return list(self)


class Cache(RuleBasedStateMachine):
    """Any operations in any order; each is followed by `KVCache.check` and a look at what is stored."""

    done: ClassVar[Counter] = Counter()

    @initialize(kind=st.sampled_from(list(KINDS)))
    def start(self, kind):
        self.use = RandomUse(make_cache(kind), seed=0)

    @rule(name=st.sampled_from(OPERATIONS), data=st.data())
    def operate(self, name, data):
        self.use.rng = Drawn(data.draw)
        before = Counter(self.use.seen)
        self.use.do(name)
        Cache.done.update(self.use.seen - before)

    def teardown(self):
        if hasattr(self, "use"):
            self.use.twin.check()


def run_machine(examples):
    options = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    Cache.done.clear()
    run_state_machine_as_test(Cache, settings=options)
    return Counter(Cache.done)


def operations(seen):
    return sum(seen[name] for name in OPERATIONS)


def test_any_few_operations_agree_with_a_dictionary_of_tensors():
    assert operations(run_machine(examples=8)) > 4 * STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_agree_with_a_dictionary_of_tensors(kind):
    RandomUse(make_cache(kind), seed=1).run(60)


@pytest.mark.slow
def test_20000_operations_agree_with_a_dictionary_of_tensors():
    """Those of hypothesis, and the rest on each kind of cache, with everything rare among them."""
    seen = run_machine(examples=120)
    assert operations(seen) > 25 * STEPS
    for index, kind in enumerate(KINDS):
        use = RandomUse(make_cache(kind), seed=2024)
        use.run((OPERATIONS_IN_CI - operations(seen)) // (len(KINDS) - index))
        seen += use.seen
    print(dict(seen))
    assert operations(seen) == OPERATIONS_IN_CI
    assert min(seen[event] for event in RARE) >= 50, f"the mix must reach every case often: {seen}"


@pytest.mark.parametrize("fault", ["content", "window", "count", "table"])
def test_faults_of_a_cache_are_found(fault, monkeypatch):
    """What the operations compare can differ: each of these is found within some hundred of them."""
    if fault == "content":  # a page is not copied for its writer
        monkeypatch.setattr("sennit.attention.BatchAttention.copy_pages", lambda *args: None)
    elif fault == "window":  # a page is freed that the next row sees
        monkeypatch.setattr("sennit.cache.groups.PageGroup.sight", property(lambda group: group.window_left - 1))
    elif fault == "count":  # a page that others hold too is freed
        monkeypatch.setattr("sennit.cache.pages.PagePool.share", lambda pool, pages: None)
    else:  # the table of another group
        original = KVCache.page_table.__globals__["Sequences"].pages
        monkeypatch.setattr("sennit.cache.sequences.Sequences.pages", lambda s, seq, group=0: original(s, seq, 0))
    specs = [gqa_spec(), gqa_spec(window_left=5)]
    use = RandomUse(fill_with_nan(KVCache(specs, num_tokens=200, page_size=4, device="cpu")), seed=3, verified=1.0)
    with pytest.raises((Disagreement, CacheCorrupt)):
        use.run(400)
