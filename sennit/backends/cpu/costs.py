"""Tile shapes of the kernels, and the time that work takes on them, by instruction set and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch

from sennit.backends.cpu.instructions import PAIR_SETS, InstructionSet, instruction_set
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["kernel_configs"]

WIDE_STEP, NARROW_STEP = 128, 16  # keys
# Many rows share the packing of values; up to two vectors of rows are a kernel of their own.
WIDE_ROWS = (256, 128, 64, 32)
HEADS_TOGETHER = 8  # of a narrow tile: heads lie side by side in a page, and one of them alone takes 1.5 times as long


@dataclass(frozen=True)
class Speed:
    """What one core does in a microsecond, in thousands, measured by the benchmarks.

    Attributes:
        wide_pairs: floating-point operations of wide tiles of bfloat16, where the set multiplies pairs of them.
        narrow_pairs: the same of narrow tiles.
        floats: operations on floats.
        logits: logits made weights.
        packed: numbers of values packed for a wide tile.
        scattered: bytes read of scattered pages.
    """

    wide_pairs: float
    narrow_pairs: float
    floats: float
    logits: float
    packed: float
    scattered: float


SPEEDS = {  # the second is that of AMD's, whose vectors of 512 bits multiply once a cycle; Intel's servers do twice
    "amx": Speed(1000, 145, 145, 4, 22, 12),
    "avx512_bf16": Speed(230, 130, 90, 6.5, 22, 18),
    "avx512": Speed(145, 145, 145, 5, 22, 12),
    "avx2": Speed(70, 70, 70, 2, 11, 12),
    "neon": Speed(30, 30, 30, 1, 5, 12),
    "generic": Speed(15, 15, 15, 0.5, 3, 12),
}


def kernel_configs(spec: AttentionSpec, threads: int) -> tuple[KernelConfig, ...]:
    """One configuration for each height of wide tiles; narrow ones have as many rows as the kernel takes."""
    machine = instruction_set()
    pairs = machine.name in PAIR_SETS and spec.dtype == spec.kv_dtype == torch.bfloat16
    bytes_per_key = spec.kv_bytes_per_token // spec.num_kv_heads
    heads = gcd(spec.num_kv_heads, HEADS_TOGETHER)
    return _configs(machine, pairs, spec.head_dim_qk, spec.head_dim_vo, bytes_per_key, spec.group_size, heads, threads)


@cache
def _configs(
    machine: InstructionSet,
    pairs: bool,
    dim_qk: int,
    dim_vo: int,
    bytes_per_key: int,
    group_size: int,
    heads: int,
    threads: int,
) -> tuple[KernelConfig, ...]:
    speed = SPEEDS[machine.name]
    wide_rate, narrow_rate = (speed.wide_pairs, speed.narrow_pairs) if pairs else (speed.floats, speed.floats)
    narrow_rows = 8 if machine.name == "amx" and pairs else machine.lanes  # kNarrowRows of strands.h
    row = (dim_qk + dim_vo) * 2

    def wide(rows: int) -> Strand:
        weights = rows * WIDE_STEP * (row / wide_rate + 1 / speed.logits) / 1e3
        return Strand(
            "wide",
            rows,
            WIDE_STEP,
            item_time=2 + rows * (dim_qk + dim_vo) / speed.packed / 1e3,
            compute_time=weights + WIDE_STEP * dim_vo / speed.packed / 1e3,
            memory_time=WIDE_STEP * bytes_per_key / speed.scattered / 1e3,
            split_time=rows * dim_vo * 8 / speed.scattered / 1e3,
            row_step=2 * machine.lanes,
        )

    decoded = min(narrow_rows, 1 << (group_size - 1).bit_length())  # rows of a decode, as the kernel rounds them
    narrow = Strand(
        "narrow",
        narrow_rows,
        NARROW_STEP,
        item_time=1,
        compute_time=NARROW_STEP * narrow_rows * row / narrow_rate / 1e3,
        memory_time=NARROW_STEP * bytes_per_key / speed.scattered / 1e3,
        split_time=decoded * dim_vo * 8 / speed.scattered / 1e3,
        row_step=min(4, narrow_rows),
        heads=heads,
    )
    name = machine.name if pairs or machine.name not in PAIR_SETS else "avx512"
    return tuple(KernelConfig(f"{name}-{rows}x{threads}", (wide(rows), narrow), threads) for rows in WIDE_ROWS)
