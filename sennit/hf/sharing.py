"""A batcher's sequences in the cache: new ones fork what others computed, finished ones stay until room is needed."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.hf.prefixes import PrefixIndex
from sennit.hf.scheduling import Chunk
from sennit.kvcache import KVCache

__all__ = ["SharedSequences"]


class SharedSequences:
    """Sequences of one :class:`sennit.KVCache` that begin alike share pages.

    A finished sequence is retained, for prompts yet to come, until its pages are needed or ``max_retained`` newer ones
    are there; the one that was used longest ago goes first.

    Where the cache has windows, a sequence can only be forked near its end: what came long before has been released.
    So one that was retained serves the prompts that continue it, and no prompt waits for another to be computed.
    """

    def __init__(self, cache: KVCache, *, share: bool, max_retained: int) -> None:
        self._cache = cache
        self._share, self._max_retained = share, max_retained
        self._wait = all(spec.window_left is None for spec in cache.specs)
        self._computed = PrefixIndex(cache.page_size)  # what may be forked now
        self._planned = PrefixIndex(cache.page_size)  # what may be forked once running prompts are computed
        self._retained: dict[int, None] = {}  # in the order of their last use
        self.forks = self.tokens_shared = self.evictions = 0

    @property
    def num_retained(self) -> int:
        """Finished sequences that are still in the cache."""
        return len(self._retained)

    def length(self, sequence: int) -> int:
        """Tokens that the cache holds of a sequence."""
        return self._cache.length(sequence)

    def missing_pages(self, chunks: Sequence[Chunk]) -> int:
        """Pages that must become free before a step over these chunks fits."""
        return self._cache.missing_pages(chunks)

    def start(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Make a sequence for these tokens; it begins with the longest prefix that is already in the cache.

        Returns:
            The sequence, and how many of its tokens it holds; always fewer than all, since the last one's logits are
            wanted. None when a running sequence is about to compute a longer prefix of these tokens, at least a
            page longer: it is worth waiting for.
        """
        if not self._share:
            return self._cache.add(), 0
        prefix = tokens[:-1]
        donor, length = self._computed.find(prefix, shortest=self._cache.shortest)
        if self._wait and self._planned.find(prefix)[1] >= length + self._cache.page_size:
            return None
        if donor is None:
            return self._cache.add(), 0
        if donor in self._retained:
            self._retained[donor] = self._retained.pop(donor)
        return self._cache.fork(donor, length=length), length

    def started(self, sequence: int, tokens: Sequence[int], shared: int) -> None:
        """Say that a sequence from :meth:`start` will be computed."""
        if self._share:
            self._planned.extend(sequence, tokens, length=len(tokens))
        if shared:
            self._computed.extend(sequence, tokens, length=shared)
            self.forks += 1
            self.tokens_shared += shared

    def computed(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        """Say that the cache now holds the first ``length`` of a sequence's tokens."""
        if self._share:
            self._computed.extend(sequence, tokens, length=length)

    def retire(self, sequence: int) -> None:
        """A sequence is finished: keep it for its prefix, or remove it."""
        if not self._share or sequence not in self._computed:
            self.drop(sequence)
            return
        self._planned.remove(sequence)
        self._retained[sequence] = None
        if len(self._retained) > self._max_retained:
            self._drop_oldest()

    def drop(self, sequence: int) -> None:
        """Remove a sequence from the cache."""
        self._computed.remove(sequence)
        self._planned.remove(sequence)
        self._cache.remove(sequence)

    def make_room(self, chunks: Sequence[Chunk], *, spare: int = 0, max_step_tokens: int | None = None) -> bool:
        """Evict retained sequences until these chunks, and ``spare`` pages more, fit; False if never.

        They are one step, or as many as they take of ``max_step_tokens`` each.
        """
        while self._cache.missing_pages(chunks, spare=spare, max_step_tokens=max_step_tokens):
            if not self._retained:
                return False
            self._drop_oldest()
            self.evictions += 1
        return True

    def clear(self) -> None:
        """Remove every sequence."""
        self._computed, self._planned = PrefixIndex(self._cache.page_size), PrefixIndex(self._cache.page_size)
        self._retained.clear()
        self._cache.clear()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._retained))
        del self._retained[oldest]
        self.drop(oldest)
