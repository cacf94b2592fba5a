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


def biased():
    bias = torch.zeros(4)
    return SPEC.replace(score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[h])


def run(batch: Batch | None = None, q: Any = None, kv: Any = None, **options: Any) -> Any:
    attn = attention()
    plan = attn.plan(batch if batch is not None else csr())
    q = queries() if q is None else q
    return attn.run(plan, q, (pages(), pages()) if kv is None else kv, **({"sm_scale": 1.0} | options))


def with_spec(spec: AttentionSpec, **options: Any) -> Any:
    attn = attention(spec=spec)
    return attn.run(attn.plan(csr()), queries(), (pages(), pages()), sm_scale=1.0, **options)


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


NOT_HOST_INTEGERS = {
    "float8": (torch.zeros(2, dtype=torch.float8_e4m3fn), ("float8_e4m3fn",)),
    "bfloat16": (torch.zeros(2, dtype=torch.bfloat16), ("integers", "bfloat16")),
    "complex": (torch.zeros(2, dtype=torch.complex64), ("integers", "complex64")),
    "half complex": (np.zeros(2, np.complex64), ("integers", "complex64")),
    "gradients": (torch.zeros(2, requires_grad=True), ("integers", "float32")),
    "sparse": (torch.tensor([5, 9]).to_sparse(), ("dense", "torch.sparse_coo")),
    "lazily negated": (torch.tensor([-5, -9])._neg_view(), ("dense", "NumPy cannot read")),
    "another device": (torch.zeros(2, dtype=torch.int32, device="meta"), ("on the host", "a tensor on meta")),
    "a list on another device": ([torch.zeros((), dtype=torch.int32, device="meta")] * 2, ("on the host", "meta")),
    "a list with gradients": ([torch.zeros((), requires_grad=True)] * 2, ("on the host", "grad")),
    "big-endian and unsigned": (np.array([5, 2**64 - 1], ">u8"), ("fit int64", "18446744073709551615")),
    "text": ("59", ("integers", "<U2")),
    "durations": (np.array([5, 9], "m8[s]"), ("integers", "timedelta64[s]")),
}


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor([5]), torch.tensor([9])], layout=torch.jagged)


def state(**changes: Any) -> tuple[Any, Any]:
    good = {"out": torch.zeros(3, 4, 8), "lse": torch.zeros(3, 4)} | changes
    return good["out"], good["lse"]


