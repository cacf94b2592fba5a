"""Sizes: how large a batcher's cache is when nobody says, and the check of those that somebody gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sennit.cache.capacity import free_bytes
from sennit.errors import InvalidInput
from sennit.spec import AttentionSpec

__all__ = ["default_tokens", "positive", "tokens_for"]

# Of the memory that is free after the model has been loaded. Activations need some too; a host has other programs.
FRACTION = {"cuda": 0.5, "cpu": 0.25}


def default_tokens(wanted: int, specs: Sequence[AttentionSpec], device: torch.device, *, page_size: int) -> int:
    """Return ``wanted`` tokens, or as many as a sensible part of the free memory holds if that is less."""
    bytes_per_token = sum(spec.kv_bytes_per_token for spec in specs)
    affordable = int(free_bytes(device) * FRACTION.get(device.type, 0.25)) // (bytes_per_token * page_size)
    return max(1, min(-(-wanted // page_size), affordable)) * page_size


def tokens_for(lengths: Sequence[int], *, page_size: int, max_requests: int) -> int:
    """Return the cache's tokens with which requests of these full lengths never wait for memory.

    Only ``max_requests`` of them run at a time; each has its own last page, and one to grow into when it joins.

    >>> tokens_for([1, 40, 16], page_size=16, max_requests=2)
    96
    """
    longest = sorted(lengths, reverse=True)[:max_requests]
    return sum(-(-length // page_size) + 1 for length in longest) * page_size


def positive(name: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least 1, or raise :class:`InvalidInput`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(name, expected="an integer of at least 1", got=repr(value))
    return value
