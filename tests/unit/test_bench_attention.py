"""What ``sennit bench attention`` counts, samples, times and compares, whatever the speed of the machine."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial

import numpy as np
import pytest
import torch

from sennit import jit
from sennit.bench import attention, calls, cpu, host, probe, sdpa, timing, vllm_cpu, workloads
from sennit.bench.attention import Setting
from sennit.bench.correctness import find_truth
from sennit.bench.instruments import Absent, Ceiling, Clock, Peer, Prepared
from sennit.bench.results import Balance, Heat
from sennit.bench.work import count_work, seen_keys
from sennit.check.functions import Functions
from sennit.check.oracle import Rules, dense_attention
from sennit.errors import BuildUnavailable, InvalidInput, SennitError, UnsupportedFeature
from sennit.plan.batch import Batch
from sennit.spec import AttentionSpec

SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SMALL_LATENT = {"num_qo_heads": 4, "num_kv_heads": 1, "head_dim_qk": 48, "head_dim_vo": 32, "latent": True}


def spec_with(**changes):
    return AttentionSpec(dtype=torch.float32, **(SMALL | changes))


def problem_of(batch, heads=SMALL, *, dtype=torch.float32, layout="NHD", page_size=4, score=None, **masks):
    workload = workloads.Workload("small", batch, heads, masks, score)
    return workloads.make_workload_problem(workload, dtype, layout, page_size, torch.device("cpu"))


def visible(q_len, kv_len, window_left, sinks):
    """bool ``[q_len, kv_len]``, pair by pair from the definition."""
    seen = np.zeros((q_len, kv_len), bool)
    for i in range(q_len):
        for j in range(kv_len):
            p = kv_len - q_len + i
            seen[i, j] = j <= p and (window_left is None or j < sinks or p - j <= window_left)
    return seen


@pytest.mark.parametrize(
    "window", [{}, {"window_left": 0}, {"window_left": 3}, {"window_left": 5, "num_sink_tokens": 2}]
)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (7, 7), (3, 20), (9, 4), (0, 5), (5, 0), (4, 12)])
def test_pairs_and_keys_are_those_of_the_mask(window, lengths):
    seen = visible(*lengths, window.get("window_left"), window.get("num_sink_tokens", 0))
    spec = spec_with(**window)
    work = count_work(spec, [lengths[0]], [lengths[1]])
    keys = np.flatnonzero(seen.any(axis=0)).tolist()
    found = seen_keys(spec, *lengths)
    assert work.pairs == seen.sum()
    assert work.flops == seen.sum() * 4 * (2 * 32 + 2 * 32)
    assert [*range(found.sinks), *range(found.first, found.last)] == keys
    assert work.bytes == len(keys) * 2 * (32 + 32) * 4 + lengths[0] * 4 * (32 + 32) * 4


def test_work_of_a_batch_is_the_sum_of_its_requests_and_latent_keys_are_read_once():
    spec = AttentionSpec(dtype=torch.bfloat16, **SMALL_LATENT)
    work = count_work(spec, [1, 2], [10, 6])
    assert work.pairs == 10 + 5 + 6
    assert work.bytes == 16 * 48 * 2 + 3 * 4 * (48 + 32) * 2


def test_workloads_are_chosen_by_name_by_pattern_and_by_batch():
    assert [w.name for w in workloads.choose_workloads([])] == [w.name for w in workloads.CPU_WORKLOADS]
    assert [w.batch for w in workloads.choose_workloads(["prefill-1k", "2*1@7", "prefill-*"])] == [
        "1024@1024", "2*1@7", "4096@4096",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["decode", "", "0@5", "3@0", "1@x"])
def test_what_is_neither_a_name_nor_a_batch_with_work_is_refused(text):
    with pytest.raises(InvalidInput):
        workloads.choose_workloads([text])


def test_only_masks_and_functions_make_a_workload_differ_from_plain_causal():
    differing = [w.name for w in workloads.CPU_WORKLOADS if w.plain is not None]
    assert differing == ["window", "score-mod"]
    window = next(w for w in workloads.CPU_WORKLOADS if w.name == "window")
    assert (window.plain.batch, window.plain.heads, window.plain.plain) == (window.batch, window.heads, None)


def test_problems_have_nan_in_slots_that_no_request_owns_and_the_usual_scale():
    problem = problem_of("3@5 + 1@9", layout="HND")
    assert problem.kv[0].isnan().any()
    assert problem.sm_scale == 32**-0.5


def exact(problem):
    return problem.solve()[0]


@pytest.mark.parametrize("heads", [SMALL, SMALL_LATENT])
@pytest.mark.parametrize("masks", [{}, {"window_left": 6, "num_sink_tokens": 2}])
def test_sampled_rows_are_those_of_the_whole_batch(heads, masks):
    problem = problem_of("40@60 + 5*1@33 + 7@7", heads, **masks)
    truth = find_truth(problem)
    torch.testing.assert_close(truth.exact, exact(problem)[truth.rows])
    assert {0, 39, 40, 44, 45, 51} <= set(truth.rows.tolist())
    assert truth.check(exact(problem)).error < 1e-12


def test_every_row_of_a_small_batch_is_looked_at_and_few_of_a_large_one():
    assert find_truth(problem_of("3@5 + 4*1@6")).rows.tolist() == list(range(7))
    assert len(find_truth(problem_of("50*2@3")).rows) == 24


def without_a_page(problem, request):
    """The output if request ``request`` did not see its second page of 16."""
    out = exact(problem)
    rows = slice(int(problem.batch.q_starts[request]), int(problem.batch.q_starts[request]) + 1)
    kept = torch.cat([torch.arange(16), torch.arange(32, len(problem.keys[request]))])
    keys, values = problem.keys[request][kept], problem.values[request][kept]
    out[rows], _ = dense_attention(problem.q[rows], keys, values, causal=True, sm_scale=problem.sm_scale, rules=Rules())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_page_of_many_that_is_left_out_is_noticed(dtype):
    problem = problem_of("4*1@4096", dtype=dtype, page_size=16)
    truth = find_truth(problem)
    assert truth.check(exact(problem).to(dtype)).passed
    assert not truth.check(without_a_page(problem, 2).to(dtype)).passed


def test_a_number_that_is_not_finite_is_an_infinite_error():
    problem = problem_of("2@3")
    out = exact(problem)
    out[1, 0, 0] = torch.nan
    assert find_truth(problem).check(out).error == math.inf


def test_a_row_that_sees_nothing_must_be_zero():
    problem = problem_of("3@1")
    out = exact(problem)
    assert find_truth(problem).check(out).passed
    out[0, 0, 0] = 1e-3
    assert not find_truth(problem).check(out).passed


def test_subjects_take_turns_and_the_first_round_does_not_count():
    order = []
    clock = {"a": iter([9e-6, 1e-6, 3e-6, 2e-6]), "b": iter([9e-6, 4e-6, 4e-6, 7e-6])}

    def subject(name):
        def run():
            order.append(name)
            return next(clock[name])

        return run

    found = timing.take_turns(
        {name: subject(name) for name in "ab"}, 3, before=lambda name: order.append(f"before {name}")
    )
    assert order == ["before a", "a", "before b", "b"] * 4
    assert found["a"].samples == pytest.approx((1, 3, 2))
    assert (found["a"].median, found["a"].minimum) == pytest.approx((2, 1))
    assert (found["b"].lower_quartile, found["b"].upper_quartile) == pytest.approx((4, 5.5))


def test_parts_keep_query_rows_and_pages_where_they_are():
    problem = problem_of("1@9 + 6@11 + 1@5")
    parts = calls.parts_of(problem.batch)
    assert {name: str(part) for name, part in parts.items()} == {"wide": "6@11", "narrow": "1@9 + 1@5"}
    assert parts["narrow"].q_starts.tolist() == [0, 7]
    truth, attn = find_truth(problem), attention._attention(problem, Setting(kv_layout="NHD", page_size=4), Scripted())
    for part in parts.values():
        call = calls.Call(attn, problem, part)
        assert call.verified(truth).passed
        torch.testing.assert_close(call.run()[call.rows], exact(problem)[call.rows].float())
    assert calls.parts_of(problem_of("3*1@5").batch) == {}


def test_balance_is_the_fullest_worker_over_the_mean():
    balance = Balance([1.0, 3.0], None)
    assert (balance.predicted_imbalance, balance.measured_imbalance) == (1.5, None)
    assert Balance([0.0, 0.0], [2.0, 2.0]).predicted_imbalance == 1.0


class Scripted:
    """Instruments by which every call takes a millisecond."""

    device = torch.device("cpu")
    notes = ()

    def __init__(self):
        self.calls, self.hardware = 0, {}

    def clocks(self, subjects, before=lambda name: None):
        return {name: Clock(partial(self.time, s.run), s.run, "a script") for name, s in subjects.items()}

    def time(self, function):
        function()
        self.calls += 1
        return 1e-3

    def heat(self, clock):
        return Heat(self.time(clock.launch) * 1e6, 2e3, 1980.0, None)

    def settle(self):
        pass

    def ceilings(self, dtype):
        return [
            Ceiling("slow", "read", 10**6, lambda: 1e-3),
            Ceiling("fast", "read", 10**6, lambda: 1e-4),
            Ceiling("square", "matrix", 10**9, lambda: 1e-1),
            Ceiling("odd", "matrix", 10**9, lambda: 1e-3, counts=False),
        ]

    def probe(self, problem):
        return Ceiling("pages", "pages", 1000, lambda: 5e-4)


TINY = Setting(dtype=torch.float32, page_size=4, backend="reference", repeat=2)


def test_ratios_follow_from_times_and_ceilings():
    workload = workloads.Workload("tiny", "4*1@64", SMALL)
    found = attention.measure(workload, TINY, Scripted())
    assert (found.ceilings.read_rate, found.ceilings.matrix_rate) == pytest.approx((1e10, 1e10))
    assert found.read_floor == pytest.approx(found.work.bytes / 1e10 * 1e6)
    assert found.matrix_floor == pytest.approx(4 * 64 * 512 / 1e10 * 1e6)
    assert found.bound == ("memory" if found.work.bytes > found.work.flops else "compute")
    assert found.floor_ratio == pytest.approx(1000 / found.floor)
    assert found.probe_share == pytest.approx(0.5)
    assert found.as_json()["floor"] == found.floor


def test_masks_are_compared_with_plain_causal_pair_by_pair():
    workload = workloads.Workload("tiny", "9@9", SMALL, {"window_left": 1})
    found = attention.measure(workload, TINY, Scripted())
    assert (found.work.pairs, found.plain_work.pairs) == (17, 45)
    assert found.pair_cost == pytest.approx(45 / 17)


def test_the_sum_of_the_parts_stands_beside_the_whole():
    workload = workloads.Workload("tiny", "5@9 + 2*1@6", SMALL)
    found = attention.measure(workload, TINY, Scripted())
    assert [(part.name, part.batch) for part in found.parts] == [("wide", "5@9"), ("narrow", "2*1@6")]
    assert found.parts_sum == pytest.approx(2000)


def test_a_wrong_output_is_not_timed(monkeypatch):
    instruments = Scripted()
    monkeypatch.setattr(calls.Call, "run", lambda self: self._out.fill_(1.0))
    with pytest.raises(SennitError, match="nothing was timed"):
        attention.measure(workloads.Workload("tiny", "2*1@9", SMALL), TINY, instruments)
    assert instruments.calls == 0


def test_peers_that_are_wrong_absent_or_unable_are_reported_and_not_timed():
    def unable(problem):
        raise UnsupportedFeature("window_left", "no windows")

    peers = [
        Peer("right", lambda problem: Prepared(lambda: exact(problem).float(), "as it is")),
        Peer("wrong", lambda problem: Prepared(lambda: exact(problem).float() * 1.01, "as it is")),
        Peer("broken", lambda problem: Prepared(lambda: exact(problem).float() * torch.nan, "as it is")),
        Peer("unable", unable),
        Absent("absent", "not installed: pip install it"),
    ]
    setting = dataclasses.replace(TINY, peers=peers)
    found = attention.measure(workloads.Workload("tiny", "2*1@9", SMALL), setting, Scripted())
    notes = {peer.name: peer.note for peer in found.peers}
    assert [peer.name for peer in found.peers if peer.times is not None] == ["right"]
    assert found.peers[0].speedup == pytest.approx(1.0)
    assert notes["wrong"].startswith("wrong, so not timed: relative error 0.01 ")
    assert notes["unable"] == "cannot do it: window_left: no windows"
    assert notes["absent"] == "not installed: pip install it"
    assert found.as_json()["peers"][2]["check"]["error"] is None  # JSON has no infinity


@pytest.mark.parametrize("peer", sdpa.sdpa_peers(), ids=lambda peer: peer.name)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "batch", "masks"),
    [
        (SMALL, "7@7 + 2*1@19 + 3@10", {}),
        (SMALL, "9@9 + 5@12", {"window_left": 4, "num_sink_tokens": 1}),
        (SMALL, "1@9 + 0@4 + 1@3", {"window_left": 50}),
        (SMALL_LATENT, "2*1@19 + 5@9", {}),
    ],
)
def test_sdpa_computes_the_same_from_keys_and_from_pages(peer, layout, heads, batch, masks):
    problem = problem_of(batch, heads, layout=layout, **masks)
    assert find_truth(problem).check(peer.prepare(problem).run()).passed


def test_sdpa_refuses_functions():
    problem = problem_of("3@3", score=Functions(score_mod=lambda score, b, h, q, k: score * 2))
    for peer in sdpa.sdpa_peers():
        with pytest.raises(UnsupportedFeature, match="score_mod"):
            peer.prepare(problem)


def test_vllm_that_is_not_installed_is_absent_and_one_that_is_named_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_cpu, "find_spec", lambda name: None)
    found = vllm_cpu.find_vllm()
    assert isinstance(found, Absent)
    assert "pip download" in found.reason
    with pytest.raises(InvalidInput, match="vllm-library"):
        vllm_cpu.find_vllm(tmp_path)
    (tmp_path / "_C.abi3.so").write_text("no library")
    with pytest.raises(InvalidInput, match="a library that this PyTorch can load"):
        vllm_cpu.find_vllm(tmp_path / "_C.abi3.so")


@pytest.mark.parametrize("batch", ["0@4 + 1@3", "5@3"])
def test_vllm_is_not_given_batches_that_it_would_crash_on(batch):
    with pytest.raises(UnsupportedFeature, match="batch"):
        vllm_cpu._prepare(problem_of(batch))


def test_blocks_of_vllm_are_distinct_and_hold_every_key():
    tables = vllm_cpu.Tables.of(problem_of("1@70 + 1@33"), 32)
    slots = torch.cat([tables.slots(0, 32), tables.slots(1, 32)])
    assert len(slots.unique()) == 103
    assert slots.max() < 32 * tables.num_blocks == 32 * 5


def test_pages_of_the_probe_are_those_that_rows_see_in_their_order():
    batch = Batch.csr(qo_indptr=[0, 1, 3], kv_lens=[9, 20], kv_indptr=[0, 3, 8], kv_indices=[7, 1, 5, 0, 2, 4, 6, 3])
    problem = dataclasses.replace(problem_of("1@9 + 2@20"), batch=batch)
    assert probe.seen_pages(problem).tolist() == [7, 1, 5, 0, 2, 4, 6, 3]
    windowed = dataclasses.replace(problem, spec=spec_with(window_left=5, num_sink_tokens=1))
    # Rows at 8, and at 18 and 19: keys from 3, and from 13.
    assert probe.seen_pages(windowed).tolist() == [7, 1, 5, 0, 6, 3]


def test_other_threads_are_waited_for(monkeypatch):
    busy = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(cpu, "_time_of_others", lambda: next(busy))
    assert cpu.wait_for_other_threads()
    assert next(busy, None) is None
    monkeypatch.setattr(cpu, "_time_of_others", time.perf_counter)
    monkeypatch.setattr(cpu, "PATIENCE", 0.01)
    assert not cpu.wait_for_other_threads()


def test_threads_are_as_they_were_after_a_fault():
    def fail():
        assert torch.get_num_threads() == 2
        raise SennitError

    with pytest.raises(SennitError), cpu.threads(2):
        fail()
    assert torch.get_num_threads() == 1


def make_instruments(monkeypatch):
    monkeypatch.setattr(cpu, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(cpu, "SQUARES", (16, 32))
    monkeypatch.setattr(cpu, "ATTENTION_SHAPED", (2, 16, 8))
    return cpu.CpuInstruments()


def test_without_a_compiler_pytorch_reads_memory_and_pages_are_not_probed(monkeypatch):
    def unavailable(threads):
        raise BuildUnavailable("no compiler")

    monkeypatch.setattr(cpu, "Probe", unavailable)
    instruments = make_instruments(monkeypatch)
    assert [c.name for c in instruments.ceilings(torch.float32) if c.kind == "read"] == ["torch.sum"]
    assert instruments.probe(problem_of("1@9")) is None
    assert "no compiler" in instruments.notes[0]
    assert instruments.time(lambda: time.sleep(0.002)) > 0.002


def test_operations_of_the_matrix_products_are_counted(monkeypatch):
    monkeypatch.setattr(cpu, "Probe", lambda threads: None)
    products = [c for c in make_instruments(monkeypatch).ceilings(torch.float32) if c.kind == "matrix"]
    assert [(c.amount, c.counts) for c in products] == [
        (2 * 16**3, True), (2 * 32**3, True), (2 * 2 * 16 * 16 * 8, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("slow", "named"), [(torch.bfloat16, "GEMM 16^3 float32"), (torch.float32, "GEMM 16^3")])
def test_where_products_of_a_dtype_are_slower_than_float32_these_are_the_ceiling(slow, named, monkeypatch):
    monkeypatch.setattr(cpu, "Probe", lambda threads: None)
    monkeypatch.setattr(cpu, "_product_time", lambda dtype: 9.0 if dtype == slow else 1.0)
    assert named in [ceiling.name for ceiling in make_instruments(monkeypatch).ceilings(torch.bfloat16)]


def test_what_others_do_on_the_machine_is_seen(monkeypatch):
    ticks = iter([(10.0, 0.0), (14.0, 1.0)])
    clock, own = iter([100.0, 102.0]), iter([0.0, 1.0])
    monkeypatch.setattr(host, "_processor_ticks", lambda: next(ticks))
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(host.time, "process_time", lambda: next(own))
    found = host.Observer().activity()
    assert (found.stolen, found.foreign) == (0.5, 1.5)
    assert found.warning.startswith("noisy machine: the host took 0.50 and other processes took 1.50 of ")
    assert dataclasses.replace(found, stolen=0.0, foreign=None).warning == ""


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_probe_reads_pages_of_all_forms(threads, layout):
    try:
        jit.find_toolchain()
    except BuildUnavailable as error:
        pytest.skip(str(error))
    native = probe.Probe(threads)
    assert native.read(torch.ones(2**20)) > 0
    for heads in (SMALL, SMALL_LATENT | {"head_dim_qk": 64}):
        problem = problem_of("1@9 + 6@6", heads, layout=layout)
        size, reads = native.pages_of(problem)
        assert size == 5 * 4 * problem.spec.kv_bytes_per_token
        assert len(reads) == 2
        assert min(read() for read in reads) > 0
    with pytest.raises(UnsupportedFeature, match="64 bytes"):
        native.pages_of(problem_of("1@9", SMALL | {"head_dim": 20}))