def merge(*states: Any) -> Any:
    return sennit.merge_states(states)


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
    Case("a head dim that is no integer", lambda: SPEC.replace(head_dim=8.0), I, ("head_dim:", "integer", "8.0")),
    Case("an integer dtype", lambda: SPEC.replace(dtype=torch.int32), I, ("dtype", "bfloat16", "torch.int32")),
    Case("an unknown field", lambda: SPEC.replace(windows=3), I, ("replace", "window_left", "windows")),
    Case("a negative soft cap", lambda: SPEC.replace(logits_soft_cap=-1.0), I, ("logits_soft_cap", "positive", "-1.0")),
    Case("sinks without a window", lambda: SPEC.replace(num_sink_tokens=4), I, ("num_sink_tokens", "0", "4")),
    Case("latent with two KV heads", lambda: SPEC.replace(latent=True), I, ("latent", "num_kv_heads=1", "num_kv_heads=2")),
    Case("head_dim and head_dim_qk", lambda: AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, head_dim_qk=8, head_dim_vo=4, dtype=torch.float32), I, ("head_dim", "either", "head_dim=8")),
    Case("a head dim beside a dim of its own in replace", lambda: SPEC.replace(head_dim=16, head_dim_qk=8), I, ("head_dim", "either", "head_dim_qk=8")),
    Case("heads that are no number", lambda: SPEC.replace(num_qo_heads="4"), I, ("num_qo_heads", "integer", "'4'")),
    Case("heads beyond 32 bits", lambda: SPEC.replace(num_qo_heads=2**32), I, ("num_qo_heads", "2147483647", "4294967296")),
    Case("a head dim beyond 32 bits", lambda: SPEC.replace(head_dim=2**70), I, ("head_dim", "2147483647", str(2**70))),
    Case("a latent that is a number", lambda: MLA.replace(latent=2), I, ("latent", "True or False", "2")),
    Case("a latent that is a text", lambda: MLA.replace(latent="no"), I, ("latent", "True or False", "'no'")),
    Case("learned sinks that are a tensor", lambda: SPEC.replace(learned_sinks=torch.zeros(4)), I, ("learned_sinks", "True or False", "tensor")),
    Case("ALiBi slopes as a flag", lambda: SPEC.replace(alibi=[0.5]), I, ("alibi", "True or False", "[0.5]")),
    Case("a soft cap that is a text", lambda: SPEC.replace(logits_soft_cap="5"), I, ("logits_soft_cap", "positive number", "'5'")),
    Case("a soft cap that is a flag", lambda: SPEC.replace(logits_soft_cap=True), I, ("logits_soft_cap", "positive number", "True")),
    Case("a soft cap that is a tensor", lambda: SPEC.replace(logits_soft_cap=torch.tensor(5.0)), I, ("logits_soft_cap", "positive number", "tensor(5.)")),
    Case("soft caps of several heads", lambda: SPEC.replace(logits_soft_cap=np.ones(4)), I, ("logits_soft_cap", "positive number", "array")),
    Case("a soft cap beyond floats", lambda: SPEC.replace(logits_soft_cap=10**400), I, ("logits_soft_cap", "positive number")),
    Case("a soft cap that is not a number", lambda: SPEC.replace(logits_soft_cap=float("nan")), I, ("logits_soft_cap", "positive number", "nan")),
    Case("a NumPy array as dtype", lambda: SPEC.replace(dtype=np.zeros(3)), I, ("dtype", "torch's dtypes", "array")),
    Case("a NumPy dtype", lambda: SPEC.replace(dtype=np.float32), I, ("dtype", "torch's dtypes", "numpy.float32")),
    Case("a text as kv_dtype", lambda: SPEC.replace(kv_dtype=""), I, ("kv_dtype", "torch's dtypes", "''")),
    # What no backend has yet
    Case("a tree that is not in a list", lambda: attention().plan(csr(), tree=sennit.Tree([-1])), I, ("tree", "list", "Tree")),
    Case("too few trees", lambda: attention().plan(csr(), tree=[None]), I, ("tree", "2 entries", "1")),
    Case("parents instead of a tree", lambda: attention().plan(csr(), tree=[[-1, 0, 0], None]), I, ("tree[0]", "Tree or None", "list")),
    Case("a tree of fewer nodes than rows", lambda: attention().plan(csr(), tree=[sennit.Tree([-1]), None]), I, ("tree[0]", "2 rows", "1 nodes")),
    Case("a tree of more nodes than keys", lambda: attention().plan(csr(), tree=[sennit.Tree([-1] * 6), None]), I, ("tree[0]", "5 keys", "6 nodes")),
    Case("a tree without causality", lambda: attention().plan(csr(), causal=False, tree=[sennit.Tree([-1, 0, 0]), None]), I, ("causal", "request 0", "False")),
    Case("a parent after its node", lambda: sennit.Tree([-1, 2, 0]), I, ("parents[1]", "-1 to 0", "2")),
    Case("a parent below -1", lambda: sennit.Tree([-2]), I, ("parents[0]", "-1", "-2")),
    Case("parents that are no integers", lambda: sennit.Tree([0.5]), I, ("parents", "integers", "float64")),
    Case("a packed mask of the wrong dtype", lambda: attention().plan(csr(), packed_mask=torch.ones(4)), I, ("packed_mask", "uint8", "float32")),
    Case("a packed mask of the wrong size", lambda: attention().plan(csr(), packed_mask=torch.zeros(3, dtype=torch.uint8)), I, ("packed_mask", "4 bytes", "3")),
    Case("a mask of integers to pack", lambda: sennit.pack_mask([torch.ones(2, 2)]), I, ("masks[0]", "bool", "float32")),
    Case("one mask instead of a list", lambda: sennit.pack_mask(torch.ones(2, 2, dtype=torch.bool)), I, ("masks", "list", "Tensor")),
    Case("learned sinks that the spec does not have", lambda: run(sinks=torch.zeros(4)), I, ("sinks", "None", "learned_sinks=False")),
    Case("no learned sinks", lambda: with_spec(SPEC.replace(learned_sinks=True)), I, ("sinks", "float32 [4]", "nothing")),
    Case("learned sinks of another dtype", lambda: with_spec(SPEC.replace(learned_sinks=True), sinks=torch.zeros(4).half()), I, ("sinks", "float32", "float16")),
    Case("learned sinks of another count", lambda: with_spec(SPEC.replace(learned_sinks=True), sinks=torch.zeros(3)), I, ("sinks", "[4]", "(3,)")),
    Case("no slopes", lambda: with_spec(SPEC.replace(alibi=True)), I, ("alibi_slopes", "float32 [4]", "nothing")),
    Case("slopes that the spec does not have", lambda: run(alibi_slopes=torch.zeros(4)), I, ("alibi_slopes", "None", "alibi=False")),
    Case("captures that no function has", lambda: run(captures={"bias": torch.zeros(4)}), I, ("captures", "no function", "bias")),
    Case("captures that are an array", lambda: run(captures=np.zeros(2)), I, ("captures", "dictionary", "ndarray")),
    Case("captures that are no dictionary", lambda: run(captures=[torch.zeros(4)]), I, ("captures", "dictionary", "list")),
    Case("no captures", lambda: with_spec(biased()), I, ("captures", "bias", "nothing")),
    Case("a capture of another dtype", lambda: with_spec(biased(), captures={"bias": torch.zeros(4).half()}), I, ("captures['bias']", "float32", "float16")),
    Case("a capture of other dimensions", lambda: with_spec(biased(), captures={"bias": torch.zeros(4, 4)}), I, ("captures['bias']", "1 dimension", "(4, 4)")),
    Case("an empty capture", lambda: with_spec(biased(), captures={"bias": torch.zeros(0)}), I, ("captures['bias']", "not empty", "(0,)")),
    Case("a capture that is a list", lambda: with_spec(biased(), captures={"bias": [0.0]}), I, ("captures['bias']", "tensor", "list")),
    Case("a graph of the other kind", lambda: SPEC.replace(mask_mod=biased().score_mod), I, ("mask_mod", "mask_mod", "score_mod")),
    Case("a room of minus one for trees", lambda: attention().buffers(max_requests=1, max_tokens=1, max_pages=1, max_tree_nodes=-1), I, ("max_tree_nodes", "0", "-1")),
    Case("a scale of FP8 keys", lambda: run(k_scale=0.5), U, ("k_scale",)),
    # Objects
    Case("a page size of zero", lambda: attention(page_size=0), I, ("page_size", "positive", "0")),
    Case("an unknown layout", lambda: attention(kv_layout="HDN"), I, ("kv_layout", "NHD", "HDN")),
    Case("an unknown backend", lambda: attention(backend="cudnn"), I, ("backend", "reference", "cudnn")),
    Case("an unknown device", lambda: attention(device="gpu"), I, ("device", "torch device", "gpu")),
    *(Case(f"a device {name}", lambda name=name: sennit.device.resolve_device(name), I, ("device", '"cpu" or "cuda"', name)) for name in ("mps", "xpu", "hpu", "xla", "meta", "vulkan", "privateuseone")),
    Case("a second CPU", lambda: attention(device="cpu:1"), I, ("device", "there is one", "cpu:1")),
    Case("a CUDA device that is not there", lambda: attention(device="cuda:99"), I, ("device", "CUDA device", "cuda:99")),
    Case("a device beyond 64 bits", lambda: attention(device=2**70), I, ("device", "torch device", str(2**70))),
    Case("a device below zero", lambda: attention(device="cuda:-1"), I, ("device", "torch device", "cuda:-1")),
    Case("a flag as device", lambda: attention(device=True), I, ("device", '"cpu" or "cuda"', "True")),
    Case("a device for a cache of nothing", lambda: cache(device="meta"), I, ("device", '"cpu" or "cuda"', "meta")),
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
    *(Case(f"lengths: {name}", lambda value=value: csr(kv_lens=value), I, ("kv_lens", *words)) for name, (value, words) in NOT_HOST_INTEGERS.items()),
    Case("lengths: nested", lambda: csr(kv_lens=nested()), I, ("kv_lens", "dense")),
    Case("page ids of a device, sparse", lambda: csr(kv_indices=torch.zeros(5, dtype=torch.int32, device="meta", layout=torch.sparse_coo)), I, ("kv_indices", "dense", "sparse")),
    Case("slots of a device, with gaps", lambda: csr(slot_mapping=torch.zeros(6, dtype=torch.int64, device="meta")[::2]), I, ("slot_mapping", "without gaps", "(2,)", "contiguous()")),
    Case("slots of a device, sparse", lambda: csr(slot_mapping=torch.zeros(5, dtype=torch.int64, device="meta", layout=torch.sparse_coo)), I, ("slot_mapping", "dense", "sparse")),
    Case("device lengths, sparse", lambda: csr(kv_lens_device=torch.tensor([5, 9], dtype=torch.int32).to_sparse()), I, ("kv_lens_device", "dense", "sparse")),
    Case("device lengths, nested", lambda: csr(kv_lens_device=nested()), I, ("kv_lens_device", "dense", "nested")),
    Case("device lengths that are no tensor", lambda: csr(kv_lens_device=[5, 9]), I, ("kv_lens_device", "a tensor", "list")),
    Case("packed rows beyond 32 bits", lambda: ragged(kv_starts=[0, 2**31 - 9]), I, ("kv_starts[1]", "2147483647 - 9", "2147483639")),
    Case("a batch without keys", lambda: Batch(*np.array([[0], [1], [1]])), I, ("Batch", "either pages or kv_starts", "neither", "Batch.csr")),
    Case("a batch of lists", lambda: Batch([0], [1], [1], kv_starts=[0]), I, ("q_starts", "int64", "list", "Batch.csr")),
    Case("more keys than packed rows", lambda: ragged(kv_lens=[6, 9]), I, ("kv_lens[0]", "at most the 5 rows", "6")),
    Case("text that is no batch", lambda: Batch.parse("3x5", page_size=4), I, ("batch", "count*q_len@kv_len", "3x5")),
    Case("text of an absurd length", lambda: Batch.parse("1@99999999999999999999", page_size=4), I, ("batch", "at most 2147483647", "1@9999")),
    Case("text with a space in a number", lambda: Batch.parse("1 2@30", page_size=4), I, ("batch", "count*q_len@kv_len", "'1 2@30'")),
    Case("text with a space where a plus belongs", lambda: Batch.parse("5@9 4", page_size=4), I, ("batch", "count*q_len@kv_len", "'5@9 4'")),
    Case("text in other digits", lambda: Batch.parse("\u0663@\u0665", page_size=4), I, ("batch", "count*q_len@kv_len")),
    Case("text of more digits than Python reads", lambda: Batch.parse("1@" + "9" * 5000, page_size=4), I, ("batch", "at most 2147483647")),
    *(Case(f"a batch as {type(text).__name__}", lambda text=text: Batch.parse(text, page_size=4), I, ("batch", "a text", type(text).__name__)) for text in (5, None, b"1@5")),
    *(Case(f"text with page size {size!r}", lambda size=size: Batch.parse("1@5", page_size=size), I, ("page_size", "at least 1", repr(size))) for size in (0, -4, "x", 2.5, None, True, 2**31)),
    Case("text of too many requests", lambda: Batch.parse("2147483647*1@1", page_size=4), I, ("batch", "at most 16777216 requests", "2147483647*1@1")),
    Case("text of too many requests in several terms", lambda: Batch.parse("1@1 + 16777216*1@1", page_size=4), I, ("batch", "at most 16777216 requests", "16777216*1@1")),
    Case("text of too many pages", lambda: Batch.parse("9*1@2147483647", page_size=4), I, ("batch", "at most 134217728 pages", str(9 * 2**29))),
    # Plans
    Case("a batch that is none", lambda: attention().plan([3]), I, ("batch", "a Batch", "list")),
    Case("a negative page id", lambda: attention().plan(csr(kv_indices=[3, -1, 0, 2, 4])), I, ("page table of request 0", "from 0", "-1")),
    Case("a page id that wraps to 32 bits", lambda: attention().plan(csr(kv_indices=[3, 1, 0, 2, 2**32 + 4])), I, ("page table of request 1", "2147483647", "4294967300")),
    Case("too short a page table", lambda: attention().plan(csr(kv_lens=[5, 13])), I, ("page table", "4 pages for the 13 keys of request 1", "3 entries")),
    Case("pages for a planner of packed keys", lambda: attention(page_size=None).plan(csr()), I, ("batch", "packed", "pages")),
    Case("one causal flag of two", lambda: attention().plan(csr(), causal=[True]), I, ("causal", "2 bools", "(1,)")),
    Case("causal flags of lengths that differ", lambda: attention().plan(csr(), causal=[[True], [False, True]]), I, ("causal", "rectangular", "nested")),
    Case("causal flags in bfloat16", lambda: attention().plan(csr(), causal=torch.zeros(2, dtype=torch.bfloat16)), I, ("causal", "bool", "bfloat16")),
    Case("causal flags with gradients", lambda: attention().plan(csr(), causal=torch.zeros(2, requires_grad=True)), I, ("causal", "bool", "float32")),
    Case("causal flags on another device", lambda: attention().plan(csr(), causal=torch.zeros(2, dtype=torch.bool, device="meta")), I, ("causal", "bools on the host", "meta")),
    Case("causal flags listed on another device", lambda: attention().plan(csr(), causal=[torch.zeros((), dtype=torch.bool, device="meta")] * 2), I, ("causal", "bools on the host", "meta")),
    Case("causal flags, sparse", lambda: attention().plan(csr(), causal=torch.tensor([True, False]).to_sparse()), I, ("causal", "bools", "sparse")),
    Case("causal flags as numbers", lambda: attention().plan(csr(), causal=torch.tensor([1, 0])), I, ("causal", "bool", "torch.int64")),
    Case("no causal flag", lambda: attention().plan(csr(), causal=None), I, ("causal", "bool", "object")),
    Case("a split of no keys", lambda: attention().plan(csr(), split_size=0), I, ("split_size", "positive", "0")),
    Case("a split that makes too many work items", lambda: attention(page_size=None).plan(ragged(qo_indptr=[0, 2, 3], kv_indptr=[0, 5, 2**31 - 1]), split_size=4), I, ("split_size", "16777216 work items", "larger split_size")),
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
    *(Case(f"merging {what}", lambda value=value: sennit.merge_states(value), I, ("states", "list of (out, lse)", type(value).__name__)) for what, value in {"none": None, "a number": 5, "a scalar": torch.tensor(1.0)}.items()),
    Case("merging a tensor", lambda: sennit.merge_states(torch.zeros(2, 3)), I, ("states[0]", "a pair", "Tensor")),
    Case("merging a triple", lambda: merge((*state(), 1)), I, ("states[0]", "a pair", "3 entries")),
    Case("merging numbers", lambda: merge(state(), (1, 2)), I, ("states[1]: out", "a tensor", "int")),
    Case("merging results without heads", lambda: merge(state(out=torch.ones(4), lse=torch.tensor(0.0))), I, ("states[0]: out", "[rows, heads, dim]", "(4,)")),
    *(Case(f"merging results of {dtype}", lambda dtype=dtype: merge(state(out=torch.zeros(3, 4, 8, dtype=dtype))), I, ("states[0]: out", "torch.bfloat16", str(dtype))) for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)),
    Case("merging sparse results", lambda: merge(state(), state(out=torch.ones(3, 4, 8).to_sparse())), I, ("states[1]: out", "dense", "sparse_coo")),
    Case("merging nested results", lambda: merge(state(out=nested())), I, ("states[0]: out", "dense", "nested")),
    Case("merging results with gradients", lambda: merge(state(out=torch.ones(3, 4, 8, requires_grad=True))), I, ("states[0]: out", "without gradients", "inference_mode")),
    Case("merging LSEs with gradients", lambda: merge(state(lse=torch.ones(3, 4, requires_grad=True))), I, ("states[0]: lse", "without gradients", "inference_mode")),
    Case("merging LSEs of another shape", lambda: merge(state(lse=torch.ones(4, 3))), I, ("states[0]: lse", "(3, 4)", "(4, 3)")),
    Case("merging LSEs of another dtype", lambda: merge(state(lse=torch.ones(3, 4, dtype=torch.float64))), I, ("states[0]: lse", "float32", "float64")),
    # Caches
    Case("a cache without layers", lambda: cache(specs=[]), I, ("specs",)),
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


