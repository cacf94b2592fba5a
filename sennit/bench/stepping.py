"""How long the host takes for a step over a cache: to open it, plan included, to call each layer, and to end it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from sennit.attention import BatchAttention
from sennit.bench.correctness import Check, find_truth
from sennit.bench.tensors import check_memory
from sennit.bench.timing import Times, no_garbage_collection
from sennit.check.problems import Problem
from sennit.errors import InvalidInput, SennitError
from sennit.kvcache import KVCache
from sennit.plan.batch import Batch
from sennit.plan.grammar import parse_lengths
from sennit.spec import AttentionSpec

__all__ = ["WORKLOADS", "StepTimes", "check", "measure"]

PAGE_SIZE = 16
NUM_LAYERS = 4
SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
WORKLOADS = ("128*1@1024", "512@2048 + 127*1@1024")


@dataclass(frozen=True)
class StepTimes:
    """Host time of the parts of one batch's steps; on a device of its own, work goes on when a call has returned.

    Attributes:
        batch: the batch, as it was written.
        backend: that computed it.
        check: of the first step's output.
        step: entering ``cache.step``: pages, plan and whatever is sent to the device.
        attend: one layer's ``step.attend``: append and attention.
        run: ``BatchAttention.run`` alone, into an output that is there.
        end: leaving the step's block: new lengths become final.
    """

    batch: str
    backend: str
    check: Check
    step: Times
    attend: Times
    run: Times
    end: Times


def check(text: str, device: torch.device) -> tuple[list[int], list[int]]:
    """Whether a batch's steps can be measured: its ``(q_lens, kv_lens)`` if so.

    Raises:
        InvalidInput: the text is not a batch of new tokens that are stored, or the host has no memory for them.
    """
    q_lens, kv_lens = parse_lengths(text)
    if not q_lens:
        raise InvalidInput("batch", expected="at least one request", got=repr(text), hint="write 128*1@1024")
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        if not 0 < q_len <= kv_len:
            raise InvalidInput(
                "batch", expected="requests of at least one new token, and no more than are visible",
                got=f"{q_len}@{kv_len} in {text!r}",
            )  # fmt: skip
    stored = _stored(q_lens, kv_lens)
    cached = NUM_LAYERS * _cache_tokens(q_lens, stored)
    check_memory(SPEC, max(sum(q_lens), *stored), cached + sum(kv_lens), device)  # outputs are compared with all keys
    return q_lens, kv_lens


def _stored(q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
    """Tokens of each sequence before the step."""
    return [kv_len - q_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]


def _cache_tokens(q_lens: Sequence[int], stored: Sequence[int]) -> int:
    """Tokens of a cache in which sequences share the pages of what is stored."""
    own = sum(-(-q_len // PAGE_SIZE) + 1 for q_len in q_lens)
    return (own + max(stored) // PAGE_SIZE + 1) * PAGE_SIZE


def measure(text: str, *, device: torch.device, backend: str = "auto", repeat: int = 100, warmup: int = 5) -> StepTimes:
    """Check one step of a cache with four layers of 32/8 heads, and time it again and again.

    Sequences share the pages of their first tokens, so that a small cache holds them all; after every step they are
    trimmed to what they were before. The device has nothing to do when a call is made.

    Args:
        text: a batch, such as ``"128*1@1024"``.
        device: where the cache is.
        backend: see :class:`sennit.KVCache`.
        repeat: steps to time.
        warmup: steps to make before.

    Raises:
        InvalidInput: ``repeat`` is not positive, or the batch cannot be measured, see :func:`check`.
        SennitError: a step's output is wrong; nothing is timed then.
    """
    if repeat < 1:
        raise InvalidInput("repeat", expected="a positive number of steps", got=repeat)
    q_lens, kv_lens = check(text, device)
    subject = _Subject.of(q_lens, kv_lens, device, backend)
    checked = subject.checked()
    with no_garbage_collection():
        for _ in range(warmup):
            subject.take_step(_Samples())
        samples = _Samples()
        for _ in range(repeat):
            subject.take_step(samples)
    return StepTimes(
        batch=text,
        backend=subject.backend,
        check=checked,
        step=Times.of(samples.step),
        attend=Times.of(samples.attend),
        run=Times.of(samples.run),
        end=Times.of(samples.end),
    )


@dataclass
class _Samples:
    """Microseconds."""

    step: list[float] = field(default_factory=list)
    attend: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Subject:
    """A cache with sequences, and the tensors of their next step."""

    cache: KVCache
    attention: BatchAttention
    items: list[tuple[int, int]]  # (sequence, new tokens)
    stored: list[int]  # tokens of each sequence before the step
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    backend: str = ""

    @classmethod
    def of(cls, q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device, backend: str) -> _Subject:
        """Sequences with everything stored but the new tokens."""
        stored = _stored(q_lens, kv_lens)
        num_tokens = _cache_tokens(q_lens, stored)
        try:
            cache = KVCache(
                [SPEC] * NUM_LAYERS, num_tokens=num_tokens, page_size=PAGE_SIZE, device=device, backend=backend
            )
        except InvalidInput as error:
            if error.argument != "num_tokens":
                raise
            raise InvalidInput("batch", expected=error.expected, got=error.got, hint=error.hint) from error
        longest = cache.add()
        _fill(cache, longest, max(stored))
        sequences = [cache.fork(longest, length=length) for length in stored]
        layout = cache.kv_layout
        return cls(
            cache,
            BatchAttention(SPEC, page_size=PAGE_SIZE, kv_layout=layout, device=device, backend=backend),
            list(zip(sequences, q_lens, strict=True)),
            stored,
            *_rows(sum(q_lens), device),
            out=torch.zeros(sum(q_lens), SPEC.num_qo_heads, SPEC.head_dim_vo, dtype=SPEC.dtype, device=device),
        )

    def take_step(self, samples: _Samples) -> tuple[Batch, torch.Tensor]:
        """One step, timed; its batch, and the output of the last layer. Sequences are left with the new tokens."""
        self._trim()
        q, k, v, scale = self.q, self.k, self.v, SPEC.head_dim_qk**-0.5
        device = self.cache.device
        start = _now(device)
        with self.cache.step(self.items) as step:
            samples.step.append(_since(start))
            plan = self.attention.plan(step.batch)
            for layer in range(NUM_LAYERS):
                start = _now(device)
                last = step.attend(layer, q, k, v, sm_scale=scale)
                samples.attend.append(_since(start))
            pools = self.cache.pools(0)
            start = _now(device)
            self.attention.run(plan, q, pools, sm_scale=scale, out=self.out)
            samples.run.append(_since(start))
            batch, self.backend = step.batch, step.plan(0).backend
            start = _now(device)
        samples.end.append(_since(start))
        return batch, last

    def checked(self) -> Check:
        """Compare a step's outputs with what the cache has stored then.

        Raises:
            SennitError: one is wrong.
        """
        batch, last = self.take_step(_Samples())
        for layer, out in ((NUM_LAYERS - 1, last), (0, self.out)):
            check = find_truth(self._problem(batch, layer)).check(out)
            if not check.passed:
                raise SennitError(f"{self.backend} computes {batch} wrongly, {check}: nothing was timed")
        return check

    def _problem(self, batch: Batch, layer: int) -> Problem:
        found = [self.cache.read(sequence, layer) for sequence, _ in self.items]
        return Problem(
            spec=SPEC,
            page_size=PAGE_SIZE,
            kv_layout=self.cache.kv_layout,
            batch=batch,
            causal=[True] * len(found),
            q=self.q,
            kv=self.cache.pools(layer),
            keys=[k for k, _ in found],
            values=[cast("torch.Tensor", v) for _, v in found],
            sm_scale=SPEC.head_dim_qk**-0.5,
        )

    def _trim(self) -> None:
        for (sequence, _), length in zip(self.items, self.stored, strict=True):
            self.cache.trim(sequence, length=length)


def _fill(cache: KVCache, sequence: int, tokens: int) -> None:
    """Store so many random tokens in every layer."""
    if not tokens:
        return
    with cache.step([(sequence, tokens)]) as step:
        for layer in range(NUM_LAYERS):
            step.attend(layer, *_rows(tokens, cache.device), sm_scale=SPEC.head_dim_qk**-0.5)


def _rows(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, keys and values."""

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(count, heads, dim, dtype=SPEC.dtype, device=device)

    return (
        normal(SPEC.num_qo_heads, SPEC.head_dim_qk),
        normal(SPEC.num_kv_heads, SPEC.head_dim_qk),
        normal(SPEC.num_kv_heads, SPEC.head_dim_vo),
    )


def _now(device: torch.device) -> int:
    """The time when the device has nothing left to do."""
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter_ns()


def _since(start: int) -> float:
    """Microseconds."""
    return (time.perf_counter_ns() - start) / 1e3
