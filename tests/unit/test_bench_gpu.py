"""The GPU's side of ``sennit bench``, without a GPU: how calls are timed, peers called, and what survives a crash."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import types
from functools import partial

import numpy as np
import pytest
import torch

from sennit.bench import cuda, devices, flashinfer_modules, flashinfer_peers, fresh_process, nvml, session, stepping
from sennit.bench.attention import Setting, Stage
from sennit.bench.correctness import find_truth
from sennit.bench.instruments import Absent, Ceiling, Clock, DeviceLost, Peer, Prepared, Subject
from sennit.bench.results import Heat, Measurement
from sennit.bench.workloads import GPU_WORKLOADS, Workload, choose_workloads, make_workload_problem
from sennit.check.oracle import dense_attention
from sennit.errors import InvalidInput, SennitError, UnsupportedFeature

SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
LATENT = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "latent": True}
CPU = torch.device("cpu")


def problem_of(batch, heads=SMALL, *, layout="NHD", page_size=16, dtype=torch.bfloat16, **masks):
    return make_workload_problem(Workload("small", batch, heads, masks), dtype, layout, page_size, CPU)


# How calls are timed.


class Graph:
    """A captured call; ``corrupt`` makes a replay write something else."""

    def __init__(self, run, corrupt):
        self.found, self._run, self._corrupt = run(), run, corrupt
        self.replays = 0

    def replay(self):
        self.replays += 1
        self._run()
        if self._corrupt:
            self.found += 1


def instruments(monkeypatch, seconds, *, corrupt=(), refused=()):
    """Instruments whose events say how long each call takes; names in ``refused`` cannot be captured."""
    made = object.__new__(cuda.CudaInstruments)
    made.device, made.timed = CPU, []

    def take(launch):
        launch()
        owner = getattr(launch, "__self__", launch)
        name = getattr(owner, "name", None) or owner._run.name
        made.timed.append((name, isinstance(owner, Graph)))
        return seconds[name]

    def capture(run):
        if run.name in refused:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        graph = Graph(run, run.name in corrupt)
        return graph, graph.found

    monkeypatch.setattr(made, "time", take, raising=False)
    monkeypatch.setattr(made, "settle", lambda: None)
    monkeypatch.setattr(cuda, "_capture", capture)
    return made


class Call:
    """Writes ones into the same tensor every time."""

    def __init__(self, name):
        self.name, self.out = name, torch.zeros(3)

    def __call__(self):
        return self.out.fill_(1.0)


def subjects(*names):
    return {name: Subject(Call(name), lambda out: bool((out == 1).all())) for name in names}


def test_calls_that_take_long_are_timed_by_events(monkeypatch):
    clocks = instruments(monkeypatch, {"ours": 1.2e-4, "theirs": 5e-4}).clocks(subjects("ours", "theirs"))
    assert {name: clock.how for name, clock in clocks.items()} == {"ours": "events", "theirs": "events"}
    assert clocks["theirs"].run() == 5e-4


def test_where_one_is_brief_all_are_replayed_from_graphs(monkeypatch):
    made = instruments(monkeypatch, {"ours": 9e-5, "theirs": 5e-4})
    tried = []
    clocks = made.clocks(subjects("ours", "theirs"), before=tried.append)
    assert {clock.how for clock in clocks.values()} == {"graph replay"}
    made.timed.clear()
    assert clocks["theirs"].run() == 5e-4
    assert made.timed == [("theirs", True)]
    assert tried == ["ours", "theirs", "ours", "theirs"]


def test_what_cannot_be_captured_or_replays_wrongly_is_timed_by_events_and_says_so(monkeypatch):
    seconds = dict.fromkeys(("ours", "wrong", "refused"), 2e-5)
    made = instruments(monkeypatch, seconds, corrupt=["wrong"], refused=["refused"])
    clocks = made.clocks(subjects(*seconds))
    assert clocks["ours"].how == "graph replay"
    assert clocks["wrong"].how == "events, since a replayed graph computes something else"
    assert clocks["refused"].how.startswith("events, since it cannot be captured: operation not permitted when")
    made.timed.clear()
    clocks["wrong"].run()
    assert made.timed == [("wrong", False)]


def test_a_replay_that_writes_nothing_is_wrong(monkeypatch):
    made = instruments(monkeypatch, {"ours": 1e-5})
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    assert "computes something else" in made.clocks(subjects("ours"))["ours"].how


def test_a_device_that_failed_is_lost(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    made = object.__new__(cuda.CudaInstruments)
    made.device = CPU
    with pytest.raises(DeviceLost, match=r"illegal memory access was encountered$"):
        made.settle()


def test_bytes_and_operations_of_ceilings_are_counted(monkeypatch):
    made = object.__new__(cuda.CudaInstruments)
    made.device, made._buffer, made.time = CPU, torch.ones(1000), lambda launch: launch() is None or 1.0
    monkeypatch.setattr(cuda, "SIDE", 8)
    found = {c.name: (c.kind, c.amount, c.counts) for c in made.ceilings(torch.float32)}
    assert found == {
        "torch.sum": ("read", 4000, True),
        "copy": ("read", 4000, True),
        "GEMM 8^3": ("matrix", 2 * 8**3, True),
    }
    assert all(ceiling.run() for ceiling in made.ceilings(torch.float32))


class Nvml(types.ModuleType):
    """What of pynvml is used; a field's return value decides which reading of power counts."""

    NVML_CLOCK_SM, NVML_SUCCESS = 1, 0
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, field_return):
        super().__init__("pynvml")
        field = types.SimpleNamespace(nvmlReturn=field_return, value=types.SimpleNamespace(uiVal=650_000))
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetClockInfo = lambda handle, kind: 1755
        self.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
        self.nvmlDeviceGetFieldValues = lambda handle, fields: [field]
        self.nvmlDeviceGetPowerUsage = lambda handle: 600_000
        self.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
        self.nvmlSystemGetDriverVersion = lambda: "580.1"


