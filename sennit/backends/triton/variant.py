"""What a kernel is compiled for: what does not change with the step, of a layer, its cache and its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sennit.backends.gpus.variant import LayerVariant

__all__ = ["Columns", "Tile", "Variant", "columns_of", "value_columns"]

MERGED_VALUES = 4096  # numbers of partial results at once
FEWEST_COLUMNS = 32  # of a tile; Triton 3.6 multiplies some of 16 columns wrongly on Hopper


@dataclass(frozen=True)
class Columns:
    """How the columns of a row lie in tiles, whose widths are powers of two.

    Attributes:
        dim: columns that there are.
        main: width of the first tile.
        tail: width of the second, or 0.
    """

    dim: int
    main: int
    tail: int

    @property
    def width(self) -> int:
        """Columns of both tiles."""
        return self.main + self.tail


def columns_of(dim: int) -> Columns:
    """The narrowest tiles that hold ``dim`` columns: one, or two where that saves columns.

    >>> columns_of(576), columns_of(100)
    (Columns(dim=576, main=512, tail=64), Columns(dim=100, main=128, tail=0))
    """
    whole = max(1 << (dim - 1).bit_length(), FEWEST_COLUMNS)
    half = whole // 2
    if half >= FEWEST_COLUMNS and half < dim:
        tail = max(1 << (dim - half - 1).bit_length(), FEWEST_COLUMNS)
        if half + tail < whole:
            return Columns(dim, half, tail)
    return Columns(dim, whole, 0)


def value_columns(dim_qk: int, dim_vo: int, *, keys_are_values: bool) -> Columns:
    """Tiles of values and outputs; where values are columns of keys, those of keys that hold them."""
    if not keys_are_values:
        return columns_of(dim_vo)
    keys = columns_of(dim_qk)
    return Columns(dim_vo, keys.main, keys.tail if dim_vo > keys.main else 0)


@dataclass(frozen=True)
class Tile:
    """Tiles of a strand, and the workers that compute them.

    Attributes:
        rows: packed query rows.
        keys: keys of a step.
        stages: of the software pipeline.
        bare_loop: steps of which every row sees every key have a loop of their own, without masks.
        keys_first: products are ``[keys, rows]``, so that warps divide the keys of few rows among them.
        num_warps: of a worker.
        residency: workers that share an SM.
    """

    rows: int
    keys: int
    stages: int
    bare_loop: bool = False
    keys_first: bool = False
    num_warps: int = 4
    residency: int = 1

    @property
    def name(self) -> str:
        """What it multiplies at once, and in how many stages.

        >>> Tile(128, 64, 3).name, Tile(16, 64, 3, keys_first=True).name
        ('128x64s3', '64x16s3')
        """
        shape = f"{self.keys}x{self.rows}" if self.keys_first else f"{self.rows}x{self.keys}"
        return f"{shape}s{self.stages}"


@dataclass(frozen=True, kw_only=True)
class Variant(LayerVariant):
    """What is known when an attention kernel is compiled.

    Attributes:
        strand: which of the configuration's.
        tile: of the strand.
        item_rows: packed query rows that an item may have.
        overlaps: strands share the device, on which kernels can wait for each other.
        latent: values are the first columns of keys.
        floats: everything is multiplied in float32; otherwise in the dtype of queries, keys and values.
        same_strides: keys and values have the same strides.
    """

    strand: int
    tile: Tile
    item_rows: int
    overlaps: bool
    latent: bool
    floats: bool
    same_strides: bool

    @property
    def keys_are_values(self) -> bool:
        """Whether a tile of keys serves as one of values."""
        return self.latent and not self.floats

    @cached_property
    def qk(self) -> Columns:
        """Tiles of queries and keys."""
        return columns_of(self.dim_qk)

    @cached_property
    def vo(self) -> Columns:
        """Tiles of values and outputs."""
        return value_columns(self.dim_qk, self.dim_vo, keys_are_values=self.keys_are_values)

    @property
    def merges_itself(self) -> bool:
        """Whether the worker that stores the last part of a tile merges them all; many rows are left to a kernel."""
        return self.item_rows <= 16

    @property
    def merged_rows(self) -> int:
        """Rows that are merged at once."""
        return max(min(4, MERGED_VALUES // (2 * self.vo.main)), 1)

    @property
    def merged_parts(self) -> int:
        """Parts of them whose values fit registers together."""
        return max(MERGED_VALUES // (self.merged_rows * self.vo.main), 1)
