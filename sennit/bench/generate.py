"""Speed and memory of ``sennit.hf.generate`` beside transformers', each measured in a process of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sennit.attention import BatchAttention
from sennit.bench.fresh_process import Say, forget_peak, peak_bytes, run_alone
from sennit.bench.generate_check import Agreement, check_tokens
from sennit.bench.generate_engines import Engine, load_model, peers_on
from sennit.bench.generate_profile import TimeParts, timed_parts
from sennit.bench.generate_results import Measurement, Options, Report, Speed, WorkloadReport
from sennit.bench.generate_shapes import is_random, random_model
from sennit.bench.generate_workloads import Workload, make_random_workload, make_workloads
from sennit.bench.host import Observer
from sennit.errors import InvalidInput, SennitError
from sennit.hf.loading import load
from sennit.hf.models import context_length, layer_specs, vocab_size

__all__ = ["measure", "num_stages"]

T = TypeVar("T")

WARMUP = ((1, 2, 3), (4, 5, 6, 7, 8))  # builds, loads and allocates what the first step would
CHECKED_PROMPTS, CHECKED_LENGTH, CHECKED_TOKENS = 4, 256, 32  # of the short check, for each workload


@dataclass(frozen=True)
class _Job:
    """What a measuring process is given."""

    engine: Engine
    model: str
    dtype: torch.dtype | None
    device: str
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int

    @classmethod
    def of(cls, options: Options, engine: Engine, workload: Workload) -> _Job:
        return cls(engine, options.model, options.dtype, options.device, workload.prompts, options.max_new_tokens)


def num_stages(options: Options) -> int:
    """How often :func:`measure` reports that something has ended."""
    workloads = 1 if is_random(options.model) else 2
    return 1 + workloads * (len(_engines(options)) * options.repeat + (options.device == "cpu"))


def _engines(options: Options) -> tuple[Engine, ...]:
    return (options.engine, *(peers_on(options.device) if options.peers else ()))


@dataclass(frozen=True)
class _Processes:
    """Starts the parts of a run one after the other, and tells the caller of them."""

    on_stage: Say
    on_end: Callable[[], None]

    def run(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        try:
            return run_alone(function, *arguments, on_stage=lambda stage: self.on_stage(f"{what}: {stage}"))
        finally:
            self.on_end()


def measure(options: Options, *, on_stage: Say, on_end: Callable[[], None]) -> Report:
    """Check Sennit's tokens, then measure it and its peers on all workloads.

    Args:
        options: what is measured.
        on_stage: takes what is being done.
        on_end: called when a part has ended, :func:`num_stages` times in all.

    Raises:
        SennitError: the tokens are not transformers', or a generation gave another number of them; nothing is
            reported then.
        InvalidInput: prompts and new tokens are longer than the model's context, or than the text there is.
    """
    workloads, backend = _prepare(options)
    processes = _Processes(on_stage, on_end)
    checked = _checked_prompts(options, workloads)
    agreement = processes.run("check in float32", _check, options, *checked)
    reports = []
    for workload in workloads:
        speeds = _measure_engines(options, workload, processes)
        parts = None
        if options.device == "cpu":
            job = _Job.of(options, options.engine, workload)
            parts = processes.run(f"{workload.name}, {options.engine.name} with hooks", _profile, job)
        reports.append(WorkloadReport(workload, speeds, parts))
    return Report(options, backend, torch.get_num_threads(), agreement, tuple(reports))


def _measure_engines(options: Options, workload: Workload, processes: _Processes) -> tuple[Speed, ...]:
    """Every engine as often as asked, in turns: what the machine does meanwhile then meets all of them alike."""
    engines = _engines(options)
    measurements: dict[Engine, list[Measurement]] = {engine: [] for engine in engines}
    failures: dict[Engine, str] = {}
    for engine in engines * options.repeat:
        job = _Job.of(options, engine, workload)
        try:
            measurements[engine].append(processes.run(f"{workload.name}, {engine.name}", _measure, job))
        except Exception as error:  # a peer that cannot run here says so in its row
            if engine is options.engine:
                raise
            failures[engine] = f"{type(error).__name__}: {error}"
    return tuple(
        Speed(
            engine.name,
            engine.settings,
            prompts=len(workload.prompts),
            prompt_tokens=sum(workload.lengths),
            new_tokens=options.max_new_tokens * len(workload.prompts),
            measurements=() if engine in failures else tuple(measurements[engine]),
            failure=failures.get(engine, ""),
        )
        for engine in engines
    )


def _prepare(options: Options) -> tuple[tuple[Workload, ...], str]:
    """The workloads, and the backend that Sennit's attention will have."""
    workloads: tuple[Workload, ...]
    if is_random(options.model):
        model = random_model(options.model, options.dtype or torch.bfloat16, "meta")
        workloads = (make_random_workload(vocab_size(model), count=options.prompts, mean=options.prompt_tokens),)
    else:
        model, tokenizer = load(options.model, dtype=options.dtype, device="cpu")
        workloads = make_workloads(tokenizer, count=options.prompts, mean=options.prompt_tokens)
    spec, asked = layer_specs(model)[0], options.engine.backend
    attention = BatchAttention(spec, page_size=16, device=options.device, backend=asked)
    backend = next(name for name, accepted, _ in attention.backends if accepted)
    longest = max(max(workload.lengths) for workload in workloads) + options.max_new_tokens
    if longest > (context := context_length(model.config)):
        raise InvalidInput(
            "prompt_tokens",
            expected=f"prompts and new tokens within the model's context of {context}",
            got=f"up to {longest}",
        )
    return workloads, backend


