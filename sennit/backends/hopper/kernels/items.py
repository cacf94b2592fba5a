"""An item as warps that compute it see it: its segment, its steps, and its rows. It has one KV head."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sennit.backends.gpus.kernels.logits import row_positions
from sennit.backends.gpus.kernels.plan import load_item, load_segment, packed_rows
from sennit.backends.hopper.kernels.steps import plan_steps

__all__ = ["open_item", "with_slopes"]


@gluon.jit
def open_item(plan, index, kv_lens, lanes, num_keys: gl.constexpr, variant: gl.constexpr):
    """``(item, segment, tree, steps)``, and of its rows ``lanes`` ``(tokens, heads, positions)``."""
    item = load_item(plan, index)
    segment, tree = load_segment(plan, item[0], kv_lens)
    steps = plan_steps(segment, item, num_keys, variant)
    tokens, of_group, _exists = packed_rows(item[1], item[2], lanes, variant.group_size)
    positions = row_positions(tokens, segment[2], segment[5], segment[8], tree, variant.trees)
    return item, segment, tree, steps, (tokens, item[3] * variant.group_size + of_group, positions)


@gluon.jit
def with_slopes(rows, alibi_slopes):
    """Token, head and position of each row, and its ALiBi slope; without slopes anything stands for them."""
    tokens, heads, positions = rows
    slopes = positions
    if alibi_slopes is not None:
        slopes = gl.load(alibi_slopes + heads)
    return tokens, heads, positions, slopes
