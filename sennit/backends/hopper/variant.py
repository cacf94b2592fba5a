"""What the kernel is compiled for: what does not change with the step, of a layer, its cache and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tile", "Variant"]


@dataclass(frozen=True)
class Tile:
    """Tiles of a strand.

    Attributes:
        rows: packed query rows.
        keys: keys of a step.
        buffers: steps of keys, or of values, that shared memory has room for.
        registers: a thread of the warps that compute it.
    """

    rows: int
    keys: int
    buffers: int
    registers: int


@dataclass(frozen=True)
class Variant:
    """What is known when the kernel is compiled.

    Attributes:
        wide, narrow: tiles of the strands; None: there is no such strand.
        group_size: query heads per KV head.
        columns: of queries, keys and values in shared memory.
        dim_qk, dim_vo: of them, those that there are.
        page_size: tokens a page; None: keys are packed rows.
        box_rows: tokens that are copied at once, which divides pages and steps.
        query_boxes: tiles of packed rows are boxes of the queries, which can be copied at once too.
        ordinary_scale: ``sm_scale`` is such that products may be weighed before they are scaled.
        window_left, window_right, num_sink_tokens, logits_soft_cap: see ``AttentionSpec``.
        trees: segments may have token trees.
    """

    wide: Tile | None
    narrow: Tile | None
    group_size: int
    columns: int
    dim_qk: int
    dim_vo: int
    page_size: int | None
    box_rows: int
    query_boxes: bool
    ordinary_scale: bool
    window_left: int | None
    window_right: int | None
    num_sink_tokens: int
    logits_soft_cap: float | None
    trees: bool

    @property
    def ordered(self) -> bool:
        """Rows see all keys up to their own, or up to the last one."""
        return self.window_left is None and self.window_right is None and not self.trees

    @property
    def narrow_strand(self) -> int:
        """Number of the narrow strand in plans."""
        return 0 if self.wide is None else 1
