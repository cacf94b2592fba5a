"""Dense attention in float64, written from the definition: no pages, no plan, no code of any backend."""

from __future__ import annotations

import torch

__all__ = ["dense_attention"]


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    sm_scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request.

    Args:
        q: ``[q_len, num_qo_heads, head_dim_qk]``.
        k: ``[kv_len, num_kv_heads, head_dim_qk]``.
        v: ``[kv_len, num_kv_heads, head_dim_vo]``.
        causal: row ``i`` sees key ``j`` only if ``j <= kv_len - q_len + i``.
        sm_scale: factor of the logits.
        dtype: everything is computed in it.

    Returns:
        ``(out [q_len, num_qo_heads, head_dim_vo], lse [q_len, num_qo_heads])`` in ``dtype``.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q_len, heads, _ = q.shape
    kv_len, kv_heads, dim = v.shape
    out = torch.zeros(q_len, heads, dim, dtype=dtype, device=q.device)
    lse = torch.full((q_len, heads), -torch.inf, dtype=dtype, device=q.device)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        logits = torch.einsum("id,jd->ij", q[:, head], k[:, kv_head]) * sm_scale
        if causal:
            rows = torch.arange(q_len, device=q.device)[:, None]
            keys = torch.arange(kv_len, device=q.device)[None, :]
            logits = torch.where(keys <= kv_len - q_len + rows, logits, -torch.inf)
        sees = ~torch.isneginf(logits).all(dim=1) if kv_len else torch.zeros(q_len, dtype=torch.bool, device=q.device)
        lse[sees, head] = torch.logsumexp(logits[sees], dim=1)
        out[sees, head] = torch.softmax(logits[sees], dim=1) @ v[:, kv_head]
    return out, lse