@pytest.mark.parametrize("dtype", [">i2", ">i4", ">i8", ">u4", ">u8"])
def test_arrays_in_the_other_byte_order_are_read_as_the_numbers_they_hold(dtype):
    arguments = {"qo_indptr": [0, 2, 3], "kv_lens": [5, 9], "kv_indptr": [0, 2, 5], "kv_indices": [3, 1, 0, 2, 4]}
    batch = csr(**{name: np.array(value, dtype) for name, value in arguments.items()})
    assert batch.pages.entries.dtype.isnative
    torch.manual_seed(0)
    q, kv = torch.randn(3, 4, 8), (torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8))
    torch.testing.assert_close(run(batch, q, kv), run(csr(), q, kv), rtol=0, atol=0)


def test_states_to_merge_may_come_from_any_iterable():
    pairs = [(torch.full((1, 1, 2), float(i)), torch.full((1, 1), 0.5 * i)) for i in range(3)]
    expected = sennit.merge_states(pairs)
    for states in (
        tuple(pairs),
        (pair for pair in pairs),
        [list(pair) for pair in pairs],
        dict(enumerate(pairs)).values(),
    ):
        torch.testing.assert_close(sennit.merge_states(states), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "flags", [(True, False), np.array([True, False]), torch.tensor([True, False]), [np.True_, False]]
)
def test_causal_flags_may_be_any_host_bools(flags):
    assert attention().plan(csr(), causal=flags).segments.causal.tolist() == [1, 0]


def test_a_cpu_with_an_index_is_the_cpu():
    attn = attention(device="cpu:0")
    assert attn.device == torch.device("cpu")
    out = attn.run(attn.plan(csr()), queries(), (pages(), pages()), sm_scale=1.0)
    assert out.device == attn.device
    assert cache(device=torch.device("cpu", 0)).device == torch.device("cpu")
