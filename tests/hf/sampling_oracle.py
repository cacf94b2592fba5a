"""What sampling is compared with: the published random numbers, and the probabilities that transformers draws from."""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sennit.hf import Sampling


class SplitMix64:
    """https://prng.di.unimi.it/splitmix64.c, in Python's integers."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)


def reference_uniform(seed: int, place: int) -> float:
    stream = SplitMix64(SplitMix64(seed).next())
    return ([stream.next() for _ in range(place + 1)][-1] >> 11) / 2**53


def transformers_probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Softmax of float64 logits after transformers' own processors, in the order of its ``generate``."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(how.temperature)])
    if how.top_k is not None:
        processors.append(TopKLogitsWarper(how.top_k))
    if how.top_p is not None:
        processors.append(TopPLogitsWarper(how.top_p))
    if how.min_p is not None:
        processors.append(MinPLogitsWarper(how.min_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.int64), logits.double()).softmax(-1)
