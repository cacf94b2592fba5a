"""Rows of a plan's array (plan/tensors.py, plan/schedule.py), as kernels read them."""

import triton
import triton.language as tl

from sennit.plan.schedule import ROW_WIDTH as _ROW_WIDTH
from sennit.plan.tensors import Header

__all__ = ["load_item", "load_merge", "load_segment", "num_merges", "num_segments", "packed_rows", "worker_items"]

ROW_WIDTH = tl.constexpr(_ROW_WIDTH)
NUM_SEGMENTS = tl.constexpr(int(Header.NUM_SEGMENTS))
NUM_WORKERS = tl.constexpr(int(Header.NUM_WORKERS))
SEGMENTS_AT = tl.constexpr(int(Header.SEGMENTS_AT))
ITEMS_AT = tl.constexpr(int(Header.ITEMS_AT))
NUM_MERGES = tl.constexpr(int(Header.NUM_MERGES))
WORKERS_AT = tl.constexpr(int(Header.WORKERS_AT))
MERGES_AT = tl.constexpr(int(Header.MERGES_AT))
TREES_AT = tl.constexpr(int(Header.TREES_AT))


@triton.jit
def num_segments(plan):
    """How many segments there are."""
    return tl.load(plan + NUM_SEGMENTS)


@triton.jit
def num_merges(plan):
    """How many merges there are."""
    return tl.load(plan + NUM_MERGES)


@triton.jit
def worker_items(plan, strand: tl.constexpr, worker):
    """First and last + 1 of a worker's items."""
    at = plan + tl.load(plan + WORKERS_AT) + strand * (tl.load(plan + NUM_WORKERS) + 1) + worker
    return tl.load(at), tl.load(at + 1)


@triton.jit
def load_segment(plan, index, kv_lens):
    """``(request, q_start, q_len, kv_start, kv_len, exact_len, key_offset, causal, tree_len, mask_at)``, and its tree.

    ``kv_len`` is what was planned, of which ``exact_len`` keys are there.
    """
    at = plan + tl.load(plan + SEGMENTS_AT) + index * ROW_WIDTH
    request = tl.load(at)
    kv_len = tl.load(at + 4)
    exact_len = kv_len
    if kv_lens is not None:
        exact_len = tl.minimum(tl.maximum(tl.load(kv_lens + request), 0), kv_len)
    tree = plan + tl.load(plan + TREES_AT) + tl.load(at + 8)
    return (
        (
            request,
            tl.load(at + 1),
            tl.load(at + 2),
            tl.load(at + 3),
            kv_len,
            exact_len,
            tl.load(at + 5),
            tl.load(at + 6),
            tl.load(at + 7),
            tl.load(at + 9),
        ),
        tree,
    )


@triton.jit
def load_item(plan, index):
    """``(segment, row_start, num_rows, head_start, num_heads, partial_row, key_start, hole_start, key_end, merge)``.

    Where the hole ends, rows that see nothing in it begin to see keys: nobody needs to be told.
    """
    at = plan + tl.load(plan + ITEMS_AT) + index * ROW_WIDTH
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 7),
        tl.load(at + 5),
        tl.load(at + 8),
        tl.load(at + 6),
        tl.load(at + 10),
    )


@triton.jit
def load_merge(plan, index):
    """``(segment, row_start, num_rows, head, first_row, num_parts, stride, strand)``."""
    at = plan + tl.load(plan + MERGES_AT) + index * ROW_WIDTH
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
    )


@triton.jit
def packed_rows(row_start, num_rows, lanes, group_size: tl.constexpr):
    """Token, head of its group, and whether it exists, of the rows ``lanes`` of an item or a merge.

    Rows that do not exist repeat the last one.
    """
    packed = row_start + tl.minimum(lanes, num_rows - 1)
    return packed // group_size, packed % group_size, lanes < num_rows
