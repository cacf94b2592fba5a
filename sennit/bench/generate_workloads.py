"""Prompts to generate for, of given numbers of tokens: pieces of Python's own documentation, or random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sennit.errors import InvalidInput

__all__ = ["Workload", "even_lengths", "make_random_workload", "make_workloads", "spread_lengths", "uneven_lengths"]

SPREAD = 0.05  # of the even lengths, to both sides of their mean
SHORTEST = 7
SEED = 0


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and what their lengths are like."""

    name: str
    prompts: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    def __str__(self) -> str:
        return f"{len(self.prompts)} prompts of {min(self.lengths)} to {max(self.lengths)} tokens"


def make_workloads(tokenizer: Any, *, count: int, mean: int) -> tuple[Workload, Workload]:
    """Return ``count`` prompts of about ``mean`` tokens each, and as many of 7 to ``2 * mean``.

    Both have about the same number of tokens, so that what the second costs more is due to its unevenness. The text is
    that of ``help("...")`` on Python's own topics, the same in every installation of one Python version.

    Raises:
        InvalidInput: there is not so much text, or ``2 * mean`` is less than the shortest prompt.
    """
    if 2 * mean < SHORTEST:
        raise InvalidInput("prompt_tokens", expected=f"at least {-(-SHORTEST // 2)}", got=mean)
    text = tokenizer(_english_text(), add_special_tokens=False, verbose=False)["input_ids"]
    return (
        Workload("even", _cut(text, even_lengths(count, mean))),
        Workload("uneven", _cut(text, uneven_lengths(count, mean))),
    )


def make_random_workload(vocabulary: int, *, count: int, mean: int) -> Workload:
    """``count`` prompts of random tokens, 0.4 to 1.6 times ``mean`` of them each, for models without a tokenizer."""
    rng = np.random.default_rng(SEED)
    lengths = spread_lengths(count, mean)
    return Workload("random", tuple(tuple(rng.integers(0, vocabulary, length).tolist()) for length in lengths))


def spread_lengths(count: int, mean: int) -> list[int]:
    """Lengths from 0.4 to 1.6 times ``mean``, evenly spaced, in no order.

    >>> sorted(spread_lengths(4, 2500))
    [1000, 2000, 3000, 4000]
    """
    return _shuffled(np.linspace(1.6 * mean, 0.4 * mean, count))


def even_lengths(count: int, mean: int) -> list[int]:
    """Lengths within 5% of ``mean``, in no order.

    >>> sorted(even_lengths(5, 1000))
    [950, 975, 1000, 1025, 1050]
    """
    return _shuffled(np.linspace(mean * (1 + SPREAD), mean * (1 - SPREAD), count))


def uneven_lengths(count: int, mean: int) -> list[int]:
    """Lengths from 7 to ``2 * mean``, evenly spaced, in no order.

    >>> sorted(uneven_lengths(4, 1000))
    [7, 671, 1336, 2000]
    """
    return _shuffled(np.linspace(2 * mean, SHORTEST, count))


def _shuffled(lengths: Any) -> list[int]:
    whole: list[int] = np.rint(lengths).astype(int).tolist()
    return [whole[place] for place in np.random.default_rng(SEED).permutation(len(whole)).tolist()]


def _cut(text: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Pieces of these lengths, one after the other."""
    ends = np.cumsum(lengths).tolist()
    if ends[-1] > len(text):
        raise InvalidInput(
            "prompts, prompt_tokens", expected=f"at most {len(text)} tokens in all", got=f"{ends[-1]} tokens"
        )
    return tuple(tuple(text[end - length : end]) for end, length in zip(ends, lengths, strict=True))


def _english_text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
