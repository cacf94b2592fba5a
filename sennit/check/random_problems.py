"""Random hostile problems: any heads, dims, lengths, pages, forms, masks, scores, trees and functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sennit.check.functions import random_functions
from sennit.check.problems import Problem, make_problem
from sennit.spec import AttentionSpec

__all__ = ["random_problem"]

LENGTH_DTYPES = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


def random_problem(
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    max_requests: int = 5,
    max_tokens: int = 90,
    device: str | torch.device = "cpu",
) -> Problem:
    """A problem of which everything is random; lengths of zero and ``kv_len < q_len`` are ordinary."""
    spec = _random_spec(rng, dtype)
    count = int(rng.integers(0, max_requests + 1))
    kv_lens = [int(rng.choice([0, 1, int(rng.integers(0, max_tokens))])) for _ in range(count)]
    q_lens = [int(rng.choice([0, 1, int(rng.integers(0, n + 4)), int(rng.integers(0, 6))])) for n in kv_lens]
    pools = (
        ["pair", "strided"]
        if spec.latent or spec.head_dim_qk != spec.head_dim_vo
        else ["pair", "strided", "interleaved"]
    )
    functions, trees = None, None
    if rng.random() < 0.3:
        positions = max([*q_lens, *kv_lens, 1])
        functions = random_functions(
            rng,
            heads=spec.num_qo_heads,
            requests=count,
            positions=positions,
            dtype=torch.promote_types(dtype, torch.float32),  # in which logits are computed
        )
    if rng.random() < 0.2:
        trees = [_random_tree(rng, m, n) for m, n in zip(q_lens, kv_lens, strict=True)]
    page_size = None if rng.random() < 0.15 else int(rng.choice([1, 2, 3, 5, 8, 16, 64]))
    bounds = [n + int(rng.integers(0, 40)) for n in kv_lens] if page_size and rng.random() < 0.2 else None
    longest = max(bounds or kv_lens, default=0)
    lengths_fit = [d for d in LENGTH_DTYPES if np.iinfo(d).max >= max(sum(q_lens), longest)]
    return make_problem(
        rng,
        spec,
        q_lens,
        kv_lens,
        page_size=page_size,
        kv_layout="NHD" if rng.random() < 0.5 else "HND",
        form=str(rng.choice(["csr", "padded"])),
        pool=str(rng.choice(pools)),
        causal=[bool(rng.random() < 0.7) or bool(trees and trees[r]) for r in range(count)],
        gaps=bool(rng.random() < 0.3),
        bounds=bounds,
        functions=functions,
        trees=trees,
        masked=bool(rng.random() < 0.15),
        length_dtype=lengths_fit[int(rng.integers(len(lengths_fit)))],
        device=device,
    )


def _random_spec(rng: np.random.Generator, dtype: torch.dtype) -> AttentionSpec:
    kv_heads = int(rng.integers(1, 4))
    group = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16]))
    if rng.random() < 0.15:
        spec = AttentionSpec.mla(
            num_qo_heads=group, kv_lora_rank=int(rng.choice([8, 16, 24])), qk_rope_head_dim=8, dtype=dtype
        )
    else:
        dim = int(rng.choice([4, 8, 16, 20]))
        dim_vo = int(rng.choice([dim, 8, 12]))
        spec = AttentionSpec(
            num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_vo, dtype=dtype
        )
    return spec.replace(**_random_fields(rng))


def _random_fields(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of a spec that half of all problems leave as they are."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        return fields
    if rng.random() < 0.6:
        fields["window_left"] = int(rng.choice([0, 1, 5, 17, 40]))
        fields["num_sink_tokens"] = int(rng.choice([0, 0, 1, 4, 9]))
    if rng.random() < 0.3:
        fields["window_right"] = int(rng.choice([0, 1, 3, 20]))
    for name in ("learned_sinks", "alibi"):
        fields[name] = bool(rng.random() < 0.3)
    if rng.random() < 0.3:
        fields["logits_soft_cap"] = float(rng.choice([1.0, 5.0, 30.0]))
    return fields


def _random_tree(rng: np.random.Generator, q_len: int, kv_len: int) -> list[int] | None:
    """Parents of at least ``q_len`` and at most ``kv_len`` nodes."""
    if q_len > kv_len or rng.random() < 0.3:
        return None
    nodes = int(rng.integers(q_len, min(kv_len, q_len + 8) + 1))
    return [int(rng.integers(-1, node)) for node in range(nodes)]