@pytest.mark.parametrize(("field_return", "power"), [(0, 650.0), (3, 600.0)])
def test_a_meter_reads_clock_and_power(monkeypatch, field_return, power):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(field_return))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab"))
    meter = nvml.find_meter(CPU)
    assert (meter.handle, meter.clock, meter.power) == ("GPU-ab", 1755.0, power)
    assert meter.facts == {"driver": "580.1", "highest_clock": 1980, "power_limit": 700.0}


def test_without_nvml_there_is_no_meter(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.find_meter(CPU) is None


# Workloads.


def test_workloads_of_a_gpu_are_those_of_the_measurements_with_flashinfer():
    found = {w.name: w for w in GPU_WORKLOADS}
    assert len(found) == len(GPU_WORKLOADS)
    assert len(choose_workloads([], GPU_WORKLOADS)) == 18
    assert found["mixed-16k"].lengths == ([2048] + [1] * 64, [16384] * 65)
    assert found["pod-c1"].heads == {"num_qo_heads": 16, "num_kv_heads": 4, "head_dim": 128}
    assert [w.name for w in choose_workloads(["mla-*"], GPU_WORKLOADS)] == ["mla-8k", "mla-4k-16", "mla-4k"]
    sweep = choose_workloads(["sweep-*"], GPU_WORKLOADS)
    assert len({workload.batch + str(workload.heads) for workload in sweep}) == len(sweep) == 60
    assert not any(workload.usual for workload in sweep)
    assert choose_workloads(["sweep-64x4-512-16384-256"], GPU_WORKLOADS)[0].batch == "512@16384 + 256*1@16384"
    assert choose_workloads(["sweep-32x32-512-16384-*"], GPU_WORKLOADS)[0].batch == "512@16384 + 128*1@16384"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [SMALL, LATENT | {"head_dim_qk": 24, "head_dim_vo": 16}])
