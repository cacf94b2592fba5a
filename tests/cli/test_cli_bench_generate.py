"""``sennit bench generate``: nothing is printed unless the tokens are right; figures are those of what was timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from sennit.bench import generate, generate_profile
from sennit.bench.fresh_process import forget_peak, peak_bytes, run_alone
from sennit.bench.generate_check import Agreement, check_tokens, compare
from sennit.bench.generate_engines import Continuous, Padded, Sennit, load_model, peers_on
from sennit.bench.generate_profile import Part, TimeParts, timed_parts
from sennit.bench.generate_results import Measurement, Options, Speed, WorkloadReport
from sennit.bench.generate_shapes import random_model
from sennit.bench.generate_workloads import Workload, make_random_workload, make_workloads
from sennit.bench.host import Activity, Observer
from sennit.errors import InvalidInput, RequestFailed, SennitError

SHORT = ("--prompts", "3", "--prompt-tokens", "20", "--max-new-tokens", "4")


@pytest.fixture(scope="module")
def model(model_folder):
    return load_model(str(model_folder), torch.float32)


@pytest.fixture
def in_process(monkeypatch):
    """Measure in this process, which is a lot faster to start."""
    monkeypatch.setattr(generate, "run_alone", lambda function, *args, on_stage: function(on_stage, *args))


def letters(text, **options):
    return {"input_ids": list(range(len(text)))}


def test_workloads_are_disjoint_pieces_of_the_text_with_about_as_many_tokens():
    even, uneven = make_workloads(letters, count=16, mean=1000)
    for workload, shortest, longest in ((even, 950, 1050), (uneven, 7, 2000)):
        assert (min(workload.lengths), max(workload.lengths)) == (shortest, longest)
        assert len({token for prompt in workload.prompts for token in prompt}) == sum(workload.lengths)
        assert workload.lengths != sorted(workload.lengths)
    assert abs(sum(even.lengths) / sum(uneven.lengths) - 1) < 0.01
    assert make_workloads(letters, count=16, mean=1000) == (even, uneven)


@pytest.mark.parametrize(
    ("count", "mean", "argument"), [(16, 10**6, "prompts, prompt_tokens"), (1, 3, "prompt_tokens")]
)
def test_lengths_that_there_is_no_text_for_are_refused(count, mean, argument):
    with pytest.raises(InvalidInput) as caught:
        make_workloads(letters, count=count, mean=mean)
    assert caught.value.argument == argument


def test_random_prompts_have_the_lengths_that_were_asked_for():
    workload = make_random_workload(512, count=64, mean=2500)
    assert (min(workload.lengths), max(workload.lengths)) == (1000, 4000)
    assert max(token for prompt in workload.prompts for token in prompt) == 511
    assert make_random_workload(512, count=64, mean=2500) == workload


def test_a_model_of_a_shape_is_always_the_same_and_others_are_refused_by_name():
    one, other = (random_model("random:llama-tiny", torch.float32, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    large = random_model("random:llama-3-8b", torch.bfloat16, "meta")
    assert 8.0e9 < sum(p.numel() for p in large.parameters()) < 8.1e9
    with pytest.raises(InvalidInput, match="random:deepseek-v3-small"):
        random_model("random:gpt-5", torch.bfloat16, "cpu")


def test_a_gpu_has_transformers_own_limits():
    assert "its default limits" in peers_on("cuda:0")[1].settings
    assert "max_requests_per_batch=4" in peers_on("cpu")[1].settings


def test_a_model_of_a_shape_needs_no_tokenizer(sennit, in_process):
    result = sennit("bench", "generate", "--model", "random:llama-tiny", *SHORT, "--no-peers", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["model"], found["device"]) == ("random:llama-tiny", "cpu")
    assert [sorted(each["prompt_lengths"]) for each in found["workloads"]] == [[8, 20, 32]]


LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.9995, 0.0], [0.0, 0.0, 5.0]])
REFERENCE = ([1, 0, 2], LOGITS)


@pytest.mark.parametrize(("tokens", "agreed"), [([1, 0, 2], 3), ([1, 1, 0], 1)])
def test_tokens_agree_up_to_a_tie_that_was_decided_otherwise(tokens, agreed):
    assert compare(tokens, REFERENCE, named="prompt 7") == agreed


@pytest.mark.parametrize("tokens", [[2, 0, 2], [1, 2, 2], [1, 0, 1], [1, 0]])
def test_another_token_than_a_tie_is_refused(tokens):
    with pytest.raises(SennitError, match="prompt 7"):
        compare(tokens, REFERENCE, named="prompt 7")


def wrong_at_the_end(engine):
    def wrong(*arguments):
        return [[*tokens[:-1], (tokens[-1] + 1) % 256] for tokens in engine(*arguments)]

    return wrong


PROMPTS = [[40, 41, 42, 43, 44], [70] * 30, [1]]


def test_the_check_passes_on_sennit_and_fails_on_one_wrong_token(model):
    engine = Sennit("reference")
    assert check_tokens(engine, model, PROMPTS, 5) == Agreement(prompts=3, tokens=15, ties=0)
    with pytest.raises(SennitError, match="new token 4"):
        check_tokens(wrong_at_the_end(engine), model, PROMPTS, 5)


@pytest.mark.parametrize("engine", [Sennit("reference"), Padded(), Continuous()], ids=lambda engine: engine.name)
def test_every_engine_gives_the_greedy_tokens_that_were_asked_for(engine, model):
    assert check_tokens(engine, model, PROMPTS, 5).prompts == 3


def test_time_is_charged_to_the_innermost_part(monkeypatch):
    clock = iter(range(0, 10**6, 1))  # every look at it is a second later

    class ToyAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x)

    toy = torch.nn.Sequential(ToyAttention(), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    monkeypatch.setattr(generate_profile.time, "perf_counter", lambda: next(clock))
    with timed_parts(toy) as parts:
        toy(torch.zeros(1, 2))
    # Intervals between looks: host, model, attention, linear, attention, model, linear, model, host.
    assert parts.seconds == {Part.LINEAR: 2, Part.ATTENTION: 2, Part.OTHER: 3, Part.HOST: 2}
    assert parts.outside_linear == pytest.approx(7 / 9)
    toy(torch.zeros(1, 2))
    assert sum(parts.seconds.values()) == 9


def speed(name, *seconds, failure=""):
    quiet = Activity(1.0, 0.0, 0.0, 0.0, 0.0)
    measurements = tuple(Measurement(1.0, each, round(each) * 10**9, False, quiet) for each in seconds)
    return Speed(name, "", prompts=2, prompt_tokens=300, new_tokens=40, measurements=measurements, failure=failure)


def test_rates_are_of_medians_and_the_peak_is_the_largest():
    found = speed("sennit", 2.0, 9.0, 5.0)
    assert (found.seconds, found.peak_bytes) == (5.0, 9 * 10**9)
    assert (found.new_tokens_per_second, found.prompt_rate, found.decode_rate) == (8.0, 300.0, 38 / 4)
    assert speed("sennit", 1.0).decode_rate is None


def test_the_speedup_is_over_the_fastest_peer_that_ran():
    parts = TimeParts(dict.fromkeys(Part, 1.0))
    peers = speed("slow", 8.0), speed("absent", failure="no"), speed("fast", 6.0)
    report = WorkloadReport(Workload("even", ((1,),)), (speed("sennit", 2.0), *peers), parts)
    assert report.speedup == 3.0
    assert WorkloadReport(Workload("even", ((1,),)), (speed("sennit", 2.0), peers[1]), parts).speedup is None


def test_the_report_has_every_engine_and_its_figures(sennit, in_process, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "peers_on", lambda device: (Padded(),))
    out = tmp_path / "found.json"
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--json", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads(out.read_text())
    assert found["check"]["prompts"] == 6
    assert [workload["name"] for workload in found["workloads"]] == ["even", "uneven"]
    for workload in found["workloads"]:
        engines = {engine["name"]: engine for engine in workload["engines"]}
        assert list(engines) == ["sennit", "generate"]
        for engine in engines.values():
            assert engine["new_tokens_per_second"] * engine["seconds"] == pytest.approx(12)
            assert engine["prompt_tokens_per_second"] * engine["prompt_seconds"] == pytest.approx(
                sum(workload["prompt_lengths"])
            )
            assert engine["peak_bytes"] > 10**8
        assert workload["speedup"] == pytest.approx(engines["generate"]["seconds"] / engines["sennit"]["seconds"])
        assert 0 < workload["profile"]["share_outside_linear_layers"] < 1


def test_engines_are_measured_in_turns(sennit, in_process, model_folder, monkeypatch):
    measured = []
    real = generate._measure

    def measure(say, job):
        measured.append((job.engine.name, min(map(len, job.prompts))))
        return real(say, job)

    monkeypatch.setattr(generate, "_measure", measure)
    monkeypatch.setattr(generate, "peers_on", lambda device: (Padded(),))
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--repeat", "2", "--json")
    turns = [("sennit", 19), ("generate", 19)] * 2 + [("sennit", 7), ("generate", 7)] * 2
    assert measured == turns
    first = json.loads(result.stdout)["workloads"][0]["engines"][0]
    assert [len(first["measurements"]), first["seconds"]] == [
        2, np.median([each["seconds"] for each in first["measurements"]]),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_a_peer_that_cannot_run_says_why(sennit, in_process, model_folder, monkeypatch, width):
    def broken(self, *arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Continuous, "__call__", broken)
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, width=width)
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert text.count("generate_batch: RuntimeError: no such kernel") == 2
    assert [line.split()[1] for line in text.splitlines() if line.startswith("generate_batch ")] == ["failed"] * 2
    assert "24 greedy tokens of 6 prompts" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("foreign", [0.0, 0.7])
def test_a_noisy_machine_is_told_of(sennit, in_process, model_folder, monkeypatch, foreign):
    monkeypatch.setattr(Observer, "activity", lambda self: Activity(1.0, 0.0, 0.0, 0.0, foreign))
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--no-peers")
    assert ("noisy machine: other processes took 0.70 of" in result.stdout) == (foreign > 0)


def test_nothing_is_printed_or_written_when_a_token_is_wrong(sennit, in_process, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Sennit, "__call__", wrong_at_the_end(Sennit.__call__))
    out = tmp_path / "found.json"
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--no-peers", "--out", str(out))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "new token 3" in result.stderr
    assert not out.exists()


def test_an_engine_that_stops_early_is_no_result(sennit, in_process, model_folder, monkeypatch):
    real = Sennit.__call__

    def lazy(self, model, prompts, max_new_tokens):
        made = real(self, model, prompts, max_new_tokens)
        return [tokens[:2] for tokens in made] if model.dtype == torch.bfloat16 else made

    monkeypatch.setattr(Sennit, "__call__", lazy)
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--no-peers")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "gave 3 x 2 tokens instead of 3 x 4" in result.stderr


def test_what_cannot_work_is_refused_before_anything_is_measured(sennit, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "run_alone", None)
    missing = sennit("bench", "generate", "--model", str(model_folder), "--out", str(tmp_path / "no" / "file"))
    too_long = sennit("bench", "generate", "--model", str(model_folder), "--prompt-tokens", "300")
    backend = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--backend", "none")
    assert [found.exit_code for found in (missing, too_long, backend)] == [2, 2, 2]
    assert "--out" in missing.stderr
    assert "context of 512" in too_long.stderr
    assert "backend" in backend.stderr
    with pytest.raises(InvalidInput, match="repeat"):
        Options("model", repeat=0)


def test_a_peak_can_be_forgotten():
    held = np.ones(20_000_000)
    high = peak_bytes()
    assert high >= held.nbytes
    del held
    if not forget_peak():
        pytest.skip("this system keeps the peak of a process")
    low = peak_bytes()
    assert low < high - 100_000_000
    assert np.ones(20_000_000).nbytes < peak_bytes() - low + 60_000_000


def _fail(say, how):
    if how == "typed":
        raise RequestFailed("no numbers", requests=[3])
    if how == "local":

        class Local(Exception):
            pass

        raise Local("cannot be pickled")
    print("noise on standard output")
    os.kill(os.getpid(), signal.SIGKILL)


def _grown(say, size):
    forget_peak()
    before = peak_bytes()
    np.ones(size // 8)
    return before, peak_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("typed", RequestFailed, "request 3: no numbers"),
        ("local", SennitError, "Local: cannot be pickled"),
        ("killed", SennitError, "exit code -9"),
    ],
)
def test_errors_of_a_process_reach_the_caller(how, error, text):
    with pytest.raises(error, match=text):
        run_alone(_fail, how, on_stage=print)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _sleep(say):
    say(str(os.getpid()))
    time.sleep(100)


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it():
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_cli_bench_generate as tests; "
    code += "tests.run_alone(tests._sleep, on_stage=lambda text: print(text, flush=True))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


@pytest.mark.slow
def test_the_peak_of_a_process_is_its_own():
    without, _ = run_alone(_grown, 8, on_stage=print)  # libraries, as much of them as the system happens to map
    held = np.ones(100_000_000)
    before, after = run_alone(_grown, 200_000_000, on_stage=print)
    assert before < without + held.nbytes / 2
    assert 180_000_000 < after - before < 260_000_000


@pytest.mark.slow
def test_real_processes_measure_and_report(sennit, model_folder):
    result = sennit("bench", "generate", "--model", str(model_folder), *SHORT, "--no-peers", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["workloads"]) == 2
