"""Cases that write keys and values before they read them: append through a plan, and a cache's life."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sennit.attention import BatchAttention
from sennit.check.outcome import Outcome
from sennit.check.problems import Problem
from sennit.check.twin import Disagreement, Twin, fill_with_nan
from sennit.errors import CacheCorrupt
from sennit.kvcache import KVCache
from sennit.plan.plan import Plan
from sennit.pools import nhd_views, split_pools
from sennit.spec import AttentionSpec

__all__ = ["CacheScenario", "append_again"]


def append_again(problem: Problem, attention: BatchAttention, plan: Plan) -> str:
    """Fill the slots of a problem's new tokens with NaN, append those tokens, and see that pools are as before.

    Returns:
        What is wrong; empty where every slot has its bits back and no other has changed.
    """
    spec = problem.spec
    k, v = split_pools("kv_pages", problem.kv, spec, paged=True)
    views = nhd_views(k, v, spec, problem.kv_layout, problem.page_size)
    before = [view.clone() for view in views]
    rows = [
        problem.q.new_full((len(problem.q), spec.num_kv_heads, dim), torch.nan, dtype=spec.kv_dtype)
        for dim in (spec.head_dim_qk, spec.head_dim_vo)
    ]
    for row, request, position, page, offset in _new_tokens(problem):
        rows[0][row], rows[1][row] = problem.keys[request][position], problem.values[request][position]
        for view in views:
            view[page, offset] = torch.nan
    if spec.latent:
        attention.append(plan, rows[0][:, 0], None, problem.kv)
    else:
        attention.append(plan, rows[0], rows[1], problem.kv)
    changed = sum(_differences(view, old) for view, old in zip(views, before, strict=True))
    return f"append left {changed} numbers other than those of the new tokens in their slots" if changed else ""


def _differences(one: torch.Tensor, other: torch.Tensor) -> int:
    """Numbers that differ; NaN is equal to NaN."""
    return int(((one != other) & ~(one.isnan() & other.isnan())).sum())


def _new_tokens(problem: Problem) -> Iterator[tuple[int, int, int, int, int]]:
    """Query row, request, position, page and offset of every new token that has a slot."""
    batch, size = problem.batch, problem.page_size
    assert batch.pages is not None
    assert size is not None
    kv_lens = map(len, problem.keys)
    for request, (start, q_len, kv_len) in enumerate(zip(batch.q_starts, batch.q_lens, kv_lens, strict=True)):
        for position in range(max(0, int(kv_len - q_len)), int(kv_len)):
            page = int(batch.pages.entries[int(batch.pages.starts[request]) + position // size])
            yield int(start + position - (kv_len - q_len)), request, position, page, position % size


class CacheScenario:
    """A cache of some layers, and its twin, through a life that mixes prefill, decode, forks, trims and removals.

    Args:
        specs: one a layer.
        page_size: tokens a page.
        backend: its name.
        device: where it runs.
    """

    def __init__(self, specs: Sequence[AttentionSpec], page_size: int, backend: str, device: torch.device) -> None:
        self.cache = KVCache(specs, num_tokens=256, page_size=page_size, device=device, backend=backend)
        self.twin = Twin(fill_with_nan(self.cache), seed=7)

    def run(self) -> Outcome:
        """Prefill, fork in the middle of a page, trim, remove, in steps that mix all of them; then read all back."""
        twin = self.twin
        first, second = twin.add(), twin.add()
        found = twin.step([(first, 37), (second, 5)], verify=True)
        fork = twin.fork(first, max(21, self.cache.shortest(first)))
        found += twin.step([(first, 1), (fork, 6), (second, 1)], verify=True)
        twin.trim(first, max(30, self.cache.shortest(first)))
        found += twin.step([(first, 2), (fork, 1)], verify=True)
        twin.remove(second)
        third = twin.add()
        found += twin.step([(third, 19), (first, 1), (fork, 0)], verify=True)
        try:
            self.cache.check()
            twin.check()
        except (CacheCorrupt, Disagreement) as error:
            return Outcome.wrong(str(error))
        return Outcome.of(found)
