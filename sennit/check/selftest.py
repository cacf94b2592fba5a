"""The battery of ``sennit check``: named cases for one backend and device, each compared with dense float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sennit.attention import BatchAttention
from sennit.check.compare import compare
from sennit.check.functions import random_functions
from sennit.check.operations import run_episode
from sennit.check.outcome import Outcome
from sennit.check.problems import Problem, make_problem
from sennit.check.random_problems import random_problem
from sennit.check.threads import one_thread
from sennit.check.writing import CacheScenario, append_again
from sennit.errors import SennitError, UnsupportedFeature
from sennit.spec import AttentionSpec

__all__ = ["Case", "Outcome", "Target", "cases"]

EPISODE = 200  # random operations of one case
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (33, 7))


@dataclass(frozen=True)
class Target:
    """What is tested: a backend's name, and a device that it can run on."""

    backend: str
    device: torch.device


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        name: ``group/details``; unique, and the same on every machine.
        run: computes it. Raises :class:`~sennit.UnsupportedFeature` where the backend cannot do what it is about.
    """

    name: str
    run: Callable[[], Outcome]

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]


def cases(
    backend: str,
    device: torch.device | str = "cpu",
    *,
    num_random: int = 200,
    num_operations: int = 0,
    seed: int = 0,
) -> Iterator[Case]:
    """Every case for a backend on a device; nothing is computed before a case is run.

    Args:
        backend: its name.
        device: where it runs.
        num_random: random hostile problems after the fixed battery; problem ``i`` depends on ``seed`` and ``i`` alone.
        num_operations: random operations on small caches, in cases of 200, which likewise depend on nothing else.
        seed: of everything random.

    >>> case = next(cases("reference", num_random=0))
    >>> case.name, case.run().passed
    ('dims/64x64-bfloat16', True)
    """
    target = Target(backend, torch.device(device))
    yield from _shapes(target)
    yield from _storage(target)
    yield from _splits(target)
    yield from _masks(target)
    yield from _writing(target)
    for index in range(num_random):
        yield Case(f"random/{index}", partial(_random, target, seed, index))
    for index, done in enumerate(range(0, num_operations, EPISODE)):
        count = min(EPISODE, num_operations - done)
        episode = partial(run_episode, seed, index, count, device=target.device, backend=backend)
        yield Case(f"operations/{index}", episode)


def _shapes(target: Target) -> Iterator[Case]:
    """Head dimensions, dtypes, group sizes, latent attention, lengths of zero."""
    lengths = [33, 1, 0, 5], [70, 41, 9, 3]
    for dim_qk, dim_vo in DIMS:
        for dtype in DTYPES:
            name = f"dims/{dim_qk}x{dim_vo}-{_short(dtype)}"
            yield _case(name, target, _heads(4, dim_qk, dim_vo, dtype=dtype), *lengths)
    for group in range(1, 17):
        yield _case(f"groups/{group}", target, _heads(group, 64), [21, 1, 1], [50, 99, 1])
    for dtype in DTYPES:
        spec = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, dtype=dtype)
        yield _case(f"latent/{_short(dtype)}", target, spec, [9, 1, 3], [40, 65, 2], page_size=8)
    for dtype in DTYPES:  # tiles of every height
        yield _case(f"tiles/{_short(dtype)}", target, _heads(4, 96, dtype=dtype), [300, 65, 21, 1], [700, 65, 130, 900])
    unusual: dict[str, tuple[list[int], list[int]]] = {
        "empty": ([], []),
        "no-rows": ([0, 0], [5, 0]),
        "no-keys": ([3, 1], [0, 0]),
        "more-rows": ([9, 4], [5, 1]),
    }
    for name, (q_lens, kv_lens) in unusual.items():
        yield _case(f"lengths/{name}", target, _heads(2, 64), q_lens, kv_lens)
    yield _case("lengths/not-causal", target, _heads(4, 64), *lengths, causal=False)
    yield _case("lengths/mixed-causal", target, _heads(4, 64), *lengths, causal=[True, False, True, False])
    yield _case("lengths/gaps", target, _heads(4, 64), *lengths, gaps=True)


def _storage(target: Target) -> Iterator[Case]:
    """Page sizes, layouts, pools, forms of page tables; packed keys without pages."""
    lengths = [12, 1, 2], [300, 129, 1]
    for page_size in (1, 2, 3, 7, 16, 64, 256):
        for layout in ("NHD", "HND"):
            for pool in ("pair", "strided", "interleaved"):
                form = "padded" if page_size % 2 else "csr"
                name = f"pages/{page_size}-{layout}-{pool}"
                options: dict[str, Any] = {"page_size": page_size, "kv_layout": layout, "pool": pool, "form": form}
                yield _case(name, target, _heads(2, 64, dtype=torch.bfloat16), *lengths, **options)
    for dtype in DTYPES:
        yield _case(f"packed/{_short(dtype)}", target, _heads(4, 64, dtype=dtype), *lengths, page_size=None)
    latent = AttentionSpec.mla(num_qo_heads=8, kv_lora_rank=64, qk_rope_head_dim=16, dtype=torch.float32)
    yield _case("packed/latent", target, latent, *lengths, page_size=None)


def _splits(target: Target) -> Iterator[Case]:
    for split_size in (32, 64, 100, 1024):
        for dtype in (torch.bfloat16, torch.float32):
            name = f"splits/{split_size}-{_short(dtype)}"
            spec = _heads(4, 64, dtype=dtype)
            yield _case(name, target, spec, [40, 1, 3], [700, 1500, 90], split_size=split_size)


def _masks(target: Target) -> Iterator[Case]:
    """Windows, changes of the logits, trees, packed masks and users' functions, causal and not, packed and in pages."""
    lengths = [33, 1, 0, 5, 2], [150, 141, 9, 3, 80]
    fields: dict[str, dict[str, Any]] = {
        "window": {"window_left": 20},
        "window-both-sides": {"window_left": 9, "window_right": 2},
        "window-and-sinks": {"window_left": 20, "num_sink_tokens": 5},
        "learned-sinks": {"learned_sinks": True},
        "alibi": {"alibi": True},
        "soft-cap": {"logits_soft_cap": 5.0},
        "all": {"window_left": 20, "num_sink_tokens": 5, "learned_sinks": True, "alibi": True, "logits_soft_cap": 5.0},
    }
    for dtype in DTYPES:
        plain = _heads(4, 64, dtype=dtype)
        for name, changes in fields.items():
            for causal in (True, False):
                case = f"masks/{name}-{'causal' if causal else 'not-causal'}-{_short(dtype)}"
                yield _case(case, target, plain.replace(**changes), *lengths, causal=causal)
        yield _case(f"masks/packed-{_short(dtype)}", target, plain, *lengths, masked=True)
        trees = [[-1, *range(32)], [-1, 0, 0, 1], None, None, [-1, -1, 0]]
        for name, spec in (("tree", plain), ("tree-and-window", plain.replace(window_left=3))):
            yield _case(f"masks/{name}-{_short(dtype)}", target, spec, *lengths, trees=trees)
        for index in range(8):
            rng, kept = np.random.default_rng(index), torch.promote_types(dtype, torch.float32)
            functions = random_functions(rng, heads=8, requests=5, positions=150, dtype=kept)
            yield _case(f"functions/{index}-{_short(dtype)}", target, plain, *lengths, functions=functions)


