"""A plan in plain values: what ``sennit plan`` prints, and gives as JSON."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.bench.items import ItemTimes, compared_times
from sennit.bench.planning import imbalance, item_counts, item_strands, strand_times
from sennit.plan.plan import Plan
from sennit.plan.schedule import Item, Merge

__all__ = ["describe", "describe_measured"]


def describe(plan: Plan, *, causal: bool) -> dict[str, Any]:
    """Numbers and names of a plan; times are microseconds, predicted.

    Args:
        plan: the plan.
        causal: the flag that it was made with.
    """
    schedule, config, spec = plan.schedule, plan.config, plan.spec
    names = [strand.name for strand in config.strands]
    starts, ends = schedule.worker_indptr[:, 0], schedule.worker_indptr[:, -1]
    return {
        "batch": str(plan.batch),
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
        "page_size": plan.page_size,
        "causal": causal,
        "window_left": spec.window_left,
        "num_sink_tokens": spec.num_sink_tokens,
        "split_size": plan.split_size,
        "backend": plan.backend,
        "configuration": config.name,
        "workers": config.num_workers,
        "combine": config.combine,
        "strands": [
            {"name": s.name, "tile_rows": s.tile_rows, "key_step": s.key_step, "workers": workers}
            for s, workers in zip(config.strands, schedule.line.strand_workers.tolist(), strict=True)
        ],
        "segments": _groups(plan),
        "items": schedule.num_items,
        "items_by_strand": dict(zip(names, (ends - starts).tolist(), strict=True)),
        "splits": int(schedule.merges[Merge.NUM_PARTS].sum()),
        "merges": schedule.num_merges,
        "partial_rows": schedule.num_partial_rows,
        "makespan_us": float(plan.loads.max()),
        "mean_us": float(plan.loads.mean()),
        "imbalance": imbalance(plan.loads),
        "loads_us": dict(zip(names, schedule.loads.tolist(), strict=True)),
    }


def describe_measured(times: ItemTimes) -> dict[str, Any]:
    """What :func:`describe` predicts, as it was measured, and the times of items that fit it."""
    compared = compared_times([times])
    return {
        "makespan_us": times.makespan,
        "loads_us": dict(zip(compared, times.loads.tolist(), strict=True)),
        "strands": [{"name": name} | found for name, found in compared.items()],
        "start_us": times.start.tolist(),
        "end_us": times.end.tolist(),
    }


def _groups(plan: Plan) -> list[dict[str, Any]]:
    """Equal neighbours among the segments, counted together."""
    segments, count = plan.segments, len(plan.segments)
    items, of_item = plan.schedule.items, item_strands(plan)
    strand = np.full(count, -1)
    strand[items[Item.SEGMENT]] = of_item
    item_times = (strand_times(plan.config)[of_item].T * item_counts(plan)).sum(axis=0)
    times = np.bincount(items[Item.SEGMENT], item_times, minlength=count)
    partial = items[Item.NUM_HEADS] * (items[Item.PARTIAL_ROW] >= 0)
    splits = np.bincount(items[Item.SEGMENT], partial, minlength=count)
    items_of = np.bincount(items[Item.SEGMENT], minlength=count)
    planned = np.bincount(items[Item.SEGMENT], items[Item.NUM_ROWS] * items[Item.NUM_HEADS] * _keys(items), count)
    rows = np.maximum(segments.q_len * plan.spec.num_qo_heads, 1)
    kinds = np.stack([segments.q_len, segments.kv_len, strand])
    changes = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1
    bounds = [0, *changes.tolist(), count] if count else []
    return [
        {
            "requests": end - start,
            "q_len": int(segments.q_len[start]),
            "kv_len": int(segments.kv_len[start]),
            "planned_keys": float(planned[start:end].sum() / rows[start:end].sum()),
            # A segment without rows is on no strand.
            "strand": plan.config.strands[strand[start]].name if strand[start] >= 0 else None,
            "items": int(items_of[start:end].sum()),
            "splits": int(splits[start:end].sum()),
            "time_us": float(times[start:end].sum()),
        }
        for start, end in pairwise(bounds)
    ]


def _keys(items: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Keys of every item, ``[items]``."""
    hole = items[Item.HOLE_END] - items[Item.HOLE_START]
    keys: npt.NDArray[np.int64] = (items[Item.KEY_END] - items[Item.KEY_START] - hole).astype(np.int64)
    return keys
