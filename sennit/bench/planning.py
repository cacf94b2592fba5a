"""How long the planner takes on the host, for plans that are checked to cover their batches exactly."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from sennit.bench.timing import no_garbage_collection
from sennit.errors import InvalidInput, SennitError
from sennit.plan.batch import Batch
from sennit.plan.cost import FloatArray, KernelConfig
from sennit.plan.example import example_config
from sennit.plan.plan import Plan, make_plan
from sennit.plan.schedule import Item
from sennit.plan.tensors import PlanArrays
from sennit.spec import AttentionSpec

__all__ = [
    "FLASHINFER_MICROSECONDS",
    "WORKLOADS",
    "PlanningTime",
    "check",
    "check_coverage",
    "imbalance",
    "item_counts",
    "item_strands",
    "measure",
    "strand_times",
]

PAGE_SIZE = 16
SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)

WORKLOADS = (
    "128*1@8192",
    "4096@4096 + 128*1@8192",
    "4096*1@256",
    "34*1@8192",
    "127*1@1024 + 1@131072",
    "2048@2048 + 128*1@2048",
)

# FlashInfer's planner for its uniform kernel (BatchAttention), 32 query and 8 KV heads, on another machine with a
# comparable CPU. Its prefill was 4096 tokens of 8192.
FLASHINFER_MICROSECONDS = {"128*1@8192": 157.0, "4096@4096 + 128*1@8192": 465.0, "4096*1@256": 2021.0}


@dataclass(frozen=True)
class PlanningTime:
    """Host time of one batch's plan. Times are microseconds.

    Attributes:
        batch: the batch, as it was written.
        repeat: plans timed.
        median, minimum, lower_quartile, upper_quartile: of their times.
        items: work items of the plan.
        imbalance: the fullest worker's predicted load over the mean.
        flashinfer: FlashInfer's time for the same batch, measured elsewhere; None where there is none.
    """

    batch: str
    repeat: int
    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    items: int
    imbalance: float
    flashinfer: float | None


def check(text: str) -> None:
    """Check that a batch can be planned.

    Raises:
        InvalidInput: it cannot, or the text is not a batch.
    """
    _plan(Batch.parse(text, page_size=PAGE_SIZE), example_config())


def measure(text: str, *, repeat: int = 400, warmup: int = 20, config: KernelConfig | None = None) -> PlanningTime:
    """Check the plan of a batch and time making it, for 32 query and 8 KV heads and pages of 16.

    Reading the batch is not timed; its page table is range-checked and put into the plan in every repetition.

    Args:
        text: a batch, such as ``"128*1@8192"``.
        repeat: plans to time.
        warmup: plans to make before.
        config: kernel configuration; :func:`~sennit.plan.example.example_config` when left out.

    Raises:
        InvalidInput: ``repeat`` is not positive, or the text is not a batch.
        SennitError: the plan does not cover the batch; nothing is timed then.

    >>> measure("2*1@64", repeat=3).batch
    '2*1@64'
    """
    if repeat < 1:
        raise InvalidInput("repeat", expected="a positive number of plans", got=repeat)
    config = config or example_config()
    batch = Batch.parse(text, page_size=PAGE_SIZE)
    plan = _plan(batch, config)
    check_coverage(plan)
    times = np.empty(repeat)
    with no_garbage_collection():
        for _ in range(warmup):
            _plan(batch, config)
        for index in range(repeat):
            fresh = replace(batch)  # a batch remembers its sums once they were asked for
            start = time.perf_counter_ns()
            _plan(fresh, config)
            times[index] = (time.perf_counter_ns() - start) / 1e3
    lower, median, upper = np.percentile(times, (25, 50, 75)).tolist()
    return PlanningTime(
        batch=text,
        repeat=repeat,
        median=median,
        minimum=float(times.min()),
        lower_quartile=lower,
        upper_quartile=upper,
        items=plan.work.num_items,
        imbalance=imbalance(plan.loads),
        flashinfer=FLASHINFER_MICROSECONDS.get(text),
    )


def _plan(batch: Batch, config: KernelConfig) -> Plan:
    """The plan that is timed."""
    return make_plan(
        batch,
        spec=SPEC,
        owner="bench",
        backend="example",
        configs=(config,),
        page_size=PAGE_SIZE,
        device=torch.device("cpu"),
    )


def imbalance(loads: FloatArray) -> float:
    """The fullest worker's load over the mean, ``loads [num_workers]``; 1.0 where there is nothing to do.

    >>> imbalance(np.array([3.0, 1.0]))
    1.5
    """
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def _arrays(plan: Plan) -> PlanArrays:
    """What kernels read of a plan."""
    return PlanArrays(plan.tensors.host.numpy())


def item_strands(plan: Plan) -> npt.NDArray[np.int64]:
    """Strand of every work item, int64 ``[items]``."""
    bounds = _arrays(plan).worker_indptr
    return np.arange(len(bounds)).repeat(bounds[:, -1] - bounds[:, 0])


def item_counts(plan: Plan) -> npt.NDArray[np.float64]:
    """What every item costs, as counts of its strand's times, float64 ``[3, items]``.

    Heads, each of which takes an item time; key steps of all heads, in steps of full tiles; partial results of heads.
    """
    items, strand = _arrays(plan).items.T, item_strands(plan)
    key_step = plan.config.key_steps[strand]
    steps = -(-(items[Item.HOLE_START] - items[Item.KEY_START]) // key_step)
    steps = np.maximum(steps - (items[Item.HOLE_END] - items[Item.KEY_END]) // key_step, 1)
    full = plan.config.step_times(strand, plan.config.tile_rows[strand])
    heads = items[Item.NUM_HEADS]
    weight = plan.config.step_times(strand, items[Item.NUM_ROWS]) / full
    return np.stack([heads, heads * steps * weight, heads * (items[Item.PARTIAL_ROW] >= 0)])


def strand_times(config: KernelConfig) -> npt.NDArray[np.float64]:
    """A configuration's times of what :func:`item_counts` counts, microseconds, float64 ``[strands, 3]``."""
    strands = np.arange(len(config.strands))
    return np.stack([config.item_times, config.step_times(strands, config.tile_rows), config.split_times], axis=1)