def test_pools_hold_every_key_where_the_table_says_and_nan_elsewhere(layout, heads):
    problem = problem_of("3@5 + 1@9 + 2@4", heads, layout=layout, page_size=4)
    pools = [problem.kv] if problem.spec.latent else list(problem.kv)
    pages = problem.batch.pages
    used = []
    for request, kv_len in enumerate(problem.batch.kv_lens.tolist()):
        for j in range(kv_len):
            page = int(pages.entries[pages.starts[request] + j // 4])
            for pool, rows in zip(pools, (problem.keys, problem.values), strict=False):
                if problem.spec.latent:
                    stored = pool[page, j % 4][None]
                else:
                    stored = pool[page, j % 4] if layout == "NHD" else pool[page, :, j % 4]
                assert torch.equal(stored, rows[request][j])
            used.append((page, j % 4))
    assert len(set(used)) == len(used) == 18
    assert int((~pools[0].isnan()).sum()) == 18 * pools[0].shape[-1] * problem.spec.num_kv_heads
    assert pages.entries.tolist() != sorted(pages.entries.tolist())


# FlashInfer's modules and peers.


def test_each_module_is_built_once_for_all_workloads_that_need_it():
    small = [Workload("a", "4*1@9"), Workload("b", "5@9"), Workload("c", "1@9 + 5@9"), Workload("d", "1@9", LATENT)]
    names = [module.name for module in flashinfer_modules.needed_modules(small, torch.bfloat16, 16)]
    assert names == ["prefill FA2", "prefill FA3", "BatchAttention", "XQA", "batch POD", "MLA FA2", "MLA FA3"]
    mla = [Workload("e", "1@9", LATENT | {"head_dim_qk": 24, "head_dim_vo": 16})]
    assert flashinfer_modules.needed_modules(mla, torch.bfloat16, 16) == []
    assert flashinfer_modules.needed_modules(small, torch.float32, 16) == []
    paged = flashinfer_modules.needed_modules(small[:1], torch.float16, 8)
    assert [module.name for module in paged] == ["prefill FA2", "prefill FA3", "BatchAttention"]
    window = [Workload("f", "1@9", SMALL, {"window_left": 3})]
    assert flashinfer_modules.needed_modules(window, torch.bfloat16, 16) == []


def test_modules_that_cannot_be_built_are_told_of_with_the_reason(monkeypatch):
    def run(function, module, *, on_stage):
        if module.name == "broken":
            raise RuntimeError("Ninja build failed.\nOutput: nvcc")
        assert function is flashinfer_modules._build

    monkeypatch.setattr(flashinfer_modules, "run_alone", run)
    modules = [flashinfer_modules.Module(name, ("a", "b"), ()) for name in ("good", "broken")]
    told = {}
    flashinfer_modules.build_modules(modules, lambda module, problem: told.update({module.name: problem}))
    assert told == {"good": "", "broken": "RuntimeError: Ninja build failed. Output: nvcc"}


def test_a_module_is_built_by_the_function_that_describes_it(monkeypatch):
    built = []
    place = types.ModuleType("place")
    place.gen = lambda *arguments: types.SimpleNamespace(build_and_load=lambda: built.append(arguments))
    monkeypatch.setitem(sys.modules, "place", place)
    monkeypatch.setenv("MAX_JOBS", "3")
    flashinfer_modules._build(print, flashinfer_modules.Module("it", ("place", "gen"), ("fa2", 16)))
    assert built == [("fa2", 16)]
    assert os.environ["MAX_JOBS"] == "3"


class FakeFlashInfer:
    """Wrappers with FlashInfer's signatures that compute what they are asked for, densely, from the pages."""

    def __init__(self):
        self.calls = []

    def attend(self, q, kv, layout, qo_indptr, kv_indptr, kv_indices, kv_lens, *, causal, sm_scale):
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_lens):
            assert tensor.dtype == torch.int32
        k_pool, v_pool = kv if layout == "NHD" else [pool.transpose(1, 2) for pool in kv]
        outs = []
        for r, kv_len in enumerate(kv_lens.tolist()):
            pages = kv_indices[int(kv_indptr[r]) : int(kv_indptr[r + 1])].long()
            k, v = (pool[pages].flatten(0, 1)[:kv_len] for pool in (k_pool, v_pool))
            rows = q[int(qo_indptr[r]) : int(qo_indptr[r + 1])]
            outs.append(dense_attention(rows, k, v, causal=causal, sm_scale=sm_scale, dtype=torch.float32)[0])
        return torch.cat(outs).to(q.dtype)

    def modules(self):
        fake = self
        lens = lambda indptr, last, size: ((indptr.diff() - 1) * size + last).int()  # noqa: E731

        class Wrapper:
            def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
                assert workspace.dtype == torch.uint8
                self.layout, self.backend, self.tensor_cores = kv_layout, backend, use_tensor_cores

        class Prefill(Wrapper):
            def plan(
                self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                head_dim_qk, page_size, *, causal, sm_scale, q_data_type, kv_data_type,
            ):  # fmt: skip
                kv_lens = lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
                self.how = (qo_indptr, paged_kv_indptr, paged_kv_indices, kv_lens), causal, sm_scale

            def run(self, q, paged_kv_cache, *, out):
                fake.calls.append(f"prefill {self.backend}")
                table, causal, scale = self.how
                return out.copy_(fake.attend(q, paged_kv_cache, self.layout, *table, causal=causal, sm_scale=scale))

        class Decode(Wrapper):
            def plan(
                self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, sm_scale,
                q_data_type, kv_data_type,
            ):  # fmt: skip
                assert self.tensor_cores
                kv_lens = lens(indptr, last_page_len, page_size)
                self.how = (torch.arange(len(kv_lens) + 1).int(), indptr, indices, kv_lens), sm_scale

            def run(self, q, paged_kv_cache, *, out):
                fake.calls.append("decode")
                table, scale = self.how
                return out.copy_(fake.attend(q, paged_kv_cache, self.layout, *table, causal=False, sm_scale=scale))

        class BatchAttention:
            def __init__(self, kv_layout="NHD", device="cuda"):
                self.layout = kv_layout

            def plan(
                self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk,
                head_dim_vo, page_size, causal=False, sm_scale=None, q_data_type=None, kv_data_type=None,
            ):  # fmt: skip
                self.how = (qo_indptr, kv_indptr, kv_indices, kv_len_arr), causal, sm_scale

            def run(self, q, kv_cache, out=None):
                table, causal, scale = self.how
                found = fake.attend(q, kv_cache, self.layout, *table, causal=causal, sm_scale=scale)
                return out.copy_(found), out.new_zeros(len(q), q.shape[1])

        class Pod(Wrapper):
            def plan(
                self, qo_p, kv_p, indices_p, last_p, qo_d, kv_d, indices_d, last_d, num_qo_heads, num_kv_heads,
                head_dim, page_size, *, sm_scale, q_data_type, kv_data_type,
            ):  # fmt: skip
                self.wide = qo_p, kv_p, indices_p, lens(kv_p, last_p, page_size)
                self.narrow = qo_d, kv_d, indices_d, lens(kv_d, last_d, page_size)
                self.scale = sm_scale

            def run(self, q_p, kv_p, q_d, kv_d, *, causal_p):
                assert causal_p
                return (
                    fake.attend(q_p, kv_p, self.layout, *self.wide, causal=True, sm_scale=self.scale),
                    fake.attend(q_d, kv_d, self.layout, *self.narrow, causal=False, sm_scale=self.scale),
                )

        class Mla(Wrapper):
            def plan(
                self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
                causal, sm_scale, q_data_type, kv_data_type,
            ):  # fmt: skip
                assert (head_dim_ckv, head_dim_kpe) == (512, 64)
                self.how = (qo_indptr, kv_indptr, kv_indices, kv_len_arr), causal, sm_scale

            def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out):
                table, causal, scale = self.how
                pools = torch.cat([ckv_cache, kpe_cache], -1).unsqueeze(2), ckv_cache.unsqueeze(2)
                q = torch.cat([q_nope, q_pe], -1)
                return out.copy_(fake.attend(q, pools, "NHD", *table, causal=causal, sm_scale=scale))

        def xqa(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, out,
            kv_layout,
        ):  # fmt: skip
            assert seq_lens.dtype == torch.uint32
            assert not workspace_buffer.any()
            kv_lens = seq_lens.view(torch.int32)
            assert max_seq_len == kv_lens.max()
            width = block_tables.shape[1]
            table = torch.arange(len(kv_lens) + 1).int() * width
            rows = torch.arange(len(kv_lens) + 1).int()
            return out.copy_(
                fake.attend(
                    query, kv_cache, kv_layout, rows, table, block_tables.flatten(), kv_lens, causal=False,
                    sm_scale=bmm1_scale,
                )
            )  # fmt: skip

        top = types.ModuleType("flashinfer")
        top.BatchPrefillWithPagedKVCacheWrapper = Prefill
        top.BatchDecodeWithPagedKVCacheWrapper = Decode
        top.BatchPODWithPagedKVCacheWrapper = Pod
        top.BatchAttention = BatchAttention
        decode, mla = types.ModuleType("flashinfer.decode"), types.ModuleType("flashinfer.mla")
        decode.xqa_batch_decode_with_kv_cache = xqa
        mla.BatchMLAPagedAttentionWrapper = Mla
        return {"flashinfer": top, "flashinfer.decode": decode, "flashinfer.mla": mla}