def _writing(target: Target) -> Iterator[Case]:
    """New keys through a plan into pages, and a cache's sequences that grow, fork and shrink."""
    mla = AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32)
    for dtype in DTYPES:
        spec = _heads(2, 64, dtype=dtype)
        yield _case(f"append/{_short(dtype)}", target, spec, [30, 1, 0, 4], [77, 18, 5, 2], append=True)
    yield _case("append/latent", target, mla, [30, 1], [77, 18], append=True)
    yield _case("append/interleaved", target, _heads(2, 64), [9, 1], [40, 1], append=True, pool="interleaved")
    full = _heads(2, 64)
    layers = {
        "bfloat16": [_heads(4, 64, dtype=torch.bfloat16)] * 2,
        "float32": [full] * 2,
        "latent": [mla] * 2,
        "windows": [full.replace(window_left=9, num_sink_tokens=2), full, full.replace(window_left=21)],
    }
    for name, specs in layers.items():
        for page_size in (4, 16):
            scenario = partial(_cache, target, specs, page_size)
            yield Case(f"cache/{name}-pages-of-{page_size}", scenario)


def _case(
    name: str,
    target: Target,
    spec: AttentionSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    split_size: int | None = None,
    append: bool = False,
    **options: Any,
) -> Case:
    """A case that makes a problem (``options`` are those of ``make_problem``), whose numbers its name decides."""

    def run() -> Outcome:
        rng = np.random.default_rng(list(name.encode()))
        with one_thread():
            problem = make_problem(rng, spec, q_lens, kv_lens, device=target.device, **options)
        return _explained(target, problem, split_size=split_size, append=append)

    return Case(name, run)


def _random(target: Target, seed: int, index: int) -> Outcome:
    rng = np.random.default_rng([seed, index])
    with one_thread():
        problem = random_problem(rng, dtype=DTYPES[int(rng.integers(len(DTYPES)))], device=target.device)
    split_size = int(rng.choice([16, 32, 50])) if rng.random() < 0.3 else None
    append = problem.page_size is not None and bool(rng.random() < 0.5)
    return _explained(target, problem, split_size=split_size, append=append)


def _explained(target: Target, problem: Problem, *, split_size: int | None, append: bool) -> Outcome:
    """The outcome of a problem, or the exception that a backend raised, with the problem's text."""
    text = f"{problem.text} split_size={split_size} append={append}"
    try:
        outcome = _solve(target, problem, split_size=split_size, append=append)
    except UnsupportedFeature:
        raise
    except Exception as error:
        raise SennitError(f"{text}: {type(error).__name__}: {error}") from error
    return Outcome(outcome.ratio, f"{text}: {outcome.text}")


def _solve(target: Target, problem: Problem, *, split_size: int | None, append: bool) -> Outcome:
    attention = BatchAttention(
        problem.spec,
        page_size=problem.page_size,
        kv_layout=problem.kv_layout,
        device=target.device,
        backend=target.backend,
    )
    plan = attention.plan(problem.batch, causal=problem.causal, split_size=split_size, **problem.plan_options)
    if append and (wrong := append_again(problem, attention, plan)):
        return Outcome.wrong(wrong)
    out, lse = attention.run(
        plan, problem.q, problem.kv, sm_scale=problem.sm_scale, return_lse=True, **problem.run_options
    )
    with one_thread():
        return Outcome.of([compare(problem, out, lse)])


def _cache(target: Target, specs: Sequence[AttentionSpec], page_size: int) -> Outcome:
    return CacheScenario(specs, page_size, target.backend, target.device).run()


def _heads(group: int, dim_qk: int, dim_vo: int | None = None, *, dtype: torch.dtype = torch.float32) -> AttentionSpec:
    return AttentionSpec(
        num_qo_heads=2 * group, num_kv_heads=2, head_dim_qk=dim_qk, head_dim_vo=dim_vo or dim_qk, dtype=dtype
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