def check_coverage(plan: Plan) -> None:
    """Verify that every query row and head of a plan without windows meets each visible key of its tile exactly once.

    Raises:
        SennitError: it does not; the text names a tile that is wrong.
    """
    reached: dict[tuple[int, int, int, int], int] = {}  # segment, first row, rows, head -> keys up to here are covered
    items = _arrays(plan).items.tolist()
    for segment, row, rows, first_head, heads, start, end, *_ in sorted(items, key=lambda item: item[Item.KEY_START]):
        for head in range(first_head, first_head + heads):
            tile = (segment, row, rows, head)
            if reached.get(tile, 0) != start:
                raise SennitError(f"plan: keys before {start} of tile {tile} are missing or twice; a bug in Sennit")
            reached[tile] = end
    expected = _visible_keys(plan)
    if wrong := reached.items() ^ expected.items():
        tile, _ = min(wrong)
        got, wanted = reached.get(tile, "none"), expected.get(tile, "none")
        raise SennitError(f"plan: tile {tile} covers {got} keys instead of {wanted}; a bug in Sennit")


def _visible_keys(plan: Plan) -> dict[tuple[int, int, int, int], int]:
    """Keys that each tile's last row sees, from the definition."""
    placed = zip(_arrays(plan).items[:, Item.SEGMENT].tolist(), item_strands(plan).tolist(), strict=True)
    tile_rows = {segment: plan.config.strands[strand].tile_rows for segment, strand in placed}
    segments, group = plan.segments, plan.spec.group_size
    found = {}
    columns = (segments.q_len.tolist(), segments.kv_len.tolist(), segments.causal.tolist())
    for segment, (q_len, kv_len, causal) in enumerate(zip(*columns, strict=True)):
        size = tile_rows.get(segment, 1)  # a segment that was forgotten has tiles of no plan
        for row in range(0, q_len * group, size):
            rows = min(size, q_len * group - row)
            seen = kv_len - q_len + (row + rows - 1) // group + 1 if causal else kv_len
            for head in range(plan.spec.num_kv_heads):
                found[segment, row, rows, head] = min(max(seen, 0), kv_len)
    return found