def _checked_prompts(options: Options, workloads: tuple[Workload, ...]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Prompts of the check, and its new tokens."""
    if options.thorough:
        return tuple(prompt for workload in workloads for prompt in workload.prompts), options.max_new_tokens
    few = (prompt[:CHECKED_LENGTH] for workload in workloads for prompt in workload.prompts[:CHECKED_PROMPTS])
    return tuple(few), min(CHECKED_TOKENS, options.max_new_tokens)


def _check(say: Say, options: Options, prompts: tuple[tuple[int, ...], ...], new: int) -> Agreement:
    say("loading")
    loaded = load_model(options.model, torch.float32, options.device)
    say(f"{len(prompts)} prompts, {new} new tokens each")
    return check_tokens(options.engine, loaded, prompts, new)


def _measure(say: Say, job: _Job) -> Measurement:
    say("loading")
    model = load_model(job.model, job.dtype, job.device)
    job.engine(model, WARMUP, 2)
    if job.device != "cpu":  # where libraries choose kernels by size
        job.engine(model, job.prompts[:1], 2)
    on_gpu, observer = job.device != "cpu", Observer()
    alone = forget_peak()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(job.device)
    say("prompts")
    prompt_seconds = _timed(model, job, 1)
    say("prompts and new tokens")
    seconds = _timed(model, job, job.max_new_tokens)
    peak = torch.cuda.max_memory_allocated(job.device) if on_gpu else peak_bytes()
    return Measurement(prompt_seconds, seconds, peak, not (alone or on_gpu), observer.activity())


def _profile(say: Say, job: _Job) -> TimeParts:
    say("loading")
    model = load_model(job.model, job.dtype, job.device)
    job.engine(model, WARMUP, 2)
    say("prompts and new tokens")
    with timed_parts(model) as parts:
        _timed(model, job, job.max_new_tokens)
    return parts


def _timed(model: Any, job: _Job, new: int) -> float:
    """Seconds of a generation that gave as many tokens as it should."""
    start = time.perf_counter()
    made = job.engine(model, job.prompts, new)
    seconds = time.perf_counter() - start
    if {len(tokens) for tokens in made} != {new} or len(made) != len(job.prompts):
        found = ", ".join(f"{count} x {length}" for length, count in sorted(Counter(map(len, made)).items()))
        raise SennitError(f"{job.engine.name} gave {found or 'no'} tokens instead of {len(job.prompts)} x {new}")
    return seconds
