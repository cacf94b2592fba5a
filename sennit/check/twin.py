"""A cache and a plain dictionary of tensors that go through the same operations, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from sennit.check.compare import Comparison, compare
from sennit.check.oracle import Rules
from sennit.check.problems import Problem
from sennit.check.threads import one_thread
from sennit.errors import SennitError
from sennit.kvcache import KVCache
from sennit.plan.batch import Batch
from sennit.spec import AttentionSpec

__all__ = ["SCALE", "Disagreement", "Fault", "StepFault", "Twin", "fill_with_nan", "host_state"]

SCALE = 0.3  # sm_scale of every step
KeysValues = tuple[torch.Tensor, torch.Tensor | None]  # [tokens, ...] of one layer; a latent layer has no values


class Disagreement(SennitError, AssertionError):
    """The cache and the dictionary are not the same."""


class Fault(Exception):
    """Raised on purpose inside a step."""


@dataclass(frozen=True)
class StepFault:
    """How a step goes wrong on purpose: once ``after`` layers have attended."""

    after: int
    leave: bool = False  # leave the block early rather than raise :class:`Fault`


@dataclass
class Twin:
    """Sequences as a dictionary: id to the keys and values of every layer that owns some, by its index.

    Args:
        cache: it must be empty, and is changed through the twin alone.
        seed: of the random tensors of its steps.
    """

    cache: KVCache
    seed: int = 0
    stored: dict[int, dict[int, KeysValues]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = dict(zip(self.cache.layers, self.cache.specs, strict=True))
        self.owners = [layer for layer in self.cache.layers if layer not in self.cache.kv_owner]
        self._generator = torch.Generator().manual_seed(self.seed)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers of the first layer's dtype, or of another."""
        numbers = torch.randn(*shape, generator=self._generator)
        return numbers.to(self.cache.device, self.cache.specs[0].dtype if dtype is None else dtype)

    def new_keys(self, spec: AttentionSpec, tokens: int) -> KeysValues:
        """Random keys and values, in the form that ``attend`` takes them."""
        if spec.latent:
            return self.random(tokens, spec.head_dim_qk, dtype=spec.kv_dtype), None
        heads, dtype = spec.num_kv_heads, spec.kv_dtype
        return (
            self.random(tokens, heads, spec.head_dim_qk, dtype=dtype),
            self.random(tokens, heads, spec.head_dim_vo, dtype=dtype),
        )

    def add(self, tokens: int = 0) -> int:
        """An empty sequence, or one of so many random tokens."""
        seq = self.cache.add()
        self.stored[seq] = {layer: self.new_keys(self.specs[layer], 0) for layer in self.owners}
        if tokens:
            self.step([(seq, tokens)])
        return seq

    def fork(self, seq: int, length: int | None = None) -> int:
        """See :meth:`KVCache.fork`."""
        fork = self.cache.fork(seq, length)
        self.stored[fork] = _cut(self.stored[seq], length)
        return fork

    def trim(self, seq: int, length: int) -> None:
        """See :meth:`KVCache.trim`."""
        self.cache.trim(seq, length=length)
        self.stored[seq] = _cut(self.stored[seq], length)

    def remove(self, seq: int) -> None:
        """See :meth:`KVCache.remove`."""
        self.cache.remove(seq)
        del self.stored[seq]

    def clear(self) -> None:
        """See :meth:`KVCache.clear`."""
        self.cache.clear()
        self.stored.clear()

    def step(
        self,
        items: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
        fault: StepFault | None = None,
        padding: int = 0,
        **options: Any,
    ) -> list[Comparison]:
        """A step with random tensors: committed, or gone wrong on purpose.

        Args:
            items: as in :meth:`KVCache.step`.
            verify: compare what every layer computes with dense attention over the dictionary's tensors.
            fault: the step goes wrong.
            padding: rows of all tensors past those of the step; NaN.
            options: further keywords of :meth:`KVCache.step`.

        Returns:
            With ``verify`` a comparison a layer.
        """
        new: dict[int, KeysValues] = {}
        found: list[tuple[AttentionSpec, int, tuple[torch.Tensor, ...]]] = []
        with self.cache.step(items, **options) as step:
            batch = step.batch
            for done, (layer, spec) in enumerate(self.specs.items()):
                if fault is not None and fault.after == done:
                    if fault.leave:
                        break
                    raise Fault
                q = self._padded(self.random(step.num_tokens, spec.num_qo_heads, spec.head_dim_qk), padding)
                k, v = None, None
                if layer in self.owners and options.get("append", True):
                    k, v = (t if t is None else self._padded(t, padding) for t in self.new_keys(spec, step.num_tokens))
                    assert k is not None
                    new[layer] = k, v
                out, lse = step.attend(layer, q, k, v, sm_scale=SCALE, return_lse=True)
                found.append((spec, self.cache.kv_owner.get(layer, layer), (q, out, lse)))
            if fault is not None and fault.after == len(self.specs):
                raise Fault
        self._append(items, new)
        if not verify:
            return []
        causal = options.get("causal", True)
        return [self._compare(spec, owner, batch, items, causal, tensors) for spec, owner, tensors in found]

    def _padded(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), torch.nan)]) if rows else tensor

    def _append(self, items: Sequence[tuple[int, int]], new: dict[int, KeysValues]) -> None:
        for end, (seq, count) in zip(accumulate(count for _, count in items), items, strict=True):
            stored = self.stored[seq]
            for layer, (k, v) in new.items():
                old_k, old_v = stored[layer]
                rows = slice(end - count, end)
                stored[layer] = (
                    torch.cat([old_k, k[rows]]),
                    None if v is None or old_v is None else torch.cat([old_v, v[rows]]),
                )

    def _compare(
        self,
        spec: AttentionSpec,
        owner: int,
        batch: Batch,
        items: Sequence[tuple[int, int]],
        causal: bool,
        tensors: tuple[torch.Tensor, ...],
    ) -> Comparison:
        """What one layer computed, with the dense result over the dictionary's tensors."""
        q, out, lse = tensors
        pairs = [self.stored[seq][owner] for seq, _ in items]
        if spec.latent:
            pairs = [(k[:, None], k[:, None, : spec.head_dim_vo]) for k, _ in pairs]
        rules = Rules(
            window_left=spec.window_left,
            window_right=spec.window_right,
            num_sink_tokens=spec.num_sink_tokens,
            logits_soft_cap=spec.logits_soft_cap,
        )
        problem = Problem(
            spec=spec,
            page_size=self.cache.page_size,
            kv_layout=self.cache.kv_layout,
            batch=batch,
            causal=[causal] * len(pairs),
            q=q,
            kv=None,
            keys=[k for k, _ in pairs],
            values=[v for _, v in pairs if v is not None],
            sm_scale=SCALE,
            rules=[rules] * len(pairs),
        )
        with one_thread():
            return compare(problem, out, lse)

    def check(self, seqs: Iterable[int] | None = None) -> None:
        """Compare ids and lengths, and the stored tensors of these sequences (all by default).

        Rows that no later one can see may be missing, and are NaN then.

        Raises:
            Disagreement: they differ.
        """
        if self.cache.sequences != list(self.stored):
            raise Disagreement(f"sequences: {self.cache.sequences} in the cache, {list(self.stored)} in the dictionary")
        for seq in self.stored if seqs is None else seqs:
            for layer, expected in self.stored[seq].items():
                self._check_layer(seq, layer, expected)

    def _check_layer(self, seq: int, layer: int, expected: KeysValues) -> None:
        length, spec = len(expected[0]), self.specs[layer]
        if self.cache.length(seq) != length:
            raise Disagreement(f"sequence {seq}: {self.cache.length(seq)} tokens in the cache, {length} given to it")
        for name, got, wanted in zip("kv", self.cache.read(seq, layer), expected, strict=True):
            if got is None or wanted is None:
                if got is not wanted:
                    raise Disagreement(f"sequence {seq}, layer {layer}, {name}: latent keys have no values")
            elif not torch.equal(got, wanted) and not _equal_but_behind(spec, got, wanted):
                raise Disagreement(f"sequence {seq}, layer {layer}: {name} is not what was stored")

    def held(self, seq: int, length: int, *, first: int) -> bool:
        """Whether the cache has every one of the first ``length`` keys that rows from position ``first`` on would see.

        The key before the first row counts among them. By what can be read of the cache, not by what it says.
        """
        for layer in self.owners:
            spec = self.specs[layer]
            if spec.window_left is None:
                continue
            gone = _missing(self.cache.read(seq, layer)[0])[:length]
            token = torch.arange(length, device=gone.device)
            seen = (token >= first - max(spec.window_left, 1)) | (token < spec.num_sink_tokens)
            if bool((gone & seen).any()):
                return False
        return True


