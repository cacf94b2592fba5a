"""PyTorch's scaled_dot_product_attention as a peer: over keys that lie ready, and over keys gathered from pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sennit.bench.instruments import Peer, Prepared
from sennit.check.problems import Problem
from sennit.errors import UnsupportedFeature
from sennit.pools import nhd_views, split_pools
from sennit.spec import AttentionSpec

__all__ = ["sdpa_peers"]

WINDOW = {"window_left", "num_sink_tokens"}


def sdpa_peers() -> list[Peer]:
    """SDPA over contiguous keys and values, whose gathering is not timed, and over pages that every call gathers."""
    version = f"torch {torch.__version__}"
    return [
        Peer(f"SDPA, contiguous keys ({version})", _contiguous),
        Peer(f"gather pages + SDPA ({version})", _gathered),
    ]


def _contiguous(problem: Problem) -> Prepared:
    _check(problem.spec)

    def head_major(rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(0, 1)[None].contiguous()

    stored = [(head_major(k), head_major(v)) for k, v in zip(problem.keys, problem.values, strict=True)]
    return Prepared(_over_requests(problem, lambda request: stored[request]), "head by head, one call a request")


def _gathered(problem: Problem) -> Prepared:
    _check(problem.spec)
    batch, spec = problem.batch, problem.spec
    assert batch.pages is not None
    assert problem.page_size is not None
    pools = nhd_views(*split_pools("kv", problem.kv, spec, paged=True), spec, problem.kv_layout, problem.page_size)
    counts = batch.pages_needed(problem.page_size).tolist()
    starts, kv_lens = batch.pages.starts.tolist(), batch.kv_lens.tolist()
    entries = torch.as_tensor(batch.pages.entries)
    tables = [entries[start : start + count].long() for start, count in zip(starts, counts, strict=True)]

    def gather(request: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (pool[tables[request]].flatten(0, 1)[: kv_lens[request]].transpose(0, 1)[None] for pool in pools)
        return k, v

    return Prepared(_over_requests(problem, gather), f"pages of {problem.page_size}, one call a request")


def _check(spec: AttentionSpec) -> None:
    if others := spec.features - WINDOW:
        raise UnsupportedFeature(", ".join(sorted(others)), "SDPA knows masks only")


@dataclass(frozen=True)
class Rows:
    """How one request's query rows are given to SDPA.

    With one new token, and with latents, the heads of a group are rows of one KV head: nothing is then repeated.
    """

    at: slice  # of the query tensor
    folded: bool
    mask: torch.Tensor | None  # bool [rows, kv_len]
    causal: bool


def _rows(problem: Problem, request: int) -> Rows:
    batch, spec = problem.batch, problem.spec
    start, q_len, kv_len = (int(lengths[request]) for lengths in (batch.q_starts, batch.q_lens, batch.kv_lens))
    folded = q_len == 1 or spec.latent
    at = slice(start, start + q_len)
    if spec.window_left is None and (q_len == 1 or (q_len == kv_len and not folded)):
        return Rows(at, folded, None, causal=q_len > 1)
    p, j = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)[None, :]
    mask = j <= p
    if spec.window_left is not None:
        mask &= (p - j <= spec.window_left) | (j < spec.num_sink_tokens)
    return Rows(at, folded, mask.repeat_interleave(spec.group_size, 0) if folded else mask, causal=False)


def _over_requests(
    problem: Problem, keys_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], torch.Tensor]:
    """A call of SDPA for every request; ``keys_of`` gives its keys and values, ``[1, num_kv_heads, kv_len, dim]``."""
    spec, group = problem.spec, problem.spec.group_size
    requests = [(r, _rows(problem, r)) for r in range(problem.batch.num_requests) if problem.batch.q_lens[r]]
    out = problem.q.new_zeros(len(problem.q), spec.num_qo_heads, spec.head_dim_vo)

    def run() -> torch.Tensor:
        for request, rows in requests:
            k, v = keys_of(request)
            if spec.latent:
                v = k  # SDPA is slow where dimensions differ; the columns that are no values are cut off below
            q = problem.q[rows.at]
            if rows.folded:
                q = q.view(len(q), spec.num_kv_heads, group, -1).transpose(0, 1).flatten(1, 2)[None]
            else:
                q = q.transpose(0, 1)[None]
            found = F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=rows.mask, is_causal=rows.causal, scale=problem.sm_scale, enable_gqa=not rows.folded,
            )[0, ..., : spec.head_dim_vo]  # fmt: skip
            if rows.folded:
                found = found.reshape(spec.num_kv_heads, -1, group, spec.head_dim_vo).transpose(0, 1).flatten(1, 2)
            else:
                found = found.transpose(0, 1)
            out[rows.at] = found
        return out

    return run
