"""Wrong use that is easy to fall into: memory shared or borrowed, autocast, other processes, sizes that overflow."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from solving import attention_for, each_backend

import sennit
from sennit.check.problems import make_problem
from sennit.plan.cost import KernelConfig, Strand
from sennit.plan.plan import make_plan

SPEC = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def setup(backend="reference", device="cpu", spec=SPEC, kv_lens=(9, 5), q_lens=(3, 1)):
    rng = np.random.default_rng(0)
    problem = make_problem(rng, spec, list(q_lens), list(kv_lens), page_size=4, device=device)
    attn = attention_for(problem, backend)
    return problem, attn, attn.plan(problem.batch)


@each_backend
def test_autocast_around_the_call_changes_no_bit(backend, device):
    problem, attn, plan = setup(backend, device)
    expected = attn.run(plan, problem.q, problem.kv, sm_scale=0.3, return_lse=True)
    states = [expected, expected]
    merged = sennit.merge_states(states)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = attn.run(plan, problem.q, problem.kv, sm_scale=0.3, return_lse=True)
        merged_in_autocast = sennit.merge_states(states)
    for a, b in zip((*got, *merged_in_autocast), (*expected, *merged), strict=True):
        assert torch.equal(a, b)


@each_backend
def test_a_slot_mapping_does_not_store_rows_without_a_position(backend, device):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    pools = torch.zeros(3, 4, 2, 8, device=device), torch.zeros(3, 4, 2, 8, device=device)
    batch = sennit.Batch.csr(qo_indptr=[0, 3], kv_lens=[1], kv_indptr=[0, 1], kv_indices=[0], slot_mapping=[8, 9, 5])
    rows = torch.ones(3, 2, 8, device=device)
    attn.append(attn.plan(batch), rows, rows, pools)
    assert pools[0].flatten(0, 1).any(dim=2).any(dim=1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("combine", ["sum", "max"])
def test_every_item_has_one_worker_whatever_the_cost_model_says(combine):
    rng = np.random.default_rng(1)
    for _ in range(300):

        def times():
            return dict(
                zip(
                    ("item_time", "compute_time", "memory_time", "split_time"),
                    rng.choice([0.01, 0.5, 3, 40], 4),
                    strict=True,
                )
            )

        strands = Strand("wide", 8, 4, **times()), Strand("narrow", 4, 4, **times())
        config = KernelConfig("c", strands[: int(rng.integers(1, 3))], int(rng.choice([1, 2, 7, 132])), combine)
        text = " + ".join(f"{rng.integers(0, 9)}@{rng.integers(0, 60)}" for _ in range(rng.integers(1, 6)))
        plan = make_plan(
            sennit.Batch.parse(text, page_size=4), spec=SPEC, owner="", backend="", configs=(config,), page_size=4,
            device=torch.device("cpu"),
        )  # fmt: skip
        indptr = plan.schedule.worker_indptr.ravel()
        assert (np.diff(indptr) >= 0).all()
        assert (indptr[0], indptr[-1]) == (0, plan.schedule.num_items)


def refused(call, *words, error=sennit.InvalidInput):
    with pytest.raises(error) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value


def test_memory_that_elements_or_arguments_share_is_not_written():
    problem, attn, plan = setup()
    k, v = problem.kv
    rows = torch.ones(4, 2, 8)
    refused(lambda: attn.append(plan, rows, rows, (k, k)), "kv_pages: v", "memory of its own", "keys")
    expanded = torch.zeros(1, 4, 2, 8).expand(len(k), 4, 2, 8)
    refused(lambda: attn.append(plan, rows, rows, (k, expanded)), "kv_pages: v", "strides (0, ")
    refused(lambda: attn.append(plan, k[0], rows, (k, v)), "kv_pages: k", "memory apart from k")
    refused(
        lambda: attn.run(plan, problem.q, problem.kv, sm_scale=1.0, out=torch.zeros(1, 4, 8).expand(4, 4, 8)),
        "out", "strides (0, ",
    )  # fmt: skip
    both = torch.zeros(5, 4, 8)
    refused(lambda: attn.run(plan, both[:4], problem.kv, sm_scale=1.0, out=both[1:]), "out", "memory apart from q")
    refused(lambda: attn.run(plan, both[:4], problem.kv, sm_scale=1.0, out=both[:4]), "out", "memory apart from q")


@pytest.mark.parametrize("shared", ["shifted by a page", "shifted by a slot", "columns in common", "other strides"])
def test_keys_and_values_that_share_some_elements_are_not_written(shared):
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    buffer = torch.zeros(8, 4, 2, 16)
    pools = {
        "shifted by a page": (buffer[:5, ..., :8], buffer[1:6, ..., :8]),
        "shifted by a slot": (
            buffer.view(-1)[: 5 * 64].view(5, 4, 2, 8),
            buffer.view(-1)[16:][: 5 * 64].view(5, 4, 2, 8),
        ),
        "columns in common": (buffer[..., :8], buffer[..., 4:12]),
        "other strides": (buffer[:, :, :, :8], buffer.view(16, 4, 2, 8)[::2]),
    }[shared]
    plan = attn.plan(sennit.Batch.parse("1@9", page_size=4))
    before = buffer.clone()
    refused(
        lambda: attn.append(plan, torch.ones(1, 2, 8), torch.ones(1, 2, 8), pools), "kv_pages: v", "memory of the keys"
    )
    assert torch.equal(buffer, before)


def test_interleaved_views_given_as_a_pair_are_not_taken_for_shared_memory():
    _, attn, plan = setup()
    pool = torch.zeros(9, 2, 4, 2, 8)
    attn.append(plan, torch.ones(4, 2, 8), torch.ones(4, 2, 8), (pool[:, 0], pool[:, 1]))
    assert pool.any()


def test_tensors_of_inference_mode_are_refused_outside_before_anything_is_written():
    problem, attn, plan = setup()
    with torch.inference_mode():
        borrowed = torch.zeros_like(problem.kv[1])
    k = torch.zeros_like(problem.kv[0])
    refused(lambda: attn.append(plan, torch.ones(4, 2, 8), torch.ones(4, 2, 8), (k, borrowed)), "inference_mode")
    assert not k.any()
    with torch.inference_mode():
        attn.append(plan, torch.ones(4, 2, 8), torch.ones(4, 2, 8), (k, borrowed))


def test_page_copies_whose_result_would_depend_on_their_order_are_refused():
    problem, attn, _ = setup()
    refused(lambda: attn.copy_pages([0, 1], [2, 2], problem.kv), "target", "different pages", "[2, 2]")
    refused(lambda: attn.copy_pages([0, 1], [1, 2], problem.kv), "target", "none of them a source", "[1, 2]")
    wrong = torch.zeros(5, 8, 2, 8), torch.zeros(5, 8, 2, 8)
    refused(lambda: attn.copy_pages([0], [1], wrong), "kv_pages", "(8, 2)", error=sennit.PlanMismatch)


def test_a_compiled_layer_takes_any_number_as_scale():
    problem, attn, plan = setup()
    with torch.inference_mode():
        layer = torch.compile(
            lambda plan, q, kv, scale: attn.run(plan, q, kv, sm_scale=scale), backend="aot_eager", fullgraph=True
        )
        for scale in (1.0, 0.5, 0.25, 2):
            expected = attn.run(plan, problem.q, problem.kv, sm_scale=scale)
            torch.testing.assert_close(layer(plan, problem.q, problem.kv, scale), expected)


def test_numpy_scalars_serve_as_numbers():
    attn = sennit.BatchAttention(SPEC, page_size=np.int64(4), device="cpu")
    problem, _, _ = setup()
    plan = attn.plan(problem.batch, split_size=np.int32(8))
    out = attn.run(plan, problem.q, problem.kv, sm_scale=np.float32(0.5))
    torch.testing.assert_close(out, attn.run(plan, problem.q, problem.kv, sm_scale=0.5))


def test_a_plan_made_in_another_process_runs():
    code = """
