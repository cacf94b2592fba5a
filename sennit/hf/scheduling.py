"""Decides, from integers alone, how many tokens of which sequence a packed step computes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["Chunk", "PagesNeeded", "cut_to_pages", "growing_room", "share_budget"]

# (sequence, tokens): for a running sequence the tokens that are known but not in the cache yet, in a step those that
# it computes.
Chunk: TypeAlias = "tuple[int, int]"

# Free pages that a step over some chunks would take.
PagesNeeded: TypeAlias = "Callable[[Sequence[Chunk]], int]"


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


def cut_to_pages(chunks: Sequence[Chunk], *, free_pages: int, pages_needed: PagesNeeded) -> list[Chunk] | None:
    """Return the chunks, the longer ones cut to what the free pages hold, or None when the pages stop the step.

    None means that a chunk of one token (a decode) has no page, or that nothing at all fits: the caller frees pages
    and asks again.

    >>> pages = lambda chunks: sum(-(-n // 4) for _, n in chunks)
    >>> cut_to_pages([(0, 1), (1, 14), (2, 1)], free_pages=4, pages_needed=pages)
    [(0, 1), (1, 8), (2, 1)]
    >>> cut_to_pages([(0, 1), (1, 14), (2, 1)], free_pages=1, pages_needed=pages) is None
    True
    """
    if pages_needed(chunks) <= free_pages:
        return list(chunks)
    counts = {sequence: 1 for sequence, tokens in chunks if tokens == 1}
    if pages_needed(list(counts.items())) > free_pages:
        return None
    for sequence, tokens in chunks:
        if tokens > 1:
            placed = list(counts.items())
            count = _tokens_that_fit((sequence, tokens), placed, free_pages, pages_needed)
            if count:
                counts[sequence] = count
    return [(sequence, counts[sequence]) for sequence, _ in chunks if sequence in counts] or None


def growing_room(num_running: int) -> int:
    """Return the pages that stay free when one more sequence joins ``num_running`` others.

    A page to grow into for each, and for the new one: otherwise it would often be preempted in the very next step,
    and its work done twice. A sequence that runs alone needs none.
    """
    return num_running + 1 if num_running else 0


def _tokens_that_fit(chunk: Chunk, placed: Sequence[Chunk], free_pages: int, pages_needed: PagesNeeded) -> int:
    """How many of a chunk's tokens the free pages hold beside the chunks already placed."""
    sequence, tokens = chunk

    def excess(count: int) -> int:
        return max(0, pages_needed([*placed, (sequence, count)]) - free_pages)

    return bisect_right(range(1, tokens + 1), 0, key=excess)
