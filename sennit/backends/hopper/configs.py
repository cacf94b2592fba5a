"""Configurations of the kernel, the time that work takes on them, and which layers they are for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sennit.backends.base import Support
from sennit.backends.hopper.variant import Tile
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["HopperConfig", "columns_of", "kernel_configs", "takes"]

DTYPES = (torch.bfloat16, torch.float16)
COLUMNS = (64, 128)
NARROW_ROWS = (8, 16, 32)

# Microseconds on one SM of an H200.
BYTES = 36e3  # of scattered pages that are read in one
FLOPS = 5.2e6  # of products, softmax included
NARROW_FLOPS = 2.4e6
WIDE_ITEM, NARROW_ITEM, WIDE_SPLIT, NARROW_SPLIT = 5.0, 1.3, 8.0, 0.5  # microseconds


@dataclass(frozen=True)
class HopperConfig(KernelConfig):
    """A configuration, and the tiles of its strands; None: it has no such strand."""

    wide: Tile | None = None
    narrow: Tile | None = None


def takes(spec: AttentionSpec) -> Support:
    """Whether there are tiles for a layer."""
    if spec.latent:
        return Support.no("latent keys (MLA) are Triton's")
    if spec.dtype not in DTYPES or spec.kv_dtype != spec.dtype:
        return Support.no(f"it multiplies bfloat16 or float16, not {spec.dtype} by {spec.kv_dtype}")
    if columns_of(spec.head_dim_qk) != columns_of(spec.head_dim_vo):
        return Support.no(f"head dims {spec.head_dim_qk} and {spec.head_dim_vo} need tiles of different widths")
    if columns_of(spec.head_dim_qk) > COLUMNS[-1]:
        return Support.no(f"head dim {spec.head_dim_qk} is over {COLUMNS[-1]}")
    if spec.head_dim_qk % 8 or spec.head_dim_vo % 8:
        return Support.no(f"head dims {spec.head_dim_qk} and {spec.head_dim_vo} are not multiples of 8")
    return Support.yes()


def columns_of(dim: int) -> int:
    """Columns of the tiles that hold ``dim``."""
    return max(1 << (dim - 1).bit_length(), COLUMNS[0])


def kernel_configs(spec: AttentionSpec, num_workers: int) -> tuple[HopperConfig, ...]:
    """Both strands on every SM, for narrow tiles of 8, 16 or 32 rows; then each strand alone."""
    columns = columns_of(spec.head_dim_qk)
    wide, wide_alone = (
        Tile(128, 128, buffers * 128 // columns, registers) for buffers, registers in ((3, 200), (4, 240))
    )
    configs = []
    for rows in NARROW_ROWS:
        narrow = Tile(rows, 64, 5 * 128 // columns, 72)
        configs.append(_config(spec, num_workers, wide, narrow))
    configs.append(_config(spec, num_workers, wide_alone, None))
    for rows in NARROW_ROWS:
        configs.append(_config(spec, num_workers, None, Tile(rows, 64, 10 * 128 // columns, 168)))
    return tuple(configs)


def _config(spec: AttentionSpec, num_workers: int, wide: Tile | None, narrow: Tile | None) -> HopperConfig:
    strands = []
    alone = 1.0 if wide and narrow else 0.98
    row = 2 * (spec.head_dim_qk + spec.head_dim_vo)  # operations a key and query row, and bytes a key
    if wide:
        strands.append(
            Strand(
                "wide",
                wide.rows,
                wide.keys,
                item_time=WIDE_ITEM,
                compute_time=alone * wide.rows * wide.keys * row / FLOPS,
                memory_time=alone * wide.keys * row / BYTES,
                split_time=WIDE_SPLIT,
                dealt=True,
            )
        )
    if narrow:
        partial_rows = min(narrow.rows, spec.group_size)
        strands.append(
            Strand(
                "narrow",
                narrow.rows,
                narrow.keys,
                item_time=NARROW_ITEM,
                compute_time=alone * 32 * narrow.keys * row / NARROW_FLOPS,
                memory_time=alone * narrow.keys * row / BYTES,
                split_time=NARROW_SPLIT + partial_rows * spec.head_dim_vo * 8 / BYTES,
            )
        )
    name = "+".join(f"{tile.rows}x{tile.keys}b{tile.buffers}" for tile in (wide, narrow) if tile)
    return HopperConfig(f"{name}-{num_workers}", tuple(strands), num_workers, "max", wide, narrow)
