"""Bad input gives a typed error that names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import sennit
from sennit import AttentionSpec, Batch, BatchAttention, KVCache

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
MLA = AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, dtype=torch.float32)


def csr(**changes: Any) -> Batch:
    good = {"qo_indptr": [0, 2, 3], "kv_lens": [5, 9], "kv_indptr": [0, 2, 5], "kv_indices": [3, 1, 0, 2, 4]}
    return Batch.csr(**(good | changes))


def padded(**changes: Any) -> Batch:
    good = {"query_start_loc": [0, 2, 3], "seq_lens": [5, 9], "block_table": [[3, 1, -1], [0, 2, 4]]}
    return Batch.padded(**(good | changes))


def ragged(**changes: Any) -> Batch:
    return Batch.ragged(**({"qo_indptr": [0, 2, 3], "kv_indptr": [0, 5, 14]} | changes))


def attention(**changes: Any) -> BatchAttention:
    return BatchAttention(**({"spec": SPEC, "page_size": 4, "device": "cpu"} | changes))


def pages(num: int = 5, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(num, *(shape or (4, 2, 8)), dtype=dtype)


def queries(rows: int = 3, *shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(rows, *(shape or (4, 8)), **options)


def run(batch: Batch | None = None, q: Any = None, kv: Any = None, **options: Any) -> Any:
    attn = attention()
    plan = attn.plan(batch if batch is not None else csr())
    q = queries() if q is None else q
    return attn.run(plan, q, (pages(), pages()) if kv is None else kv, **({"sm_scale": 1.0} | options))


def append(k: Any = None, v: Any = None, kv: Any = None, **changes: Any) -> Any:
    attn = attention()
    k, v = (queries(3, 2, 8) if t is None else t for t in (k, v))
    return attn.append(attn.plan(csr(**changes)), k, v, (pages(), pages()) if kv is None else kv)


def foreign_plan() -> Any:
    return attention().run(attention(page_size=8).plan(padded()), queries(), (pages(), pages()), sm_scale=1.0)


def stale_plan() -> Any:
    attn = attention()
    buffers = attn.buffers(max_requests=4, max_tokens=8, max_pages=16)
    old = attn.plan(csr(), into=buffers)
    attn.plan(csr(), into=buffers)
    return attn.run(old, queries(), (pages(), pages()), sm_scale=1.0)


def too_large_for_buffers() -> Any:
    attn = attention()
    return attn.plan(csr(), into=attn.buffers(max_requests=1, max_tokens=8, max_pages=16))


def cache(**changes: Any) -> KVCache:
    return KVCache(**({"specs": [SPEC] * 2, "num_tokens": 64, "page_size": 4, "device": "cpu"} | changes))


def step(items: Any) -> Any:
    with cache().step(items):
        pass


def attend(**changes: Any) -> Any:
    store = cache()
    with store.step([(store.add(), 3)]) as s:
        s.attend(
            **({"layer": 0, "q": queries(), "k": queries(3, 2, 8), "v": queries(3, 2, 8), "sm_scale": 1.0} | changes)
        )


@dataclass
class Case:
    name: str
    call: Callable[[], Any]
    error: type[Exception]
    words: tuple[str, ...]  # all of them in the text: the argument, what was expected, what came


I, P, U = sennit.InvalidInput, sennit.PlanMismatch, sennit.UnsupportedFeature  # noqa: E741
CASES = [
    # Specs
    Case("heads that do not divide", lambda: SPEC.replace(num_kv_heads=3), I, ("num_kv_heads", "divisor of num_qo_heads=4", "3")),
    Case("zero heads", lambda: SPEC.replace(num_qo_heads=0), I, ("num_qo_heads", "at least 1", "0")),
    Case("a head dim that is no integer", lambda: SPEC.replace(head_dim=8.0), I, ("head_dim_qk", "integer", "8.0")),
    Case("an integer dtype", lambda: SPEC.replace(dtype=torch.int32), I, ("dtype", "bfloat16", "torch.int32")),
    Case("an unknown field", lambda: SPEC.replace(windows=3), I, ("replace", "window_left", "windows")),
    Case("a negative soft cap", lambda: SPEC.replace(logits_soft_cap=-1.0), I, ("logits_soft_cap", "positive", "-1.0")),
    Case("sinks without a window", lambda: SPEC.replace(num_sink_tokens=4), I, ("num_sink_tokens", "0", "4")),
    Case("latent with two KV heads", lambda: SPEC.replace(latent=True), I, ("latent", "num_kv_heads=1", "num_kv_heads=2")),
    Case("head_dim and head_dim_qk", lambda: AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, head_dim_qk=8, head_dim_vo=8, dtype=torch.float32), I, ("head_dim", "either", "head_dim=8")),
    # What no backend has yet
    Case("a window", lambda: attention(spec=SPEC.replace(window_left=7)), U, ("window_left", "reference", "not implemented")),
    Case("a score function", lambda: attention(spec=SPEC.replace(score_mod=lambda s, b, h, q, k: s)), U, ("score_mod",)),
    Case("a token tree", lambda: attention().plan(csr(), tree=[0]), U, ("tree",)),
    Case("a packed mask", lambda: attention().plan(csr(), packed_mask=[0]), U, ("packed_mask",)),
    Case("learned sinks in run", lambda: run(sinks=torch.zeros(4)), U, ("sinks", "spec")),
    Case("a scale of FP8 keys", lambda: run(k_scale=0.5), U, ("k_scale",)),
    # Objects
    Case("a page size of zero", lambda: attention(page_size=0), I, ("page_size", "positive", "0")),
    Case("an unknown layout", lambda: attention(kv_layout="HDN"), I, ("kv_layout", "NHD", "HDN")),
    Case("an unknown backend", lambda: attention(backend="cudnn"), I, ("backend", "reference", "cudnn")),
    Case("an unknown device", lambda: attention(device="gpu"), I, ("device", "torch device", "gpu")),
    Case("a spec that is none", lambda: attention(spec=(4, 2)), I, ("spec", "AttentionSpec", "tuple")),
    # Batches
    Case("offsets that go down", lambda: csr(qo_indptr=[0, 4, 3]), I, ("qo_indptr[2]", "at least", "3")),
    Case("offsets that do not begin at zero", lambda: csr(kv_indptr=[1, 2, 5]), I, ("kv_indptr[0]", "0", "1")),
    Case("no offsets", lambda: csr(qo_indptr=[]), I, ("qo_indptr", "num_requests + 1", "none")),
    Case("fractional lengths", lambda: csr(kv_lens=[5.0, 9.0]), I, ("kv_lens", "integers", "float64")),
    Case("boolean lengths", lambda: csr(kv_lens=torch.tensor([True, False])), I, ("kv_lens", "integers", "torch.bool")),
    Case("negative lengths", lambda: csr(kv_lens=[5, -1]), I, ("kv_lens[1]", "between 0", "-1")),
    Case("lengths of three requests in two", lambda: csr(kv_lens=[5, 9, 9]), I, ("kv_lens", "2 requests", "3 requests")),
    Case("lengths in two dimensions", lambda: csr(kv_lens=[[5], [9]]), I, ("kv_lens", "1 dimension", "(2, 1)")),
    Case("too few page ids", lambda: csr(kv_indices=[3, 1]), I, ("kv_indices", "at least kv_indptr[-1] = 5", "2")),
    Case("rows of a table that are not as long", lambda: padded(block_table=[[1], [2, 3]]), I, ("block_table", "rectangular", "nested")),
    Case("a table of one request for two", lambda: padded(block_table=[[3, 1, 0]]), I, ("block_table", "2 requests", "1 requests")),
    Case("query rows that overlap", lambda: csr(qo_starts=[0, 1]), I, ("qo_starts[1]", "no other request", "1")),
    Case("device lengths of the wrong dtype", lambda: csr(kv_lens_device=torch.zeros(2)), I, ("kv_lens_device", "int32", "float32")),
    Case("too few slots", lambda: csr(slot_mapping=[0, 1]), I, ("slot_mapping", "3 query rows", "2 slots")),
    Case("a slot below -1", lambda: csr(slot_mapping=[0, 1, -2]), I, ("slot_mapping", "-1 to skip", "-2")),
    Case("more keys than packed rows", lambda: ragged(kv_lens=[6, 9]), I, ("kv_lens[0]", "at most the 5 rows", "6")),
    Case("text that is no batch", lambda: Batch.parse("3x5", page_size=4), I, ("batch", "count*q_len@kv_len", "3x5")),
    Case("text of an absurd length", lambda: Batch.parse("1@99999999999999999999", page_size=4), I, ("batch", "at most 2147483647", "1@9999")),
    # Plans
    Case("a batch that is none", lambda: attention().plan([3]), I, ("batch", "a Batch", "list")),
    Case("a negative page id", lambda: attention().plan(csr(kv_indices=[3, -1, 0, 2, 4])), I, ("page table of request 0", "from 0", "-1")),
    Case("a page id that wraps to 32 bits", lambda: attention().plan(csr(kv_indices=[3, 1, 0, 2, 2**32 + 4])), I, ("page table of request 1", "2147483647", "4294967300")),
    Case("too short a page table", lambda: attention().plan(csr(kv_lens=[5, 13])), I, ("page table", "4 pages for the 13 keys of request 1", "3 entries")),
    Case("pages for a planner of packed keys", lambda: attention(page_size=None).plan(csr()), I, ("batch", "packed", "pages")),
    Case("one causal flag of two", lambda: attention().plan(csr(), causal=[True]), I, ("causal", "2 bools", "(1,)")),
    Case("a split of no keys", lambda: attention().plan(csr(), split_size=0), I, ("split_size", "positive", "0")),
    Case("a batch larger than its buffers", too_large_for_buffers, sennit.CapacityExceeded, ("into", "max_requests: 2 needed, 1 there")),
    Case("a plan of rewritten buffers", stale_plan, sennit.StalePlan, ("plan 1", "plan 2")),
    Case("a plan of another object", foreign_plan, P, ("plan", "page4", "page8")),
    # Tensors
    Case("no sm_scale", lambda: run(sm_scale=None), I, ("sm_scale", "0.353553", "module.scaling")),
    Case("an infinite sm_scale", lambda: run(sm_scale=float("inf")), I, ("sm_scale", "finite", "inf")),
    Case("a page id beyond the pool", lambda: run(kv=(pages(4), pages(4))), P, ("kv_pages", "more than 4 pages", "4")),
    Case("too few query rows", lambda: run(q=queries(2)), P, ("q", "at least the plan's 3 rows", "2")),
    Case("queries of another head count", lambda: run(q=queries(3, 2, 8)), I, ("q", "[rows, 4, 8]", "(3, 2, 8)")),
    Case("queries of another dtype", lambda: run(q=queries(dtype=torch.float16)), I, ("q", "torch.float32", "torch.float16")),
    Case("queries on another device", lambda: run(q=queries(device="meta")), I, ("q", "cpu", "meta")),
    Case("queries that need gradients", lambda: run(q=queries(requires_grad=True)), I, ("q", "without gradients", "requires_grad=True", "inference_mode")),
    Case("pages of another page size", lambda: run(kv=(pages(5, 8, 2, 8), pages(5, 8, 2, 8))), P, ("kv_pages", "(4, 2)", "(8, 2)")),
    Case("pages in the other layout", lambda: run(kv=(pages(5, 2, 4, 8), pages(5, 2, 4, 8))), P, ("kv_pages", "NHD", "(2, 4)")),
    Case("pages with a strided last dimension", lambda: run(kv=(pages(5, 4, 2, 16)[..., ::2], pages())), I, ("kv_pages: k", "contiguous", "strides")),
    Case("pages of another dtype", lambda: run(kv=(pages(dtype=torch.bfloat16), pages())), I, ("kv_pages: k", "float32", "bfloat16")),
    Case("keys and values of different pools", lambda: run(kv=(pages(5), pages(6))), I, ("kv_pages: v", "(5, 4, 2, 8)", "(6, 4, 2, 8)")),
    Case("keys alone", lambda: run(kv=pages()), I, ("kv_pages", "(k, v)", "(5, 4, 2, 8)")),
    Case("an output of another shape", lambda: run(out=queries(4)), I, ("out", "[3, 4, 8]", "(4, 4, 8)")),
    Case("an LSE of another dtype", lambda: run(lse=torch.zeros(3, 4, dtype=torch.float64)), I, ("lse", "float32", "float64")),
    Case("appending to packed keys", lambda: attention().append(attention().plan(ragged()), queries(3, 2, 8), queries(3, 2, 8), (pages(), pages())), P, ("plan", "pages", "packed")),
    Case("appending values of other rows", lambda: append(v=queries(4, 2, 8)), I, ("v", "3", "4")),
    Case("appending without values", lambda: attention().append(attention().plan(csr()), queries(3, 2, 8), None, (pages(), pages())), I, ("v", "tensor", "NoneType")),
    Case("appending values to a latent cache", lambda: attention(spec=MLA).append(attention(spec=MLA).plan(csr()), queries(3, 12), queries(3, 8), pages(5, 4, 12)), I, ("v", "None", "(3, 8)")),
    Case("a slot beyond the pool", lambda: append(slot_mapping=[0, 1, 20]), P, ("kv_pages", "more than 5 pages", "5")),
    Case("copying to a page beyond the pool", lambda: attention().copy_pages([0], [5], (pages(), pages())), I, ("target", "0 to 4", "[5]")),
    Case("merging nothing", lambda: sennit.merge_states([]), I, ("states", "at least one", "none")),
    Case("merging different shapes", lambda: sennit.merge_states([(queries(), torch.zeros(3, 4)), (queries(2), torch.zeros(2, 4))]), I, ("states[1]", "(3, 4, 8)", "(2, 4, 8)")),
    # Caches
    Case("a cache without layers", lambda: cache(specs=[]), I, ("specs",)),
    Case("a cache of two storage forms", lambda: cache(specs=[SPEC, SPEC.replace(head_dim=16)]), U, ("layer groups",)),
    Case("a cache without a size", lambda: cache(num_tokens=None), I, ("memory", "num_tokens")),
    Case("a cache of memory that cannot be read", lambda: cache(num_tokens=None, memory="4 parsecs"), I, ("memory", "4 parsecs")),
    Case("an unknown sequence", lambda: cache().trim(7, length=0), sennit.UnknownSequence, ("7",)),
    Case("more tokens than pages", lambda: (c := cache(), c.step([(c.add(), 65)]).__enter__()), sennit.OutOfPages, ("17", "16")),
    Case("a negative count in a step", lambda: (c := cache(), c.step([(c.add(), -1)]).__enter__()), I, ("-1",)),
    Case("a sequence twice in a step", lambda: (c := cache(), a := c.add(), c.step([(a, 1), (a, 1)]).__enter__()), I, ("once",)),
    Case("an unknown sequence in a step", lambda: step([(3, 1)]), sennit.UnknownSequence, ("3",)),
    Case("a fork longer than its sequence", lambda: (c := cache(), c.fork(c.add(), length=1)), I, ("length", "0", "1")),
    Case("a layer that is not there", lambda: attend(layer=2), I, ("layer", "0 to 1", "2")),
    Case("no keys in a step that appends", lambda: attend(k=None), I, ("k", "append=False")),
    Case("a step that ends early", lambda: step([]), sennit.IncompleteStep, ("0, 1",)),
    Case("a token tree to accept", lambda: cache().accept({}), U, ("token trees",)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bad_input_names_the_argument_what_was_expected_and_what_came(case):
    with pytest.raises(case.error) as raised:
        case.call()
    assert isinstance(raised.value, sennit.SennitError)
    missing = [word for word in case.words if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


def test_every_integer_dtype_is_read_as_lengths():
    expected = run(return_lse=True)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        batch = csr(
            **{name: np.asarray(value, dtype) for name, value in {"qo_indptr": [0, 2, 3], "kv_lens": [5, 9]}.items()}
        )
        torch.testing.assert_close(run(batch, return_lse=True), expected)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        batch = csr(
            qo_indptr=torch.tensor([0, 2, 3], dtype=dtype), kv_indices=torch.tensor([3, 1, 0, 2, 4], dtype=dtype)
        )
        torch.testing.assert_close(run(batch, return_lse=True), expected)
