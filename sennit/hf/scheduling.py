"""Decides, from integers alone, how many tokens of which sequence a packed step computes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["Chunk", "MissingPages", "cut_to_pages", "growing_room", "share_budget", "tokens_that_fit"]

# (sequence, tokens): for a running sequence the tokens that are known but not in the cache yet, in a step those that
# it computes.
Chunk: TypeAlias = "tuple[int, int]"

# Pages that must become free before a step over some chunks fits.
MissingPages: TypeAlias = "Callable[[Sequence[Chunk]], int]"


def share_budget(pending: Sequence[Chunk], *, max_tokens: int) -> list[Chunk]:
    """Return how many tokens each running sequence computes in the next step, as far as the token budget goes.

    Sequences with one pending token (they decode) come first, so that a long prompt never delays them; what is left
    goes to the others in the order in which they started.

    Args:
        pending: ``(sequence, tokens)`` of every running sequence in the order in which they started; tokens >= 1.
        max_tokens: tokens a step may compute, at least the number of sequences.

    >>> share_budget([(0, 1), (1, 30), (2, 1), (3, 8)], max_tokens=16)
    [(0, 1), (1, 14), (2, 1)]
    """
    left = max_tokens - sum(tokens == 1 for _, tokens in pending)
    chunks = []
    for sequence, tokens in pending:
        count = 1 if tokens == 1 else min(tokens, left)
        left -= 0 if tokens == 1 else count
        if count:
            chunks.append((sequence, count))
    return chunks


def cut_to_pages(chunks: Sequence[Chunk], *, missing_pages: MissingPages) -> list[Chunk] | None:
    """Return the chunks, the longer ones cut to what the free pages hold, or None when the pages stop the step.

    None means that a chunk of one token (a decode) has no page, or that nothing at all fits: the caller frees pages
    and asks again.

    >>> missing = lambda chunks: max(0, sum(-(-n // 4) for _, n in chunks) - 4)
    >>> cut_to_pages([(0, 1), (1, 14), (2, 1)], missing_pages=missing)
    [(0, 1), (1, 8), (2, 1)]
    >>> cut_to_pages([(0, 1), (1, 14), (2, 1)], missing_pages=lambda chunks: len(chunks) - 1) is None
    True
    """
    if not missing_pages(chunks):
        return list(chunks)
    counts = {sequence: 1 for sequence, tokens in chunks if tokens == 1}
    if missing_pages(list(counts.items())):
        return None
    for sequence, tokens in chunks:
        if tokens > 1:
            placed = list(counts.items())
            count = tokens_that_fit((sequence, tokens), placed, missing_pages)
            if count:
                counts[sequence] = count
    return [(sequence, counts[sequence]) for sequence, _ in chunks if sequence in counts] or None


def growing_room(num_running: int) -> int:
    """Return the pages that stay free when one more sequence joins ``num_running`` others.

    A page to grow into for each, and for the new one: otherwise it would often be preempted in the very next step,
    and its work done twice. A sequence that runs alone needs none.
    """
    return num_running + 1 if num_running else 0


def tokens_that_fit(chunk: Chunk, placed: Sequence[Chunk], missing_pages: MissingPages) -> int:
    """Return how many of a chunk's tokens fit beside the chunks already placed."""
    sequence, tokens = chunk
    if not missing_pages([*placed, chunk]):
        return tokens
    return bisect_right(range(1, tokens + 1), 0, key=lambda count: missing_pages([*placed, (sequence, count)]))
