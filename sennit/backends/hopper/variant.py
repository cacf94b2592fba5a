"""What the kernel is compiled for: what does not change with the step, of a layer, its cache and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from sennit.backends.gpus.variant import LayerVariant

__all__ = ["WIDE_PARTS", "Tile", "Variant"]

WIDE_PARTS = 2  # groups of warps that share a wide tile
MOST_AHEAD = 4


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

    @property
    def ahead(self) -> int:
        """Loads by rows that are under way, and unknown to anybody, when the next one begins.

        Who frees a buffer may wait for the load after it.
        """
        return min(MOST_AHEAD, self.buffers - 2)


@dataclass(frozen=True, kw_only=True)
class Variant(LayerVariant):
    """What is known when the kernel is compiled.

    Attributes:
        wide, narrow: tiles of the strands; None: there is no such strand.
        columns: of queries, keys and values in shared memory.
        box_rows: tokens that the copy engine takes at once, which divides pages and steps; 1: warps copy each token.
        aligned: keys and values of every token begin at multiples of 16 bytes.
        query_boxes: tiles of packed rows are boxes of the queries, which can be copied at once too.
        ordinary_scale: ``sm_scale`` is such that products may be weighed before they are scaled.
        pauses: warps sleep now and then; see ``kernels/pauses.py``.
    """

    wide: Tile | None
    narrow: Tile | None
    columns: int
    box_rows: int
    aligned: bool
    query_boxes: bool
    ordinary_scale: bool
    pauses: bool = False

    @property
    def boxes(self) -> bool:
        """Whether the copy engine brings keys and values."""
        return self.box_rows > 1

    @property
    def loader_warps(self) -> int:
        """Warps that load a strand: one tells the copy engine, several copy themselves; registers are given to four."""
        if self.boxes:
            return 1
        return 2 if self.wide and self.narrow else 4

    @property
    def loader_registers(self) -> int:
        """Of a thread that loads."""
        return 24 if self.boxes and self.wide and self.narrow else 40

    @property
    def wide_registers(self) -> int:
        """Of a thread that computes wide tiles: two groups of warps have less where those that load need more."""
        return 0 if self.wide is None else self.wide.registers - (self.loader_registers - 24) // 2

    @property
    def ordered(self) -> bool:
        """Rows see all keys up to their own, or up to the last one."""
        return self.window_left is None and self.window_right is None and not self.trees

    @property
    def narrow_strand(self) -> int:
        """Number of the narrow strand in plans."""
        return 0 if self.wide is None else 1
