"""Score and mask functions to try, as FlexAttention's users write them, with the tensors that they close over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["Functions", "random_functions"]


@dataclass(frozen=True)
class Functions:
    """A score function, a mask function or both, and what they close over by name."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    captures: dict[str, torch.Tensor] = field(default_factory=dict)


def random_functions(
    rng: np.random.Generator, *, heads: int, requests: int, positions: int, dtype: torch.dtype
) -> Functions:
    """Some functions over captured tensors that fit ``requests`` requests of at most ``positions`` positions.

    Args:
        rng: source of everything random.
        heads: query heads.
        requests: how many requests functions index.
        positions: positions are below it, and at least ``-positions``.
        dtype: of captured tensors that are not integers.
    """
    requests, positions = max(requests, 1), max(positions, 1)
    slopes = torch.from_numpy(rng.uniform(-0.3, 0.3, heads)).to(dtype)
    table = torch.from_numpy(rng.normal(size=(heads, 8))).to(dtype)
    document = torch.from_numpy(rng.integers(0, 3, (requests, 2 * positions)).cumsum(axis=1) // 7)
    prefix = torch.from_numpy(rng.integers(0, positions + 1, requests))
    cap = float(rng.uniform(1, 10))
    stride = int(rng.integers(1, 5))

    def distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (q_idx - kv_idx)

    def bucketed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, torch.clamp((q_idx - kv_idx).abs() // 4, 0, 7)]

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def dropped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx + kv_idx + h) % 3 != 0, score, -float("inf"))

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document[b, q_idx + positions] == document[b, kv_idx + positions]

    def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

    def strided(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx + h) % stride == 0

    scores: list[tuple[Callable[..., Any] | None, dict[str, torch.Tensor]]] = [
        (None, {}), (distance, {"slopes": slopes}), (bucketed, {"table": table}), (capped, {}), (dropped, {}),
    ]  # fmt: skip
    masks: list[tuple[Callable[..., Any] | None, dict[str, torch.Tensor]]] = [
        (None, {}), (documents, {"document": document}), (prefix_lm, {"prefix": prefix}), (strided, {}),
    ]  # fmt: skip
    score_mod, of_score = scores[int(rng.integers(len(scores)))]
    mask_mod, of_mask = masks[int(rng.integers(len(masks)))]
    return Functions(score_mod, mask_mod, of_score | of_mask)
