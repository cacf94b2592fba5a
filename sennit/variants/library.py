"""Ready masks and scores, with FlexAttention's signature: they can be traced, combined, and given to FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "MaskMod",
    "ScoreMod",
    "alibi",
    "causal",
    "document",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "soft_cap",
]


MaskMod = Callable[[Any, Any, Any, Any], Any]  # (b, h, q_idx, kv_idx): whether the query sees the key
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]  # (score, b, h, q_idx, kv_idx): what becomes of the logit


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No key after the query. ``plan(causal=True)`` does the same, and plans no work for hidden keys.

    >>> from sennit.variants import trace
    >>> print(trace(causal, "mask"))
    q_idx >= kv_idx
    """
    return q_idx >= kv_idx


def sliding_window(left: int) -> MaskMod:
    """No key after the query, or more than ``left`` positions before it. A spec's ``window_left`` plans less work.

    >>> from sennit.variants import trace
    >>> print(trace(sliding_window(1023), "mask"))
    (q_idx >= kv_idx) & (q_idx - kv_idx <= 1023)
    """

    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= left)

    return sliding_window


def prefix_lm(prefix_length: torch.Tensor) -> MaskMod:
    """Every query sees the first ``prefix_length[b]`` keys of its request; beyond them none after itself.

    Args:
        prefix_length: int32 or int64 ``[requests]``; the capture ``prefix_length``.

    >>> from sennit.variants import trace
    >>> print(trace(prefix_lm(torch.tensor([7, 3])), "mask"))
    (kv_idx < prefix_length[b]) | (q_idx >= kv_idx)
    """

    def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < prefix_length[b]) | (q_idx >= kv_idx)

    return prefix_lm


def document(document_id: torch.Tensor) -> MaskMod:
    """Queries see the keys of their own document, for requests that pack several.

    Args:
        document_id: ``[requests, positions]`` of any integer dtype; the capture ``document_id``.

    >>> from sennit.variants import trace
    >>> print(trace(document(torch.tensor([[0, 0, 1]])), "mask"))
    document_id[b, q_idx] == document_id[b, kv_idx]
    """

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document_id[b, q_idx] == document_id[b, kv_idx]

    return document


def alibi(slopes: torch.Tensor) -> ScoreMod:
    """Add ``slopes[h] * (kv_idx - q_idx)`` to a logit (arXiv:2108.12409). A spec's ``alibi`` does the same.

    Args:
        slopes: float ``[num_qo_heads]``; the capture ``slopes``.

    >>> from sennit.variants import trace
    >>> print(trace(alibi(torch.tensor([0.5, 0.25])), "score"))
    score + slopes[h] * (kv_idx - q_idx)
    """

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def soft_cap(cap: float) -> ScoreMod:
    """Keep logits within ``-cap`` and ``cap`` (arXiv:2408.00118, section 2). So does a spec's ``logits_soft_cap``.

    >>> from sennit.variants import trace
    >>> print(trace(soft_cap(50.0), "score"))
    50.0 * tanh(score / 50.0)
    """

    def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return soft_cap


def relative_bias(table: torch.Tensor, farthest: int) -> ScoreMod:
    """Add a learned bias that depends on the head and on the distance of the key, which is clamped.

    Args:
        table: float ``[num_qo_heads, 2 * farthest + 1]``, for distances ``kv_idx - q_idx`` from ``-farthest`` to
            ``farthest``; the capture ``table``.
        farthest: the largest distance that the table tells from farther ones.

    >>> from sennit.variants import trace
    >>> print(trace(relative_bias(torch.zeros(8, 33), 16), "score"))
    score + table[h, minimum(maximum(kv_idx - q_idx, -16), 16) + 16]
    """

    def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, torch.clamp(kv_idx - q_idx, -farthest, farthest) + farthest]

    return relative_bias
