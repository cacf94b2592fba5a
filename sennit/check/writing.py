"""Cases that write keys and values before they read them: append through a plan, and a cache's life."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sennit.attention import BatchAttention
from sennit.check.compare import Comparison, compare
from sennit.check.outcome import Outcome
from sennit.check.problems import Problem
from sennit.check.threads import one_thread
from sennit.errors import CacheCorrupt
from sennit.kvcache import KVCache
from sennit.plan.plan import Plan
from sennit.pools import nhd_views, split_pools
from sennit.spec import AttentionSpec

__all__ = ["CacheScenario", "append_again"]

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [tokens, num_kv_heads, dim] each


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
    for request, (start, q_len, kv_len) in enumerate(zip(batch.q_starts, batch.q_lens, batch.kv_lens, strict=True)):
        for position in range(max(0, int(kv_len - q_len)), int(kv_len)):
            page = int(batch.pages.entries[int(batch.pages.starts[request]) + position // size])
            yield int(start + position - (kv_len - q_len)), request, position, page, position % size


class CacheScenario:
    """A cache of two layers and a plain dictionary of tensors that live through the same.

    Args:
        spec: of both layers.
        page_size: tokens a page.
        backend: its name.
        device: where it runs.
    """

    def __init__(self, spec: AttentionSpec, page_size: int, backend: str, device: torch.device) -> None:
        self.spec = spec
        self.cache = KVCache([spec] * 2, num_tokens=256, page_size=page_size, device=device, backend=backend)
        for layer in range(2):
            pools = self.cache.pools(layer)
            for pool in [pools] if isinstance(pools, torch.Tensor) else pools:
                pool.fill_(torch.nan)
        self._stored: dict[int, list[KeysValues]] = {}  # one pair a layer
        self._generator = torch.Generator().manual_seed(7)

    def run(self) -> Outcome:
        """Prefill, fork in the middle of a page, trim, remove, in steps that mix all of them; then read all back."""
        first, second = self._add(), self._add()
        found = self._step({first: 37, second: 5})
        fork = self._fork(first, 21)
        found += self._step({first: 1, fork: 6, second: 1})
        self._trim(first, 30)
        found += self._step({first: 2, fork: 1})
        self.cache.remove(second)
        del self._stored[second]
        third = self._add()
        found += self._step({third: 19, first: 1, fork: 0})
        try:
            self.cache.check()
        except CacheCorrupt as error:
            return Outcome.wrong(str(error))
        if different := [seq for seq in self._stored if not self._reads_back(seq)]:
            return Outcome.wrong(f"sequences {different} read back other keys or values than were written")
        return Outcome.of(found)

    def _add(self) -> int:
        seq = self.cache.add()
        self._stored[seq] = [self._random_keys(0) for _ in self.cache.specs]
        return seq

    def _fork(self, seq: int, length: int) -> int:
        fork = self.cache.fork(seq, length)
        self._stored[fork] = [(k[:length], v[:length]) for k, v in self._stored[seq]]
        return fork

    def _trim(self, seq: int, length: int) -> None:
        self.cache.trim(seq, length=length)
        self._stored[seq] = [(k[:length], v[:length]) for k, v in self._stored[seq]]

    def _step(self, new_tokens: dict[int, int]) -> list[Comparison]:
        """One step with random tensors, and its comparison with dense attention a layer."""
        spec, scale, found = self.spec, self.spec.head_dim_qk**-0.5, []
        with self.cache.step(list(new_tokens.items())) as step:
            for layer in range(2):
                q = self._random(step.num_tokens, spec.num_qo_heads, spec.head_dim_qk)
                k, v = self._random_keys(step.num_tokens)
                new = (k[:, 0], None) if spec.latent else (k, v)
                out, lse = step.attend(layer, q, *new, sm_scale=scale, return_lse=True)
                self._append(layer, new_tokens, k, v)
                pairs = [self._stored[seq][layer] for seq in new_tokens]
                problem = Problem(
                    spec=spec,
                    page_size=self.cache.page_size,
                    kv_layout=self.cache.kv_layout,
                    batch=step.batch,
                    causal=[True] * len(pairs),
                    q=q,
                    kv=self.cache.pools(layer),
                    keys=[k for k, _ in pairs],
                    values=[v for _, v in pairs],
                    sm_scale=scale,
                )
                with one_thread():
                    found.append(compare(problem, out, lse))
        return found

    def _append(self, layer: int, new_tokens: dict[int, int], k: torch.Tensor, v: torch.Tensor) -> None:
        counts = list(new_tokens.values())
        for seq, new_k, new_v in zip(new_tokens, torch.split(k, counts), torch.split(v, counts), strict=True):
            old_k, old_v = self._stored[seq][layer]
            self._stored[seq][layer] = torch.cat([old_k, new_k]), torch.cat([old_v, new_v])

    def _reads_back(self, seq: int) -> bool:
        for layer, (k, v) in enumerate(self._stored[seq]):
            read_k, read_v = self.cache.read(seq, layer)
            if self.spec.latent:
                read_k, read_v = read_k[:, None], v
            if not (torch.equal(read_k, k) and read_v is not None and torch.equal(read_v, v)):
                return False
        return True

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.cache.device, self.spec.dtype)

    def _random_keys(self, tokens: int) -> KeysValues:
        k = self._random(tokens, self.spec.num_kv_heads, self.spec.head_dim_qk)
        if self.spec.latent:
            return k, k[..., : self.spec.head_dim_vo]
        return k, self._random(tokens, self.spec.num_kv_heads, self.spec.head_dim_vo)
