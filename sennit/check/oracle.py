"""Dense attention in float64, written from the definition: no pages, no plan, no code of any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Rules", "dense_attention", "token_positions"]


@dataclass(frozen=True, eq=False)
class Rules:
    """What hides keys of one request and changes its logits, beside lengths and causality.

    Attributes:
        window_left, window_right, num_sink_tokens, logits_soft_cap: as in :class:`sennit.AttentionSpec`.
        alibi_slopes, sinks: a number a query head.
        parents: of the last ``len(parents)`` keys, which form a tree.
        mask: bool ``[q_len, kv_len]``.
        score_mod, mask_mod: the user's functions themselves.
        request: what they get as ``b``.
    """

    window_left: int | None = None
    window_right: int | None = None
    num_sink_tokens: int = 0
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    parents: Sequence[int] | None = None
    mask: torch.Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    request: int = 0


PLAIN = Rules()


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    sm_scale: float,
    rules: Rules = PLAIN,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request.

    Args:
        q: ``[q_len, num_qo_heads, head_dim_qk]``.
        k: ``[kv_len, num_kv_heads, head_dim_qk]``.
        v: ``[kv_len, num_kv_heads, head_dim_vo]``.
        causal: row ``i`` sees key ``j`` only if ``j <= kv_len - q_len + i``.
        sm_scale: factor of the logits.
        rules: further masks, and changes of the logits.
        dtype: everything is computed in it.

    Returns:
        ``(out [q_len, num_qo_heads, head_dim_vo], lse [q_len, num_qo_heads])`` in ``dtype``.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q_len, heads, _ = q.shape
    kv_len, kv_heads, dim = v.shape
    out = torch.zeros(q_len, heads, dim, dtype=dtype, device=q.device)
    lse = torch.full((q_len, heads), -torch.inf, dtype=dtype, device=q.device)
    row_position, key_position = token_positions(q_len, kv_len, rules.parents)
    p, j = row_position.to(q.device)[:, None], key_position.to(q.device)[None, :]
    visible = _visible(p, j, q_len, kv_len, causal, rules)
    for head in range(heads):
        logits = torch.einsum("id,jd->ij", q[:, head], k[:, head // (heads // kv_heads)]) * sm_scale
        if rules.logits_soft_cap is not None:
            logits = torch.tanh(logits / rules.logits_soft_cap) * rules.logits_soft_cap
        if rules.alibi_slopes is not None:
            logits = logits + rules.alibi_slopes[head].to(dtype) * (j - p)
        b, h = (torch.tensor(index, dtype=torch.int32, device=q.device) for index in (rules.request, head))
        if rules.score_mod is not None:
            logits = rules.score_mod(logits, b, h, p, j).to(dtype)
        seen = visible if rules.mask_mod is None else visible & rules.mask_mod(b, h, p, j)
        logits = torch.where(seen, logits, -torch.inf)
        if rules.sinks is not None:  # one more key for everybody, without a value
            logits = torch.cat([logits, rules.sinks[head].to(dtype).expand(q_len, 1)], dim=1)
        sees = ~torch.isneginf(logits).all(dim=1) if logits.shape[1] else torch.zeros(q_len, dtype=torch.bool)
        lse[sees, head] = torch.logsumexp(logits[sees], dim=1)
        out[sees, head] = torch.softmax(logits[sees], dim=1)[:, :kv_len] @ v[:, head // (heads // kv_heads)]
    return out, lse


def token_positions(q_len: int, kv_len: int, parents: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions ``[q_len]`` of rows and ``[kv_len]`` of keys; those of a tree's nodes are committed length + depth."""
    keys = list(range(kv_len))
    for node, parent in enumerate(parents or ()):
        first = kv_len - len(parents or ())
        keys[first + node] = first if parent < 0 else keys[first + parent] + 1
    rows = keys[kv_len - q_len :] if parents else range(kv_len - q_len, kv_len)
    return torch.tensor([*rows], dtype=torch.int64), torch.tensor(keys, dtype=torch.int64)


def _visible(p: torch.Tensor, j: torch.Tensor, q_len: int, kv_len: int, causal: bool, rules: Rules) -> torch.Tensor:
    """bool ``[q_len, kv_len]`` for rows at positions ``p [q_len, 1]`` and keys at ``j [1, kv_len]``."""
    seen = (j <= p) if causal else torch.ones(q_len, kv_len, dtype=torch.bool, device=p.device)
    if rules.parents:
        seen = _tree(q_len, kv_len, rules.parents).to(p.device)
    if rules.window_left is not None or rules.window_right is not None:
        left = kv_len + q_len if rules.window_left is None else rules.window_left
        right = kv_len + q_len if rules.window_right is None else rules.window_right
        seen = seen & ((j < rules.num_sink_tokens) | ((p - j <= left) & (p - j >= -right)))
    return seen if rules.mask is None else seen & rules.mask


def _tree(q_len: int, kv_len: int, parents: Sequence[int]) -> torch.Tensor:
    """What the last ``q_len`` nodes see: all committed keys, their ancestors and themselves."""
    first = kv_len - len(parents)
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    seen[:, :first] = True
    for row in range(q_len):
        node = len(parents) - q_len + row
        while node >= 0:
            seen[row, first + node] = True
            node = parents[node]
    return seen
