"""Draws next tokens from logits: the filters of :class:`Sampling`, and one random number for each seed and token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sennit.hf.sampling import Sampling

__all__ = ["NO_TOKEN", "Choice", "choose", "kept_weights", "uniforms"]

NO_TOKEN = -1  # where logits are no numbers

# How a row's token is chosen, and its place among its request's new tokens, from 0.
Choice: TypeAlias = "tuple[Sampling, int]"

Uint64Array: TypeAlias = "npt.NDArray[np.uint64]"

# Rows are drawn together as far as a temporary of this many numbers (32 MiB) goes.
MAX_NUMBERS = 2**22


def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """Return the next token of every row, as its :class:`Sampling` says.

    A row's token depends on its logits and its choice alone, bit for bit: sums are taken over integers, so that it does
    not matter in which order a device adds for how many rows.

    Args:
        logits: ``[rows, vocabulary]``, of any floating dtype; ``-inf`` is allowed where a token is impossible.
        choices: one a row; those that sample have a seed.

    Returns:
        int64 ``[rows]`` on the logits' device; :data:`NO_TOKEN` where the largest logit is NaN or infinite.
    """
    best, tokens = logits.max(dim=-1)
    # Rows with a filter that needs sorting come first, so that a slice has them.
    rows = [row for row, (how, _) in enumerate(choices) if not how.greedy]
    rows.sort(key=lambda row: not _needs_order(choices[row][0]))
    if rows:
        drawn = [choices[row] for row in rows]
        table = torch.from_numpy(np.column_stack([rows, _numbers(drawn, logits.shape[1])])).to(logits.device)
        num_ordered = sum(_needs_order(how) for how, _ in drawn)
        size = max(1, MAX_NUMBERS // logits.shape[1])
        for start in range(0, len(rows), size):
            block = table[start : start + size]
            row = block[:, 0].long()
            weights = kept_weights(logits[row], block[:, 1:5], num_ordered=min(max(num_ordered - start, 0), size))
            tokens[row] = _draw(weights, block[:, 5:])
    return tokens.masked_fill(~best.isfinite(), NO_TOKEN)


def uniforms(seeds: npt.ArrayLike, places: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return a number from 0 up to 1, 1 excluded, for every seed and place of a token; the same ones everywhere.

    A seed starts a stream of SplitMix64 (Steele, Lea and Flood: Fast splittable pseudorandom number generators, OOPSLA
    2014; https://prng.di.unimi.it/splitmix64.c) at the stream's own first output, so that seeds side by side are far
    apart; the upper 53 bits of the output at the place, scaled.

    >>> uniforms([7, 7, 8], [0, 1, 0]).round(3)
    array([0.722, 0.65 , 0.267])
    """
    start = _mixed(np.asarray(seeds, np.uint64) + GAMMA)
    steps = np.asarray(places, np.uint64) + np.uint64(1)
    bits: Uint64Array = _mixed(start + steps * GAMMA) >> np.uint64(11)
    return np.ldexp(bits.astype(np.float64), -53)


GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd


def _mixed(state: Uint64Array) -> Uint64Array:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def _needs_order(how: Sampling) -> bool:
    return how.top_k is not None or how.top_p is not None


def _numbers(choices: Sequence[Choice], vocabulary: int) -> npt.NDArray[np.float64]:
    """``[rows, 5]``: temperature, top-k, top-p, min-p and the random number; a filter that is off keeps everything."""
    filters = [
        (how.temperature, min(how.top_k or vocabulary, vocabulary), how.top_p or 1.0, how.min_p or 0.0)
        for how, _ in choices
    ]
    seeds = np.array([how.seed for how, _ in choices], np.uint64)
    return np.column_stack([np.array(filters, np.float64), uniforms(seeds, [place for _, place in choices])])


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One column a row: the first at which the sum of the weights exceeds a part of them all, ``uniform`` of it."""
    sums = weights.cumsum(dim=1)
    total = sums[:, -1:]
    part = (uniform * total).long().minimum(total - 1)  # below the total, so that the column has a weight
    return torch.searchsorted(sums, part, right=True)[:, 0]


def kept_weights(logits: torch.Tensor, filters: torch.Tensor, *, num_ordered: int) -> torch.Tensor:
    """Return how probable each token is after temperature and filters, in whole numbers; 0 where it is left out.

    Args:
        logits: ``[rows, vocabulary]``, of any floating dtype.
        filters: float64 ``[rows, 4]``: temperature, top-k, top-p and min-p.
        num_ordered: the first so many rows have top-k or top-p applied, for which they are sorted.

    Returns:
        int64 ``[rows, vocabulary]``: 2**62 over a power of two above the vocabulary at the most probable token.
    """
    temperature, top_k, top_p, min_p = filters.chunk(4, dim=1)
    wide = logits.double()
    scaled = (wide - wide.amax(dim=1, keepdim=True)) / temperature  # 0 at the most probable token
    least = min_p.log()
    if num_ordered:
        first = slice(num_ordered)
        least[first] = least[first].maximum(_least_kept(scaled[first], top_k[first], top_p[first]))
    return _weights(scaled).masked_fill(scaled < least, 0)


def _least_kept(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``[rows, 1]``: the smallest of each row's ``scaled`` that top-k, and then top-p, keep."""
    ordered = scaled.sort(dim=1, descending=True).values
    last = ordered.gather(1, top_k.long() - 1)
    weights = _weights(ordered).masked_fill(ordered < last, 0)
    sums = weights.cumsum(dim=1)
    # A token stays while those before it do not have the probability yet. (At least one, also where logits are NaN.)
    kept = (sums - weights < top_p * sums[:, -1:]).sum(dim=1, keepdim=True).clamp(min=1)
    return last.maximum(ordered.gather(1, kept - 1))


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """Numerators of a softmax as integers, of as many bits as let a whole row's sum fit 62.

    With 150,000 tokens, what rounding takes away altogether has less than a 10**8th of the probability.
    """
    bits = 62 - scaled.shape[1].bit_length()
    return (scaled.exp() * 2.0**bits).long()
