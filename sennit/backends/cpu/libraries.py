"""The compiled libraries of this backend: attention for two dtypes, a cache's copies, linear layers, user functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sennit import jit
from sennit.backends.cpu.instructions import PAIR_SETS, instruction_set
from sennit.backends.cpu.printing import graph_source
from sennit.env import cpu_isa
from sennit.errors import BuildUnavailable
from sennit.spec import AttentionSpec

__all__ = [
    "ELEMENTS",
    "attention_source",
    "cache_source",
    "check_libraries",
    "function",
    "graph_address",
    "linear_source",
    "warm_sources",
]

CSRC = Path(__file__).parent / "csrc"
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}  # their names in C++


def attention_source(dtype: torch.dtype, kv_dtype: torch.dtype) -> jit.Source:
    """Attention for queries and outputs of ``dtype`` and keys and values of ``kv_dtype``."""
    defined = (f"-DSENNIT_QUERY={ELEMENTS[dtype]}", f"-DSENNIT_STORED={ELEMENTS[kv_dtype]}")
    purpose = " / ".join(str(each).removeprefix("torch.") for each in dict.fromkeys([dtype, kv_dtype]))
    return jit.Source.in_folder(
        CSRC, "cpu-attention", ("wide.cpp", "narrow.cpp", "attention.cpp"), (*instruction_set().flags, *defined),
        purpose=purpose,
    )  # fmt: skip


def cache_source() -> jit.Source:
    """Appends and copies of pages."""
    return jit.Source.in_folder(CSRC, "cpu-cache", ("cache.cpp",), instruction_set().flags)


def linear_source() -> jit.Source:
    """Linear layers of few rows in bfloat16, for processors that multiply pairs of them."""
    return jit.Source.in_folder(CSRC, "cpu-linear", ("linear.cpp",), instruction_set().flags)


def warm_sources() -> list[jit.Source]:
    """What most models need."""
    usual = [attention_source(dtype, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    return [*usual, cache_source(), *([linear_source()] if instruction_set().name in PAIR_SETS else [])]


def check_libraries() -> None:
    """Check that libraries can be built, or else are there for one pair of dtypes at least; nothing is built for it.

    Raises:
        BuildUnavailable: neither, or the machine lacks what ``SENNIT_CPU_ISA`` names, or their source cannot be read.
    """
    _check(jit.surroundings(), cpu_isa())


@cache
def _check(surroundings: tuple[str | None, ...], isa: str | None) -> None:
    """Where they last, what they decide does too: every plan asks."""
    instruction_set()
    copies = cache_source()
    try:
        jit.check_buildable()
    except BuildUnavailable:
        pairs = (attention_source(*pair) for pair in product(ELEMENTS, repeat=2))
        if not (jit.find(copies) and any(map(jit.find, pairs))):
            raise


@cache
def function(source: jit.Source, name: str) -> Callable[..., Any]:
    """A function of a library, which is built if that is needed."""
    found: Callable[..., Any] = jit.load(source)[name]
    return found


@cache
def graph_address(spec: AttentionSpec) -> int:
    """Address of the function that computes a spec's ``score_mod`` and ``mask_mod``; 0 where it has neither."""
    if spec.score_mod is None and spec.mask_mod is None:
        return 0
    return int(jit.load(graph_source(spec))["graph_function"]())
