"""An example kernel configuration, for planning and for timing the planner where there is no GPU."""

from __future__ import annotations

from typing import Literal

from sennit.plan.cost import KernelConfig, Strand

__all__ = ["example_config"]


def example_config(num_workers: int = 132, combine: Literal["sum", "max"] = "max") -> KernelConfig:
    """The two strands of a persistent kernel on an H200, with times from its data sheet rather than from a kernel.

    An H200 has 132 SMs; 4.2 TB/s of memory bandwidth and 600 TFLOP/s of bfloat16 are divided over them. With head
    dimension 128 in bfloat16 a key step of 64 keys brings 32 KiB of keys and values for one KV head: 1.03 us on one SM.
    128 query rows times 128 keys take 2 * 2 * 128**3 = 8.4 MFLOP: 1.85 us. The times of an item, of a split and of a
    narrow tile's arithmetic are round numbers of the right size.

    Args:
        num_workers: SMs; times stay those of one of 132.
        combine: how the strands share a worker: ``"max"`` side by side, ``"sum"`` one after the other.

    >>> config = example_config(combine="sum")
    >>> config.num_workers, [strand.name for strand in config.strands]
    (132, ['wide', 'narrow'])
    """
    wide = Strand("wide", 128, 128, item_time=1.0, compute_time=1.85, memory_time=2.06, split_time=1.0)
    narrow = Strand("narrow", 16, 64, item_time=0.5, compute_time=0.4, memory_time=1.03, split_time=0.4)
    return KernelConfig(f"example-{combine}", (wide, narrow), num_workers, combine)