@pytest.fixture
def flashinfer(monkeypatch):
    fake = FakeFlashInfer()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_peers, "find_spec", lambda name: True)
    monkeypatch.setattr(flashinfer_peers, "WORKSPACE_BYTES", 64)
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: pytest.MonkeyPatch.context())
    return fake


def outcomes(problem):
    """What comes of each peer: whether it is right, or why it cannot do it."""
    truth, found = find_truth(problem), {}
    for peer in flashinfer_peers.find_flashinfer():
        name = peer.name.split(" ", 2)[2]
        try:
            prepared = peer.prepare(problem)
        except UnsupportedFeature as error:
            found[name] = error.feature
        else:
            found[name] = truth.check(prepared.collect(prepared.run())).passed
    return found


ALWAYS = {"prefill FA2": True, "prefill FA3": True, "BatchAttention": True, "MLA FA2": "latent", "MLA FA3": "latent"}
MIXED = ("decode then FA3", "decode beside FA3", "batch POD")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_peers_get_what_a_decode_is(flashinfer, layout):
    unable = dict.fromkeys(MIXED, "batch")
    found = outcomes(problem_of("1@40 + 2*1@17", layout=layout))
    assert found == ALWAYS | unable | {"decode": True, "XQA": True}


@pytest.mark.parametrize("batch", ["1@40 + 7@23 + 1@3 + 5@5", "6@30 + 2*1@16"])
def test_peers_get_what_a_mixed_batch_is(flashinfer, batch):
    found = outcomes(problem_of(batch))
    assert found == ALWAYS | dict.fromkeys(MIXED, True) | {"decode": "batch", "XQA": "batch"}
    assert flashinfer.calls.count("prefill fa3") == 3  # alone, after decode, beside decode
    assert flashinfer.calls.count("decode") == 2


