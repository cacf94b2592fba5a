"""A cache and a plain dictionary of tensors that go through the same operations, and what to compare of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

import sennit
from sennit.kvcache import KVCache

SCALE = 0.3


def gqa_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_vo=8, dtype=torch.float32):
    return sennit.AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype=dtype,
    )


def mla_spec(dtype=torch.float32):
    return sennit.AttentionSpec.mla(num_qo_heads=3, kv_lora_rank=16, qk_rope_head_dim=8, dtype=dtype)


def make_cache(specs=None, *, num_pages=40, page_size=4, **options):
    """A small cache whose every slot holds NaN, as fresh memory may."""
    options = {"device": "cpu"} | options
    cache = KVCache(specs or [gqa_spec()] * 2, num_tokens=num_pages * page_size, page_size=page_size, **options)
    for layer in range(cache.num_layers):
        pools = cache.pools(layer)
        for pool in [pools] if isinstance(pools, torch.Tensor) else pools:
            pool.fill_(torch.nan)
    return cache


def host_state(cache):
    """Tables, lengths, counts and the free list in order: all that an operation may change on the host."""
    sequences = cache._sequences
    tables, pool = sequences.tables, sequences.pool
    return {
        "tables": {seq: tables.pages[slot][tables.pages[slot] != -1].tolist() for seq, slot in sequences.slots.items()},
        "lengths": {seq: int(tables.lengths[slot]) for seq, slot in sequences.slots.items()},
        "page_counts": {seq: int(tables.page_counts[slot]) for seq, slot in sequences.slots.items()},
        "refs": pool.refs.tolist(),
        "free": pool.free.tolist(),
        "next_id": sequences._next_id,
        "slots": dict(sequences.slots),
        "free_slots": tables.free_slots[: len(tables.free_slots)],
        "stats": cache.stats(),
    }


def contents(cache):
    """What every layer has stored for every sequence."""
    return {(seq, layer): cache.read(seq, layer) for seq in cache.sequences for layer in range(cache.num_layers)}


def whole_state(cache):
    return host_state(cache), contents(cache)


def assert_same_contents(got, expected):
    assert got.keys() == expected.keys()
    for key, pair in expected.items():
        for ours, theirs in zip(got[key], pair, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs), f"sequence and layer {key}"


def assert_same_state(got, expected):
    assert got[0] == expected[0]
    assert_same_contents(got[1], expected[1])


def dense_attention(spec, q, k, v, *, causal, dtype):
    """Softmax over all keys of one request, in ``dtype``."""
    if spec.latent:
        k, v = k[:, None], k[:, None, : spec.head_dim_vo]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = (t.repeat_interleave(spec.group_size, dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if causal:
        positions = len(k) - len(q) + torch.arange(len(q), device=q.device)
        hidden = torch.arange(len(k), device=q.device) > positions[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1).nan_to_num(0.0), v)


def assert_right(spec, requests, *, causal=True):
    """The error against float64 is at most twice that of a plain computation in the spec's dtype, and one rounding.

    ``requests``: ``(out, q, k, v)`` of each.
    """
    error = plain_error = largest = torch.zeros((), dtype=torch.float64)
    for out, q, k, v in requests:
        exact = dense_attention(spec, q, k, v, causal=causal, dtype=torch.float64)
        plain = dense_attention(spec, q, k, v, causal=causal, dtype=spec.dtype)
        assert out.shape == exact.shape
        if exact.numel():
            error = torch.maximum(error, (out - exact).abs().max().cpu())
            plain_error = torch.maximum(plain_error, (plain - exact).abs().max().cpu())
            largest = torch.maximum(largest, exact.abs().max().cpu())
    assert error <= 2 * plain_error + torch.finfo(spec.dtype).eps * max(1.0, float(largest))


class Fault(Exception):
    """Raised by tests inside a step."""


@dataclass
class Twin:
    """Sequences as a dictionary: id to one ``(k, v)`` a layer."""

    cache: KVCache
    seed: int = 0
    stored: dict = field(default_factory=dict)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def random(self, *shape):
        spec = self.cache.specs[0]
        return torch.randn(*shape, generator=self.generator).to(self.cache.device, spec.dtype)

    def new_keys(self, spec, tokens):
        if spec.latent:
            return self.random(tokens, spec.head_dim_qk), None
        return (
            self.random(tokens, spec.num_kv_heads, spec.head_dim_qk),
            self.random(tokens, spec.num_kv_heads, spec.head_dim_vo),
        )

    def add(self, tokens=0):
        seq = self.cache.add()
        self.stored[seq] = [self.new_keys(spec, 0) for spec in self.cache.specs]
        if tokens:
            self.step([(seq, tokens)])
        return seq

    def fork(self, seq, length=None):
        fork = self.cache.fork(seq, length)
        self.stored[fork] = _cut(self.stored[seq], length)
        return fork

    def trim(self, seq, length):
        self.cache.trim(seq, length=length)
        self.stored[seq] = _cut(self.stored[seq], length)

    def remove(self, seq):
        self.cache.remove(seq)
        del self.stored[seq]

    def step(self, items, *, fault_after=None, leave_after=None, verify=False, **options):
        """A step with random tensors, committed; or left by :class:`Fault`, or early, once so many layers attended."""
        new, outs = {}, []
        with self.cache.step(items, **options) as step:
            for layer, spec in enumerate(self.cache.specs):
                if fault_after == layer:
                    raise Fault
                if leave_after == layer:
                    break
                q = self.random(step.num_tokens, spec.num_qo_heads, spec.head_dim_qk)
                new[layer] = self.new_keys(spec, step.num_tokens)
                outs.append((q, step.attend(layer, q, *new[layer], sm_scale=SCALE)))
            if fault_after == len(self.cache.specs):
                raise Fault
        self._append(items, new)
        if verify:
            self.verify(items, outs)

    def _append(self, items, new):
        start = 0
        for seq, count in items:
            for layer, pair in new.items():
                rows = [None if t is None else t[start : start + count] for t in pair]
                old = self.stored[seq][layer]
                self.stored[seq][layer] = tuple(
                    None if row is None else torch.cat([o, row]) for o, row in zip(old, rows, strict=True)
                )
            start += count

    def verify(self, items, outs):
        """Every request's output against a dense computation over the dictionary's tensors."""
        ends = list(itertools.accumulate(count for _, count in items))
        rows = [slice(end - count, end) for end, (_, count) in zip(ends, items, strict=True)]
        requests = {spec: [] for spec in self.cache.specs}
        for layer, (q, out) in enumerate(outs):
            requests[self.cache.specs[layer]] += [
                (out[part], q[part], *self.stored[seq][layer]) for part, (seq, _) in zip(rows, items, strict=True)
            ]
        for spec, some in requests.items():
            assert_right(spec, some)

    def expected(self, seqs=None):
        seqs = self.stored if seqs is None else seqs
        return {(seq, layer): self.stored[seq][layer] for seq in seqs for layer in range(self.cache.num_layers)}

    def assert_agrees(self, seqs=None):
        """Ids, lengths and stored tensors of these sequences (all by default) are those of the dictionary."""
        assert self.cache.sequences == list(self.stored)
        seqs = list(self.stored if seqs is None else seqs)
        for seq in seqs:
            assert self.cache.length(seq) == len(self.stored[seq][0][0])
        layers = range(self.cache.num_layers)
        assert_same_contents(
            {(seq, layer): self.cache.read(seq, layer) for seq in seqs for layer in layers}, self.expected(seqs)
        )


def _cut(layers, length):
    return [tuple(None if t is None else t[:length] for t in pair) for pair in layers]
