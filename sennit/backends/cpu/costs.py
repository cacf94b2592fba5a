"""Tile shapes of the kernels, and the time that work takes on them, by instruction set and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from sennit.backends.cpu.instructions import PAIR_SETS, instruction_set
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["kernel_configs"]

WIDE_STEP, NARROW_STEP = 128, 16  # keys
WIDE_ROWS = (
    256,
    128,
    64,
    32,
)  # many rows share the packing of values; up to two vectors of rows are a kernel of their own


@dataclass(frozen=True)
class Speed:
    """What one core does in a microsecond, measured by the benchmarks.

    Attributes:
        products: thousands of floating-point operations in products of wide tiles.
        logits: thousands of logits made weights.
        packed: thousands of numbers of values packed for a wide tile.
    """

    products: float
    logits: float
    packed: float


# Where not everything is bfloat16, "amx" and "avx512_bf16" multiply floats too.
SPEEDS = {
    "amx": Speed(1000, 4, 22),
    "avx512_bf16": Speed(480, 5.5, 22),
    "avx512": Speed(145, 5, 22),
    "avx2": Speed(70, 2, 11),
    "neon": Speed(30, 1, 5),
    "generic": Speed(15, 0.5, 3),
}
BYTES = 12  # thousands that a core reads of scattered pages in a microsecond


def kernel_configs(spec: AttentionSpec, threads: int) -> tuple[KernelConfig, ...]:
    """One configuration for each height of wide tiles; narrow ones have as many rows as the kernel takes."""
    name = instruction_set().name
    if name in PAIR_SETS and not spec.dtype == spec.kv_dtype == torch.bfloat16:
        name = "avx512"
    bytes_per_key = spec.kv_bytes_per_token // spec.num_kv_heads
    return _configs(name, spec.head_dim_qk, spec.head_dim_vo, bytes_per_key, spec.group_size, threads)


@cache
def _configs(
    name: str, dim_qk: int, dim_vo: int, bytes_per_key: int, group_size: int, threads: int
) -> tuple[KernelConfig, ...]:
    speed = SPEEDS[name]
    narrow_rows = 8 if name == "amx" else instruction_set().lanes  # kNarrowRows of strands.h
    vectors = SPEEDS["avx512"] if name in PAIR_SETS else speed  # narrow tiles, in floats or pairs, are not as dense
    row = (dim_qk + dim_vo) * 2

    def wide(rows: int) -> Strand:
        weights = rows * WIDE_STEP * (row / speed.products + 1 / speed.logits) / 1e3
        return Strand(
            "wide",
            rows,
            WIDE_STEP,
            item_time=2 + rows * (dim_qk + dim_vo) / speed.packed / 1e3,
            compute_time=weights + WIDE_STEP * dim_vo / speed.packed / 1e3,
            memory_time=WIDE_STEP * bytes_per_key / BYTES / 1e3,
            split_time=rows * dim_vo * 8 / BYTES / 1e3,
        )

    decoded = min(narrow_rows, 1 << (group_size - 1).bit_length())  # rows of a decode, as the kernel rounds them
    narrow = Strand(
        "narrow",
        narrow_rows,
        NARROW_STEP,
        item_time=1,
        compute_time=NARROW_STEP * decoded * row / vectors.products / 1e3,
        memory_time=NARROW_STEP * bytes_per_key / BYTES / 1e3,
        split_time=decoded * dim_vo * 8 / BYTES / 1e3,
    )
    return tuple(KernelConfig(f"{name}-{rows}x{threads}", (wide(rows), narrow), threads) for rows in WIDE_ROWS)