import pickle, sys, numpy as np, torch, sennit
spec = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
attn = sennit.BatchAttention(spec, page_size=4, device="cpu", backend="reference-items")
sys.stdout.buffer.write(pickle.dumps(attn.plan(sennit.Batch.parse("3@9 + 1@5", page_size=4))))
"""
    plan = pickle.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu", backend="reference-items")
    pools = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    q = torch.randn(4, 4, 8)
    own = attn.plan(sennit.Batch.parse("3@9 + 1@5", page_size=4))
    object.__setattr__(plan, "key", plan.key)
    torch.testing.assert_close(attn.run(plan, q, pools, sm_scale=1.0), attn.run(own, q, pools, sm_scale=1.0))
    stranger = dataclasses.replace(plan, key="nobody/knows/it").tensors
    arguments = (stranger.host, stranger.device, stranger.page_table, stranger.stamp, None, None, None, None, [])
    refused(
        lambda: torch.ops.sennit.attend("nobody", q, *pools, torch.empty(4, 4, 8), None, *arguments, 1.0, True),
        "key", "nobody",
    )  # fmt: skip


def test_sizes_that_overflow_32_bits_are_typed_errors():
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    slots = sennit.Batch.csr(qo_indptr=[0, 1], kv_lens=[1], kv_indptr=[0, 1], kv_indices=[0], slot_mapping=[2**40])
    refused(lambda: attn.plan(slots), "at most 2147483647", str(2**38))
    refused(lambda: sennit.BatchAttention(SPEC, page_size=2**63, device="cpu"), "page_size", "2147483647")
    refused(lambda: attn.plan(sennit.Batch.parse("1@9", page_size=4), split_size=2**63), "split_size", "2147483647")
    refused(lambda: attn.buffers(max_requests=2**40, max_tokens=1, max_pages=1), "max_requests", "2147483647")
    many = SPEC.replace(num_qo_heads=64, num_kv_heads=64)
    partial = sennit.BatchAttention(many, page_size=64, device="cpu")
    refused(
        lambda: partial.plan(sennit.Batch.parse("64@1048576", page_size=64), split_size=1), "partial rows", "split_size"
    )


def test_buffers_and_backends_of_the_wrong_kind_are_named():
    problem, attn, _ = setup()
    refused(lambda: attn.plan(problem.batch, into=5), "into", "BatchAttention.buffers", "int")
    refused(lambda: sennit.BatchAttention(SPEC, page_size=4, backend=["reference"]), "backend", "a name", "list")
    refused(lambda: attn.run(attn.plan(problem.batch), problem.q.to_sparse(), problem.kv, sm_scale=1.0), "q", "dense")
    slots = sennit.Batch.csr(qo_indptr=[0, 1], kv_lens=[1], kv_indptr=[0, 1], kv_indices=[0], slot_mapping=[0])
    buffers = attn.buffers(max_requests=2, max_tokens=2, max_pages=2)
    refused(lambda: attn.plan(slots, into=buffers), "slot_mapping", "device", error=sennit.UnsupportedFeature)


def test_results_are_not_written_over_what_is_read_or_over_each_other():
    spec = SPEC.replace(learned_sinks=True)
    attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
    plan = attn.plan(sennit.Batch.parse("8@8", page_size=4))
    memory = torch.zeros(4096)
    pools = memory[:128].view(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    q = torch.randn(8, 4, 8)

    def run(**options):
        return attn.run(plan, q, pools, sm_scale=1.0, **{"sinks": torch.zeros(4), **options})

    refused(lambda: run(out=memory[:256].view(8, 4, 8)), "out", "memory apart from k")
    refused(lambda: run(out=memory[512:768].view(8, 4, 8), sinks=memory[600:604]), "out", "memory apart from sinks")
    refused(
        lambda: run(out=memory[512:768].view(8, 4, 8), lse=memory[512:544].view(8, 4)), "lse", "memory apart from out"
    )
    refused(lambda: run(out=memory.as_strided((8, 4, 8), (16, 8, 1), 512)), "out", "of its own for every element")
    run(out=memory[512:768].view(8, 4, 8), lse=memory[768:800].view(8, 4))
    run(out=memory.as_strided((8, 4, 8), (1, 64, 8), 512))  # transposed, but every element has its place


def test_a_capture_may_be_called_like_an_argument_and_both_are_kept_from_being_overwritten():
    k = torch.zeros(4)
    spec = SPEC.replace(score_mod=lambda score, b, h, q_idx, kv_idx: score + k[h])
    attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
    plan = attn.plan(sennit.Batch.parse("8@8", page_size=4))
    memory = torch.zeros(1024)
    pools = memory[:128].view(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)

    def run(k, out):
        return attn.run(plan, torch.randn(8, 4, 8), pools, sm_scale=1.0, captures={"k": k}, out=out.view(8, 4, 8))

    refused(lambda: run(torch.zeros(4), memory[:256]), "out", "memory apart from k")
    refused(lambda: run(memory[300:304], memory[256:512]), "out", "memory apart from captures['k']")


def test_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)])
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    plan = attn.plan(sennit.Batch.parse("3@9", page_size=4))
    pools = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    refused(lambda: attn.run(plan, nested, pools, sm_scale=1.0), "q", "nested")
    refused(lambda: attn.run(plan, torch.zeros(3, 4, 8), (nested, nested), sm_scale=1.0), "kv_pages", "nested")
    refused(lambda: attn.run(plan, torch.zeros(3, 4, 8), nested, sm_scale=1.0), "kv_pages", "nested")
    refused(lambda: attn.plan(plan.batch, packed_mask=nested), "packed_mask", "nested")
    refused(lambda: sennit.pack_mask([nested]), "masks[0]", "nested")
    refused(lambda: sennit.pack_mask([torch.ones(2, 2).bool().to_sparse()]), "masks[0]", "sparse")


def test_trees_cannot_be_changed():
    tree = sennit.Tree([-1, 0, 0])
    for array in (tree.parents, tree.depths, tree.ancestors, tree.words(2)):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
    with pytest.raises(AttributeError):
        tree.parents = np.zeros(3, np.int64)
    refused(lambda: sennit.Tree(range(-1, 5000)), "parents", "4096", "5001")


def test_two_tensors_of_one_name_in_the_functions_of_a_spec_are_refused():
    def score(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[h]

    def mask(table):
        return lambda b, h, q_idx, kv_idx: table[h] > 0

    one = torch.ones(4)
    assert len(SPEC.replace(score_mod=score(one), mask_mod=mask(one)).captures) == 1
    refused(lambda: SPEC.replace(score_mod=score(one), mask_mod=mask(one.clone())), "mask_mod", "two different tensors")


def test_numbers_that_do_not_fit_float32_are_refused():
    refused(lambda: SPEC.replace(logits_soft_cap=1e39), "logits_soft_cap", "float32")
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    plan = attn.plan(sennit.Batch.parse("3@9", page_size=4))
    pools = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    refused(lambda: attn.run(plan, torch.zeros(3, 4, 8), pools, sm_scale=1e39), "sm_scale", "float32")


def test_the_request_whose_page_is_wrong_is_named_with_windows_too():
    attn = sennit.BatchAttention(SPEC.replace(window_left=4, num_sink_tokens=4), page_size=4, device="cpu")
    lengths = {"qo_indptr": [0, 1, 2], "kv_lens": [9, 9], "kv_indptr": [0, 3, 6]}
    refused(lambda: attn.plan(sennit.Batch.csr(**lengths, kv_indices=[0, 1, 2, -5, 4, 5])), "request 1", "-5")
    exact = torch.tensor([9, 9], dtype=torch.int32)
    table = [0, 1, 2, -1, 4, 5]  # sink pages are never given back
    refused(lambda: attn.plan(sennit.Batch.csr(**lengths, kv_indices=table, kv_lens_device=exact)), "request 1", "-1")


def test_buffers_beyond_32_bit_offsets_are_refused():
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    with pytest.raises(sennit.CapacityExceeded, match="32 bits"):
        attn.buffers(max_requests=4, max_tokens=4, max_pages=4, max_tree_nodes=2**31 - 1)


def test_forward_mode_derivatives_are_refused_rather_than_zero():
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    problem, _, _ = setup()
    plan = attn.plan(problem.batch)
    refused(
        lambda: torch.func.jvp(
            lambda q: attn.run(plan, q, problem.kv, sm_scale=1.0), (problem.q,), (torch.ones_like(problem.q),)
        ),
        "q", "tangent", "inference",
    )  # fmt: skip


@each_backend
def test_an_append_to_a_batch_without_requests_writes_nothing(backend, device):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    pools = torch.zeros(8, 4, 2, 8, device=device), torch.zeros(8, 4, 2, 8, device=device)
    rows = torch.ones(3, 2, 8, device=device)
    exact = torch.zeros(0, dtype=torch.int32, device=device)
    for options in ({}, {"kv_lens_device": exact}):
        batch = sennit.Batch.csr(qo_indptr=[0], kv_lens=[], kv_indptr=[0], kv_indices=[], **options)
        attn.append(attn.plan(batch), rows, rows, pools)
    assert not pools[0].any()
    assert not pools[1].any()


def test_plans_and_buffers_of_a_backend_that_was_not_asked_for_are_refused():
    problem, items, _ = setup("reference-items")
    _, reference, plan = setup("reference")
    buffers = items.buffers(max_requests=4, max_tokens=8, max_pages=16)
    refused(lambda: reference.plan(problem.batch, into=buffers), "into", "reference", "reference-items")
    refused(
        lambda: items.run(plan, problem.q, problem.kv, sm_scale=1.0), "plan", "reference-items", "reference",
        error=sennit.PlanMismatch,
    )  # fmt: skip


def test_what_is_wrong_is_named_and_not_what_goes_with_it():
    problem, attn, plan = setup()
    q, out = problem.q, torch.zeros(4, 4, 8)
    refused(
        lambda: attn.run(plan, q[:2], problem.kv, sm_scale=1.0, out=out), "q", "4 rows", "2", error=sennit.PlanMismatch
    )
    negated = out._neg_view()
    refused(lambda: attn.run(plan, q, problem.kv, sm_scale=1.0, out=negated), "out", "resolve_neg", "negated")
    buffers = attn.buffers(max_requests=4, max_tokens=8, max_pages=16)
    packed = sennit.Batch.ragged(qo_indptr=[0, 1], kv_indptr=[0, 5])
    refused(lambda: attn.plan(packed, into=buffers), "into", "packed keys", "buffers")
    with pytest.raises(sennit.UnsupportedFeature, match=r"^spec: .*float64"):
        sennit.BatchAttention(SPEC.replace(dtype=torch.float64), page_size=4, device="cpu", backend="cpu")


@each_backend
def test_an_infinite_sink_leaves_nothing_to_keys(backend, device):
    spec = SPEC.replace(learned_sinks=True)
    problem, attn, plan = setup(backend, device, spec=spec)
    sinks = torch.tensor([torch.inf, 0.0, -torch.inf, 1.0], device=device)
    for split in ({}, {"split_size": 4}):
        plan = attn.plan(problem.batch, **split)
        out, lse = attn.run(plan, problem.q, problem.kv, sm_scale=0.3, sinks=sinks, return_lse=True)
        assert (out[:, 0] == 0).all()
        assert (lse[:, 0] == torch.inf).all()
        assert out.isfinite().all()
        assert (out[:, 1:] != 0).all()
