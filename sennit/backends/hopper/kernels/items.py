"""An item as warps that compute it see it: its segment, its steps, and its rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sennit.backends.gpus.kernels.logits import row_positions
from sennit.backends.gpus.kernels.plan import load_item, load_segment, packed_rows
from sennit.backends.hopper.kernels.steps import plan_steps

__all__ = ["open_item", "rows_of_head"]


@gluon.jit
def open_item(plan, index, kv_lens, lanes, num_keys: gl.constexpr, variant: gl.constexpr):
    """``(item, segment, tree, steps)``, and of its rows ``lanes`` ``(tokens, head of the group, positions)``."""
    item = load_item(plan, index)
    segment, tree = load_segment(plan, item[0], kv_lens)
    steps = plan_steps(segment, item, num_keys, variant)
    tokens, of_group, _exists = packed_rows(item[1], item[2], lanes, variant.group_size)
    positions = row_positions(tokens, segment[2], segment[5], segment[8], tree, variant.trees)
    return item, segment, tree, steps, (tokens, of_group, positions)


@gluon.jit
def rows_of_head(rows, kv_head, alibi_slopes, variant: gl.constexpr):
    """Token, head and position of each row, and its ALiBi slope; without slopes anything stands for them."""
    tokens, of_group, positions = rows
    heads = kv_head * variant.group_size + of_group
    slopes = positions
    if alibi_slopes is not None:
        slopes = gl.load(alibi_slopes + heads)
    return tokens, heads, positions, slopes
