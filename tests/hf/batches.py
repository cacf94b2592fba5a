"""Prompts for continuous batches, and how to run a batcher until it has nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sennit.hf import Batcher, Completion, Event


def alike_prompts(lengths: list[int], *, shared: int, seed: int = 0) -> list[list[int]]:
    """Random prompts; of every three, two begin with the same tokens as far as they are long enough."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(0, 256, (shared,), generator=generator).tolist()
    prompts = []
    for i, length in enumerate(lengths):
        own = torch.randint(0, 256, (length,), generator=generator).tolist()
        prompts.append(own if i % 3 == 0 else common[:length] + own[shared:])
    return prompts


def drain(batcher: Batcher, *, check: bool = True) -> tuple[list[Event], dict[int, Completion]]:
    """Step until there is nothing to do; verify the cache's invariants after every step."""
    events: list[Event] = []
    while batcher.has_work:
        events += batcher.step()
        if check:
            batcher.cache.check()
    return events, {e.request: e.completion for e in events if e.completion is not None}


@contextlib.contextmanager
def step_counts(batcher: Batcher) -> Iterator[list[list[int]]]:
    """Tokens of each request of each step."""
    counts: list[list[int]] = []
    original = batcher.cache.step

    def recorded(items: list[tuple[int, int]], **options: Any) -> Any:
        counts.append([count for _, count in items])
        return original(items, **options)

    batcher.cache.step = recorded  # type: ignore[method-assign]
    yield counts
    del batcher.cache.step


def mixed_lengths(count: int, longest: int) -> list[int]:
    """``count`` lengths from 1 to ``longest``, both included, short ones more often."""
    return [1 + round((longest - 1) * (i * 7 % count / (count - 1)) ** 1.5) for i in range(count)]