def test_peers_get_what_latents_are(flashinfer):
    found = outcomes(problem_of("2*1@17 + 3@20", LATENT))
    plain = dict.fromkeys(["prefill FA2", "prefill FA3", "decode", "XQA", "BatchAttention", *MIXED], "latent")
    assert found == plain | {"MLA FA2": True, "MLA FA3": True}


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"batch": "1@40", "window_left": 3}, "window_left"),
        ({"batch": "1@40", "dtype": torch.float32}, "dtype"),
        ({"batch": "1@40 + 0@4"}, "batch"),
    ],
)
def test_peers_refuse_what_they_are_not_measured_with(flashinfer, options, feature):
    found = outcomes(problem_of(**options))
    assert set(found.values()) <= {feature, "latent", "batch"}
    assert found["BatchAttention"] == feature


def test_xqa_refuses_pages_that_it_has_no_kernel_for(flashinfer):
    assert outcomes(problem_of("1@40", page_size=8))["XQA"] == "page_size"


def test_flashinfer_that_is_not_installed_is_absent(monkeypatch):
    monkeypatch.setattr(flashinfer_peers, "find_spec", lambda name: None)
    (absent,) = flashinfer_peers.find_flashinfer()
    assert (absent.name, "pip install" in absent.reason) == ("FlashInfer", True)


