"""Tile shapes of the kernels, and the time that work takes on them, by instruction set and dtype."""

from __future__ import annotations

from functools import cache

import torch

from sennit.backends.cpu.instructions import instruction_set
from sennit.plan.cost import KernelConfig, Strand

__all__ = ["kernel_configs"]

WIDE_STEP, NARROW_STEP = 128, 16  # keys
WIDE_ROWS = (256, 64)
BYTES_PER_US = 12e3  # that one core reads of scattered pages
FLOPS_PER_US = {"amx": 600e3, "avx512_bf16": 450e3, "avx512": 120e3, "avx2": 60e3, "neon": 25e3, "generic": 12e3}


@cache
def kernel_configs(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim_qk: int, dim_vo: int, latent: bool, threads: int
) -> tuple[KernelConfig, ...]:
    """Configurations with tiles for many rows and for fewer; narrow tiles have as many as a register has lanes."""
    machine = instruction_set()
    pairs = machine.name in ("amx", "avx512_bf16") and dtype == kv_dtype == torch.bfloat16
    plain = machine.name if machine.name not in ("amx", "avx512_bf16") else "avx512"
    dims, bytes_per_key = dim_qk + dim_vo, (dim_qk + (0 if latent else dim_vo)) * kv_dtype.itemsize

    def strand(name: str, rows: int, step: int, flops: float, item: float) -> Strand:
        return Strand(
            name,  # type: ignore[arg-type]
            rows,
            step,
            item_time=item,
            compute_time=2 * rows * step * dims / flops,
            memory_time=step * bytes_per_key / BYTES_PER_US,
            split_time=rows * dim_vo * 8 / BYTES_PER_US,
        )

    narrow = strand("narrow", machine.lanes, NARROW_STEP, FLOPS_PER_US[plain], 2.0)
    return tuple(
        KernelConfig(
            f"{machine.name}-{rows}x{threads}",
            (strand("wide", rows, WIDE_STEP, FLOPS_PER_US[machine.name if pairs else plain], rows * 0.05), narrow),
            num_workers=threads,
        )
        for rows in WIDE_ROWS
    )
