"""When the work items of a plan ran, and which times of a configuration that speaks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.attention import BatchAttention
from sennit.bench.planning import item_counts, item_strands, strand_times
from sennit.bench.tensors import check_memory
from sennit.ops import measuring_items
from sennit.plan.batch import Batch
from sennit.plan.cost import FloatArray
from sennit.plan.plan import Plan
from sennit.plan.tensors import PlanArrays
from sennit.spec import AttentionSpec

__all__ = ["ItemTimes", "compared_times", "measure_items"]

PARTS = ("item and head", "key step", "partial result")  # that `item_counts` counts
LAUNCHES = 7  # of which the one of median length is taken
FEWEST_SEEN = 8  # items that have something, from which its time can be told
TOO_ALIKE = "its items differ too little"
BELOW_ZERO = "what fits best is below zero"  # the items did not run as a sum of such times


@dataclass(frozen=True, eq=False)
class ItemTimes:
    """A plan's items in time.

    Attributes:
        plan: whose items they are.
        start, end: microseconds from when the first one began, float64 ``[items]``.
    """

    plan: Plan
    start: FloatArray
    end: FloatArray

    @property
    def makespan(self) -> float:
        """Microseconds until the last one ended."""
        return float(self.end.max(initial=0.0))

    @property
    def loads(self) -> FloatArray:
        """Microseconds that every worker was busy with items of each strand, ``[strands, num_workers]``."""
        bounds = PlanArrays(self.plan.tensors.host.numpy()).worker_indptr
        before = np.append(0.0, np.cumsum(self.end - self.start))
        loads: FloatArray = before[bounds[:, 1:]] - before[bounds[:, :-1]]
        return loads


def measure_items(
    batch: str,
    spec: AttentionSpec,
    *,
    backend: str,
    device: torch.device,
    page_size: int,
    causal: bool = True,
    split_size: int | None = None,
) -> ItemTimes:
    """Run a batch, of random keys in shuffled pages, and see when its items begin and end.

    Args:
        batch: requests, see :meth:`~sennit.Batch.parse`.
        spec: the layer; without learned sinks, ALiBi and functions.
        backend: one that can tell.
        device: where it runs.
        page_size: tokens a page.
        causal, split_size: see :meth:`~sennit.BatchAttention.plan`.

    Raises:
        InvalidInput: the text is not a batch, or the host's memory is too small for its tensors.
        UnsupportedFeature: the backend cannot tell when items run, or does not take the layer.
    """
    attn = BatchAttention(spec, page_size=page_size, device=device, backend=backend)
    lengths = Batch.parse(batch, page_size=page_size)
    pages = lengths.pages_needed(page_size)
    shuffled = np.random.default_rng(0).permutation(int(pages.sum()))
    plan = attn.plan(
        Batch.csr(
            qo_indptr=np.append(0, np.cumsum(lengths.q_lens)),
            kv_lens=lengths.kv_lens,
            kv_indptr=np.append(0, np.cumsum(pages)),
            kv_indices=shuffled,
        ),
        causal=causal,
        split_size=split_size,
    )
    check_memory(spec, plan.num_rows, len(shuffled) * page_size, device)
    shape = max(len(shuffled), 1), page_size, spec.num_kv_heads
    k = torch.randn(*shape, spec.head_dim_qk, dtype=spec.kv_dtype, device=device)
    v = torch.randn(*shape, spec.head_dim_vo, dtype=spec.kv_dtype, device=device)
    q = torch.randn(plan.num_rows, spec.num_qo_heads, spec.head_dim_qk, dtype=spec.dtype, device=device)
    with measuring_items() as found:
        for _ in range(LAUNCHES):
            attn.run(plan, q, (k, v), sm_scale=spec.head_dim_qk**-0.5)
    launches = [_from_first(times.cpu().numpy()) for times in found]
    launches.sort(key=lambda times: float(times.max(initial=0.0)))
    start, end = launches[len(launches) // 2].T
    return ItemTimes(plan, start, end)


def _from_first(times: npt.NDArray[np.int64]) -> FloatArray:
    """Nanoseconds of any clock as microseconds from the first."""
    return (times - times.min(initial=np.iinfo(np.int64).max)) / 1e3 if times.size else times / 1e3


def compared_times(found: Sequence[ItemTimes]) -> dict[str, dict[str, Any]]:
    """Times of each strand's items: planned, and those that fit what was measured best, by least squares.

    Args:
        found: of plans of one configuration.

    Returns:
        For the name of a strand, in values that JSON has, ``planned_us`` and ``measured_us`` with a number for each of
        :data:`PARTS`; None where too few items have it, or where it cannot be told from the others, and then ``untold``
        has the reason.
    """
    config = found[0].plan.config
    counts = np.concatenate([item_counts(times.plan) for times in found], axis=1)
    strands = np.concatenate([item_strands(times.plan) for times in found])
    durations = np.concatenate([times.end - times.start for times in found])
    compared: dict[str, dict[str, Any]] = {}
    for number, (strand, planned) in enumerate(zip(config.strands, strand_times(config).tolist(), strict=True)):
        of_strand = strands == number
        fitted = dict(zip(PARTS, _fit(counts[:, of_strand], durations[of_strand]), strict=True))
        compared[strand.name] = {
            "planned_us": dict(zip(PARTS, planned, strict=True)),
            "measured_us": {part: None if isinstance(time, str) else time for part, time in fitted.items()},
            "untold": {part: time for part, time in fitted.items() if isinstance(time, str)},
        }
    return compared


def _fit(counts: FloatArray, durations: FloatArray) -> list[float | str]:
    """Time of each part, or why it cannot be told."""
    seen = (counts > 0).sum(axis=1).tolist()
    known = np.array(seen) >= FEWEST_SEEN
    columns = counts[known].T
    fitted: Iterator[float | str]
    if np.linalg.matrix_rank(columns) < columns.shape[1]:
        fitted = repeat(TOO_ALIKE)
    else:
        times = np.linalg.lstsq(columns, durations, rcond=None)[0].tolist()
        fitted = (BELOW_ZERO if time < 0 else time for time in times)
    return [next(fitted) if count >= FEWEST_SEEN else f"{count} of the {FEWEST_SEEN} items needed" for count in seen]