# Sessions, and processes that fail.


class Scripted:
    """Instruments by which every call takes a millisecond."""

    notes = ("scripted",)

    def __init__(self, device):
        self.device, self.hardware = device, {"gpu": "a script"}

    def clocks(self, subjects, before=lambda name: None):
        return {name: Clock(partial(self._time, s.run), s.run, "a script") for name, s in subjects.items()}

    def _time(self, run):
        run()
        return 1e-3

    def ceilings(self, dtype):
        kinds = ("read", "matrix")
        return [Ceiling(kind, kind, 10**6, lambda: 1e-3) for kind in kinds]

    def probe(self, problem):
        return None

    def heat(self, clock):
        return Heat(900.0, 1100.0, 1400.0, 690.0)

    def settle(self):
        pass


def right(problem):
    return Prepared(lambda: problem.solve()[0].to(problem.q.dtype), "densely")


def fatal(problem):
    os.kill(os.getpid(), signal.SIGKILL)


def raising(problem):
    raise RuntimeError("a library's\nown error")


def hanging(problem):
    time.sleep(60)


def scripted_peers(library):
    ways = {"right": right, "fatal": fatal, "raising": raising, "hanging": hanging}
    return [Peer(name, way) for name, way in ways.items()] + [Absent("absent", "elsewhere")]


SCRIPTED = dataclasses.replace(devices.kind_of(CPU), apart=True, instruments=Scripted, peers=scripted_peers)


def serve_scripted(say, order):
    """What the process does that measures: the kinds of devices are replaced there too."""
    devices._KINDS["cpu"] = SCRIPTED
    session._measure_here(order, say)


@pytest.mark.slow  # three processes that import PyTorch
def test_peers_that_end_the_process_raise_or_hang_do_not_lose_the_rest(monkeypatch):
    monkeypatch.setitem(devices._KINDS, "cpu", SCRIPTED)
    monkeypatch.setattr(session, "_serve", serve_scripted)
    monkeypatch.setattr(session, "PATIENCE", 4.0)
    setting = Setting(dtype=torch.float32, kv_layout="NHD", page_size=4, backend="reference", repeat=1, heat=True)
    events = []
    session.run_session(session.Order(CPU, ("2*1@9",), setting, peers=True), events.append)
    (found,) = [event for event in events if isinstance(event, Measurement)]
    notes = {peer.name: peer.note for peer in found.peers}
    assert notes["right"] == "densely"
    assert notes["raising"] == "failed, so not timed: RuntimeError: a library's own error"
    assert notes["fatal"].startswith("failed in preparing: SennitError: the process ended with exit code -9")
    assert notes["hanging"].startswith("failed in preparing: SennitError: the process said nothing for 4 s")
    assert notes["absent"] == "elsewhere"
    assert [peer.name for peer in found.peers if peer.times] == ["right"]
    assert (found.timed, found.heat.hot, found.peers[0].heat.clock) == ("a script", 1100.0, 1400.0)
    assert events[-1] == session.Machine({"gpu": "a script"}, ("scripted",))


def measured_by(outcomes):
    """``run_alone`` that plays a script: for each process what it says, and how it ends."""

    def run(function, order, *, on_stage, patience):
        said, end = outcomes.pop(0)(order)
        for event in said:
            on_stage(event)
        if end is not None:
            raise end

    return run