def fill_with_nan(cache: KVCache) -> KVCache:
    """Write NaN into every slot, as fresh memory may hold; returns the cache."""
    for layer in cache.layers:
        pools = cache.pools(layer)
        for pool in [pools] if isinstance(pools, torch.Tensor) else pools:
            pool.fill_(torch.nan)
    return cache


def host_state(cache: KVCache) -> dict[str, Any]:
    """Tables, lengths, counts and the free lists in order: all that an operation may change on the host."""
    sequences = cache._sequences
    tables, pools = sequences.tables, [group.pool for group in sequences.groups]
    rows = sequences.slots.items()
    return {
        "tables": {seq: tables.pages[:, slot, : tables.page_counts[slot]].tolist() for seq, slot in rows},
        "released": {seq: tables.released[:, slot].tolist() for seq, slot in rows},
        "lengths": {seq: int(tables.lengths[slot]) for seq, slot in rows},
        "refs": [pool.refs.tolist() for pool in pools],
        "free": [pool.free.tolist() for pool in pools],
        "next_id": sequences.next_id,
        "slots": dict(rows),
        "free_slots": tables.free_slots[:],
        "stats": cache.stats(),
    }


def _cut(layers: dict[int, KeysValues], length: int | None) -> dict[int, KeysValues]:
    return {layer: (k[:length], None if v is None else v[:length]) for layer, (k, v) in layers.items()}


def _missing(rows: torch.Tensor) -> torch.Tensor:
    """bool ``[tokens]``: rows of nothing but NaN."""
    return rows.isnan().flatten(1).all(dim=1)


def _equal_but_behind(spec: AttentionSpec, got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether rows are equal, or missing where the next row's window does not see them."""
    if spec.window_left is None or got.shape != wanted.shape:
        return False
    token, gone = torch.arange(len(got), device=got.device), _missing(got)
    behind = (token >= spec.num_sink_tokens) & (token < len(got) - spec.window_left)
    return bool((behind | ~gone).all()) and torch.equal(got[~gone], wanted[~gone])
