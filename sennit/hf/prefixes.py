"""Finds, among token sequences that are already computed, the one that shares the longest prefix with a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Sequences by the hashes of their prefixes of whole blocks; a match is verified token by token.

    A sequence is ``in`` the index once it has a whole block, so that it can be found.

    Block ``i`` of a sequence is entered under a hash of all tokens up to its end, so one dictionary look-up a block
    finds who shares a prefix, however many sequences there are.

    >>> index = PrefixIndex(block_size=2)
    >>> index.extend(7, [1, 2, 3, 4, 5], length=5)
    >>> index.find([1, 2, 3, 4, 9])
    (7, 4)
    >>> index.find([1, 9, 3])
    (None, 0)
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._holders: dict[int, dict[int, None]] = {}  # prefix hash -> sequences that have it, oldest first
        self._chains: dict[int, list[int]] = {}  # sequence -> hash of each of its whole blocks
        self._tokens: dict[int, Sequence[int]] = {}
        self._lengths: dict[int, int] = {}

    def __contains__(self, sequence: int) -> bool:
        return bool(self._chains.get(sequence))

    def extend(self, sequence: int, tokens: Sequence[int], *, length: int) -> None:
        """Say that the first ``length`` tokens of a sequence can be shared; ``tokens`` is kept, not copied."""
        chain = self._chains.setdefault(sequence, [])
        for value in self._hashes(tokens, start=len(chain), stop=length // self.block_size, seed=chain):
            chain.append(value)
            self._holders.setdefault(value, {})[sequence] = None
        self._tokens[sequence], self._lengths[sequence] = tokens, length

    def remove(self, sequence: int) -> None:
        """Forget a sequence; one that is not here is no error."""
        for value in self._chains.pop(sequence, ()):
            holders = self._holders[value]
            del holders[sequence]
            if not holders:
                del self._holders[value]
        self._tokens.pop(sequence, None)
        self._lengths.pop(sequence, None)

    def find(self, tokens: Sequence[int], *, shortest: Callable[[int], int] = lambda _: 0) -> tuple[int | None, int]:
        """Return the sequence with the longest prefix in common with ``tokens``, and that prefix's length.

        A prefix counts from one whole block on, and from ``shortest(sequence)`` tokens on; ``(None, 0)`` when nobody
        shares that much. Among equals the sequence that was entered first is returned.
        """
        candidates: list[dict[int, None]] = []
        for value in self._hashes(tokens, start=0, stop=len(tokens) // self.block_size, seed=[]):
            if value not in self._holders:
                break
            candidates.append(self._holders[value])
        # The deepest block decides, unless two different prefixes have the same hash.
        lengths: dict[int, int] = {}
        for holders in reversed(candidates):
            new = {sequence: self._common(sequence, tokens) for sequence in holders if sequence not in lengths}
            lengths |= new
            best = max(
                (sequence for sequence, length in new.items() if length >= max(self.block_size, shortest(sequence))),
                key=new.__getitem__,
                default=None,
            )
            if best is not None:
                return best, new[best]
        return None, 0

    def _common(self, sequence: int, tokens: Sequence[int]) -> int:
        ours, limit = self._tokens[sequence], min(self._lengths[sequence], len(tokens))
        return next((i for i in range(limit) if ours[i] != tokens[i]), limit)

    def _hashes(self, tokens: Sequence[int], *, start: int, stop: int, seed: Sequence[int]) -> list[int]:
        size, hashes = self.block_size, []
        previous = seed[-1] if seed else 0
        for block in range(start, stop):
            previous = hash((previous, *tokens[block * size : (block + 1) * size]))
            hashes.append(previous)
        return hashes
