"""Random operations on small caches of every kind, each followed by a look at the whole cache and at its twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sennit.check.compare import Comparison
from sennit.check.outcome import Outcome
from sennit.check.threads import one_thread
from sennit.check.twin import Disagreement, Fault, StepFault, Twin, fill_with_nan, host_state
from sennit.errors import (
    IncompleteStep,
    InvalidInput,
    OutOfPages,
    PagesReleased,
    SennitError,
    UnknownSequence,
    UnsupportedFeature,
)
from sennit.kvcache import KVCache
from sennit.spec import AttentionSpec

__all__ = ["KINDS", "OPERATIONS", "RandomUse", "make_cache", "run_episode"]

MOST_SEQUENCES = 10
WHOLE_EVERY = 50  # operations between two comparisons of every sequence's content
POISONED = 0.05  # the part of operations after which all free pages are filled with NaN
CHANCES = {  # of each operation, against the others
    "step": 14, "fork": 26, "trim": 26, "add": 11, "remove": 9, "refused": 7, "abort": 5, "attend_only": 2,
    "clear": 0.4,
}  # fmt: skip
OPERATIONS = tuple(CHANCES)
UP_TO = np.cumsum([*CHANCES.values()]) / sum(CHANCES.values())


def _heads(kv_heads: int, dim_qk: int = 4, dim_vo: int | None = None, **fields: Any) -> AttentionSpec:
    return AttentionSpec(
        num_qo_heads=2, num_kv_heads=kv_heads, head_dim_qk=dim_qk, head_dim_vo=dim_vo or dim_qk, dtype=torch.float32
    ).replace(**fields)


def _latent(**fields: Any) -> AttentionSpec:
    return AttentionSpec.mla(num_qo_heads=2, kv_lora_rank=4, qk_rope_head_dim=2, dtype=torch.float32).replace(**fields)


FULL = _heads(1)
LOCAL = FULL.replace(window_left=5)

# Options of a cache beside its sizes. Pools are small, so that they run full and pages are used again soon.
KINDS: Mapping[str, dict[str, Any]] = {
    "one group": {"specs": [FULL], "page_size": 4, "num_tokens": 128},
    "pages of one token": {"specs": [FULL], "page_size": 1, "num_tokens": 90},
    "uneven dims": {"specs": [_heads(2, 3, 5)], "page_size": 3, "num_tokens": 99, "kv_layout": "HND"},
    "latent": {"specs": [_latent()], "page_size": 4, "num_tokens": 128},
    "window": {"specs": [LOCAL], "page_size": 4, "num_tokens": 300, "max_sequences": 10, "max_step_tokens": 20},
    "window of nothing": {"specs": [FULL.replace(window_left=0)], "page_size": 2, "num_tokens": 80},
    "window of one token a page": {"specs": [LOCAL], "page_size": 1, "num_tokens": 90},
    "sinks": {"specs": [LOCAL.replace(num_sink_tokens=5)], "page_size": 4, "num_tokens": 128},
    "full and window": {"specs": [FULL, LOCAL], "page_size": 4, "num_tokens": 128, "max_sequences": 6},
    "three groups": {
        "specs": [LOCAL.replace(num_sink_tokens=3), FULL, LOCAL.replace(window_left=11)],
        "page_size": 3, "num_tokens": 120, "kv_layout": "NHD",
    },
    "latent and heads": {"specs": [_latent(), FULL], "page_size": 4, "num_tokens": 128},
    "owners": {
        "specs": [FULL, LOCAL, FULL.replace(num_qo_heads=1), LOCAL.replace(window_left=2)],
        "page_size": 4, "num_tokens": 128, "kv_owner": {6: 4, 7: 5}, "layers": range(4, 8),
    },
    "window over a full owner": {
        "specs": [FULL, LOCAL], "page_size": 4, "num_tokens": 128, "kv_owner": {9: 8}, "layers": range(8, 10)
    },
}  # fmt: skip


def make_cache(kind: str, *, device: torch.device | str = "cpu", backend: str = "auto") -> KVCache:
    """An empty cache of one of :data:`KINDS`, every slot of it NaN."""
    return fill_with_nan(KVCache(**KINDS[kind], device=device, backend=backend))


def run_episode(seed: int, index: int, count: int, *, device: torch.device | str, backend: str) -> Outcome:
    """So many random operations on a fresh cache; kind and operations depend on ``seed`` and ``index`` alone.

    Raises:
        UnsupportedFeature: the backend cannot do what a kind of cache needs.
        SennitError: something is wrong; the text says after how many operations of which kind of cache.
    """
    kind = list(KINDS)[index % len(KINDS)]
    with one_thread():
        use = RandomUse(make_cache(kind, device=device, backend=backend), [seed, index])
        try:
            use.run(count)
        except UnsupportedFeature:
            raise
        except Exception as error:
            done = sum(use.seen[name] for name in OPERATIONS)
            raise SennitError(f"cache {kind!r} after {done} operations: {type(error).__name__}: {error}") from error
    return Outcome(use.worst_ratio, f"{count} operations on cache {kind!r}", use.seen)


class RandomUse:
    """Draws operations, does them to a cache and its twin, and compares.

    Args:
        cache: empty.
        seed: of everything random.
        verified: the part of steps whose attention is compared with dense float64.

    Attributes:
        seen: how often each operation, and each rare event in one, has come.
        worst_ratio: largest error of attention over the largest allowed.
    """

    def __init__(self, cache: KVCache, seed: int | list[int], *, verified: float = 0.1) -> None:
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.twin = Twin(cache, int(self.rng.integers(2**62)))
        self.verified = verified
        self.seen: Counter[str] = Counter()
        self.worst_ratio = 0.0

    def run(self, count: int) -> None:
        """Do so many operations.

        Raises:
            Disagreement, CacheCorrupt: the cache is not what its twin is, or an invariant is broken.
            Exception: whatever an operation raised that it should not.
        """
        for done in range(1, count + 1):
            self.do(OPERATIONS[int(np.searchsorted(UP_TO, self.rng.random()))])
            if done % WHOLE_EVERY == 0:
                self.twin.check()
        self.twin.check()

    def do(self, name: str) -> None:
        """Do one of :data:`OPERATIONS`, and check the cache and the sequences that it was about.

        Raises as :meth:`run` does.
        """
        touched = getattr(self, f"_{name}")()
        self.seen[name] += 1
        if self.rng.random() < POISONED:
            self._poison()
        self.cache.check()
        self.twin.check(touched)

    def _pick(self) -> int:
        ids = list(self.twin.stored)
        return ids[int(self.rng.integers(len(ids)))] if ids else self.twin.add()

    def _add(self) -> list[int]:
        return [self.twin.add()] if len(self.twin.stored) < MOST_SEQUENCES else self._remove()

    def _remove(self) -> list[int]:
        self.twin.remove(self._pick())
        return []

    def _clear(self) -> list[int]:
        self.twin.clear()
        return []

    def _fork(self) -> list[int]:
        if len(self.twin.stored) >= MOST_SEQUENCES:
            return self._remove()
        seq = self._pick()
        length = self._length(seq)
        fork = self._cut(seq, length, lambda: self.twin.fork(seq, None if length == self.cache.length(seq) else length))
        return [seq] if fork is None else [seq, fork]

    def _trim(self) -> list[int]:
        seq = self._pick()
        length = self._length(seq)
        self._cut(seq, length, lambda: self.twin.trim(seq, length))
        return [seq]

    def _length(self, seq: int) -> int:
        """Where to cut a sequence: all of it, near its end, or anywhere."""
        stored, draw = self.cache.length(seq), self.rng.random()
        lowest = stored if draw < 0.2 else max(0, stored - 6) if draw < 0.85 else 0
        return int(self.rng.integers(lowest, stored + 1))

    def _cut(self, seq: int, length: int, cut: Callable[[], int | None]) -> int | None:
        """Fork or trim at a length: possible exactly where all that later rows see is held."""
        held, stored = self.twin.held(seq, length, first=length), self.cache.length(seq)
        if not held and self.cache.shortest(seq) <= length:
            raise Disagreement(f"sequence {seq}: shortest is {self.cache.shortest(seq)}, and {length} is not held")
        before = None if held else host_state(self.cache)
        try:
            made = cut()
        except PagesReleased:
            if held:
                raise
            self._require_unchanged(before)
            self.seen["pages released"] += 1
            return None
        if not held:
            raise Disagreement(f"sequence {seq} was cut to {length} of {stored}, of which not all is held")
        return made

    def _items(self) -> list[tuple[int, int]]:
        ids, most = list(self.twin.stored), 40 if self.rng.random() < 0.4 else 5
        chosen = self.rng.permutation(len(ids))[: int(self.rng.integers(0, 5))].tolist()
        return [(ids[i], int(count)) for i, count in zip(chosen, self.rng.integers(0, most, len(chosen)), strict=True)]

    def _step(self) -> list[int]:
        items = self._items()
        missing, before = self.cache.missing_pages(items), host_state(self.cache)
        draw = self.rng.random(2)
        try:
            found = self.twin.step(
                items,
                verify=bool(draw[0] < self.verified),
                padding=int(self.rng.integers(1, 4)) if draw[1] < 0.1 else 0,
                causal=bool(draw[1] < 0.9),
            )
        except OutOfPages as error:
            if missing != error.needed - error.free:
                raise Disagreement(f"{missing} pages were missing for {items}, and then: {error}") from error
            self._require_unchanged(before)
            self.seen["out of pages"] += 1
            return self._remove()
        if missing:
            raise Disagreement(f"{missing} pages were missing for {items}, and it went through")
        self._require_right(found, items)
        for seq, count in items:
            if count:
                self._require_freed(seq)
        return [seq for seq, _ in items]

    def _attend_only(self) -> list[int]:
        """Rows over what is stored: refused exactly where a window has released what they see."""
        items, causal = self._items(), bool(self.rng.random() < 0.5)
        lengths = {seq: self.cache.length(seq) for seq, _ in items}
        held = all(self.twin.held(seq, lengths[seq], first=lengths[seq] - count) for seq, count in items if count)
        before = host_state(self.cache)
        try:
            found = self.twin.step(items, verify=True, append=False, causal=causal)
        except PagesReleased:
            if held:
                raise
            self.seen["pages released"] += 1
        else:
            if not held:
                raise Disagreement(f"{items} attended without append to pages that are not held")
            self._require_right(found, items)
        self._require_unchanged(before)
        return [seq for seq, _ in items]

    def _abort(self) -> list[int]:
        """A step that raises inside, or is left early, changes nothing."""
        items, before = self._items(), host_state(self.cache)
        if self.cache.missing_pages(items):
            return self._remove()
        leave = bool(self.rng.random() < 0.5)
        fault = StepFault(int(self.rng.integers(self.cache.num_layers + (not leave))), leave)
        try:
            self.twin.step(items, fault=fault)
        except (Fault, IncompleteStep) as error:
            if leave != isinstance(error, IncompleteStep):
                raise
            self.seen["left early" if leave else "raised inside"] += 1
        else:
            raise Disagreement(f"a step over {items} was committed although {fault}")
        self._require_unchanged(before)
        return [seq for seq, _ in items]

    def _refused(self) -> list[int]:
        """A step that is wrong in itself changes nothing."""
        seq = self._pick()
        wrong: list[tuple[list[tuple[Any, Any]], type[Exception]]] = [
            ([(seq, 1), (seq, 1)], InvalidInput),
            ([(seq, 2), (10**9, 1)], UnknownSequence),
            ([(seq, -1)], InvalidInput),
            ([(seq, 0.5)], InvalidInput),
            ([(seq, 10**6)], OutOfPages),
        ]
        items, error = wrong[int(self.rng.integers(len(wrong)))]
        before = host_state(self.cache)
        try:
            self.twin.step(items)
        except error:
            self._require_unchanged(before)
            return [seq]
        raise Disagreement(f"a step over {items} went through")

    def _poison(self) -> None:
        """What a page holds after it was freed must not matter."""
        for layer in self.twin.owners:
            group = self.cache._sequences.groups[self.cache._entry(layer).group]
            free = torch.from_numpy(group.pool.free).long().to(self.cache.device)
            pools = self.cache.pools(layer)
            for pool in [pools] if isinstance(pools, torch.Tensor) else pools:
                pool[free] = torch.nan

    def _require_unchanged(self, before: dict[str, Any] | None) -> None:
        """Host state as before; contents are compared after every operation anyway."""
        if (now := host_state(self.cache)) != before:
            changed = [name for name, value in (before or {}).items() if now[name] != value]
            raise Disagreement(f"an operation that was refused or taken back has changed {', '.join(changed)}")

    def _require_right(self, found: list[Comparison], items: list[tuple[int, int]]) -> None:
        if not found:
            return
        self.seen["layers compared"] += len(found)
        outcome = Outcome.of(found)
        self.worst_ratio = max(self.worst_ratio, outcome.ratio)
        if not outcome.passed:
            raise Disagreement(f"attention of {items}: {outcome.text}")

    def _require_freed(self, seq: int) -> None:
        """A sequence that has just grown holds no more pages than its window covers, beside its sinks."""
        size = self.cache.page_size
        for layer in self.twin.owners:
            spec = self.twin.specs[layer]
            if spec.window_left is not None:
                held = int((self.cache.page_table(seq, layer) >= 0).sum())
                most = -(-max(spec.window_left, 1) // size) + 1 - (-spec.num_sink_tokens // size)
                if held > most:
                    raise Disagreement(f"sequence {seq} holds {held} pages in layer {layer}, at most {most} are of use")
