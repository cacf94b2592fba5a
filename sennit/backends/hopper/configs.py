"""Configurations of the kernel, the time that work takes on them, and which layers they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sennit.backends.base import Support
from sennit.backends.hopper.variant import Tile
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["HopperConfig", "columns_of", "kernel_configs", "takes"]

DTYPES = (torch.bfloat16, torch.float16)
COLUMNS = (64, 128, 256)
NARROW_ROWS = (8, 16, 32)
NUMBER_BYTES = 2

# Microseconds on one SM of an H200.
BYTES = 36e3  # of scattered pages that are read in one
FLOPS = 5.2e6  # of products, softmax included
NARROW_FLOPS = 2.4e6
WIDE_ITEM, WIDE_ITEM_BESIDE, NARROW_ITEM = 3.0, 6.0, 1.0
WIDE_SPLIT, NARROW_SPLIT = 11.0, 3.0
WIDE_DELAY, NARROW_DELAY = 1.1, 1.02  # at most, for tiles dealt whole


@dataclass(frozen=True)
class HopperConfig(KernelConfig):
    """A configuration, and the tiles of its strands; None: it has no such strand."""

    wide: Tile | None = None
    narrow: Tile | None = None


def takes(spec: AttentionSpec) -> Support:
    """Whether there are tiles for a layer."""
    if spec.latent:
        return Support.no("latent keys (MLA) are Triton's")
    for field in ("kv_dtype", "dtype"):
        if (dtype := getattr(spec, field)) not in DTYPES:
            return Support.no(f"{field}={dtype} is not computed, but bfloat16 and float16")
    if spec.kv_dtype != spec.dtype:
        return Support.no(f"queries in {spec.dtype} are not multiplied by keys in {spec.kv_dtype}")
    if columns_of(spec) > COLUMNS[-1]:
        return Support.no(f"head dims {spec.head_dim_qk} and {spec.head_dim_vo} are over {COLUMNS[-1]}")
    return Support.yes()


def columns_of(spec: AttentionSpec) -> int:
    """Columns of the tiles that hold queries, keys and values."""
    dim = max(spec.head_dim_qk, spec.head_dim_vo)
    return max(1 << (dim - 1).bit_length(), COLUMNS[0])


def kernel_configs(spec: AttentionSpec, num_workers: int) -> tuple[HopperConfig, ...]:
    """Both strands on every SM, for narrow tiles of 8, 16 or 32 rows; then each strand alone.

    The sums of 256 columns leave no registers for a second strand.
    """
    columns = columns_of(spec)
    keys = 128 if columns <= 128 else 64
    configs = []
    if columns <= 128:
        wide = Tile(128, keys, _buffers(96, keys, columns), 208)
        for rows in NARROW_ROWS:
            many = rows == NARROW_ROWS[-1]  # whose queries and weights take more memory, and sums more registers
            narrow = Tile(rows, 64, _buffers(64 if many else 80, 64, columns), 88 if many else 72)
            configs.append(_config(spec, num_workers, replace(wide, registers=200) if many else wide, narrow))
    configs.append(_config(spec, num_workers, Tile(128, keys, _buffers(128, keys, columns), 240), None))
    for rows in NARROW_ROWS:
        configs.append(_config(spec, num_workers, None, Tile(rows, 64, _buffers(160, 64, columns), 168)))
    return tuple(configs)


def _buffers(size: int, keys: int, columns: int) -> int:
    """Steps of keys that so many KiB hold."""
    return size * 1024 // (keys * columns * NUMBER_BYTES)


def _config(spec: AttentionSpec, num_workers: int, wide: Tile | None, narrow: Tile | None) -> HopperConfig:
    strands = []
    alone = 1.0 if wide and narrow else 0.98
    row = 4 * columns_of(spec)  # operations a key and query row
    key = NUMBER_BYTES * (spec.head_dim_qk + spec.head_dim_vo)  # bytes
    if wide:
        strands.append(
            Strand(
                "wide",
                wide.rows,
                wide.keys,
                item_time=WIDE_ITEM_BESIDE if narrow else WIDE_ITEM,
                compute_time=alone * wide.rows * wide.keys * row / FLOPS,
                memory_time=alone * wide.keys * key / BYTES,
                split_time=WIDE_SPLIT,
                dealt=WIDE_DELAY,
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
                memory_time=alone * narrow.keys * key / BYTES,
                split_time=NARROW_SPLIT + partial_rows * spec.head_dim_vo * 8 / BYTES,
                dealt=NARROW_DELAY,
            )
        )
    name = "+".join(f"{tile.rows}x{tile.keys}b{tile.buffers}" for tile in (wide, narrow) if tile)
    return HopperConfig(f"{name}-{num_workers}", tuple(strands), num_workers, "max", wide, narrow)