def test_a_workload_that_ends_the_process_fails_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(session, "run_alone", measured_by([
        lambda order: ([Stage("2*1@9", "checking", "sennit")], DeviceLost("cuda:0 failed")),
        lambda order: ([session.Failure(name, "no GPU") for name in order.workloads], None),
    ]))  # fmt: skip
    monkeypatch.setitem(devices._KINDS, "cpu", SCRIPTED)
    events = []
    session.run_session(session.Order(CPU, ("2*1@9", "3@3"), Setting()), events.append)
    failures = [event for event in events if isinstance(event, session.Failure)]
    assert [failure.workload for failure in failures] == ["2*1@9", "3@3"]
    assert failures[0].reason == "failed in checking: DeviceLost: cuda:0 failed"


def test_a_peer_that_fails_again_although_it_was_left_out_costs_the_workload(monkeypatch):
    stage = Stage("2*1@9", "timing", "right")
    monkeypatch.setattr(session, "run_alone", measured_by([lambda order: ([stage], RuntimeError("lost"))] * 2))
    monkeypatch.setitem(devices._KINDS, "cpu", SCRIPTED)
    events = []
    session.run_session(session.Order(CPU, ("2*1@9",), Setting(), peers=True), events.append)
    assert events == [stage, stage, session.Failure("2*1@9", "failed in timing: RuntimeError: lost")]


def test_a_device_that_cannot_be_measured_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr(session, "run_alone", measured_by([lambda order: ([], SennitError("no device"))]))
    monkeypatch.setitem(devices._KINDS, "cpu", SCRIPTED)
    with pytest.raises(SennitError, match="no device"):
        session.run_session(session.Order(CPU, ("2*1@9",), Setting()), lambda event: None)


def test_a_process_is_ended_when_nothing_happens_for_too_long():
    with subprocess.Popen(["sleep", "60"]) as process:
        with fresh_process._ended_after(60, process) as silent:
            pass
        assert not silent.is_set()
        with fresh_process._ended_after(0.05, process) as silent:
            assert process.wait() == -signal.SIGKILL
        assert silent.is_set()


# Steps.


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(stepping, "SPEC", stepping.SPEC.replace(num_qo_heads=4, num_kv_heads=2, head_dim=16))


@pytest.mark.parametrize("batch", ["3*1@40 + 5@5", "1@1 + 20@33", "2*1@17"])
def test_steps_are_timed_part_by_part_and_leave_the_cache_as_it_was(small_steps, monkeypatch, batch):
    lengths = []
    trim = stepping.KVCache.trim
    monkeypatch.setattr(
        stepping.KVCache, "trim", lambda cache, seq, length: (lengths.append(length), trim(cache, seq, length=length))
    )
    found = stepping.measure(batch, device=CPU, backend="reference", repeat=3, warmup=1)
    assert (found.batch, found.backend, found.check.passed) == (batch, "reference", True)
    counts = [len(times.samples) for times in (found.step, found.attend, found.run, found.end)]
    assert counts == [3, 3 * stepping.NUM_LAYERS, 3, 3]
    q_lens, kv_lens = stepping.parse_lengths(batch)
    assert lengths == (np.array(kv_lens) - q_lens).tolist() * 5


def test_a_wrong_step_is_not_timed(small_steps, monkeypatch):
    attend = stepping.BatchAttention.run
    monkeypatch.setattr(stepping.BatchAttention, "run", lambda self, *a, **k: attend(self, *a, **k).mul_(1.1))
    with pytest.raises(SennitError, match="nothing was timed"):
        stepping.measure("3*1@40", device=CPU, backend="reference")


@pytest.mark.parametrize(("batch", "repeat"), [("0@5", 1), ("5@3", 1), ("", 1), ("1@5", 0)])
def test_steps_that_store_nothing_or_too_much_are_refused(batch, repeat):
    with pytest.raises(InvalidInput):
        stepping.measure(batch, device=CPU, repeat=repeat)
