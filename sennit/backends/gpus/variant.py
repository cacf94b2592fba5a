"""What every attention kernel is compiled for: what its layer computes, and how pages lie."""

from __future__ import annotations

import inspect
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sennit.backends.base import Attend
from sennit.jit.files import hash_bytes
from sennit.plan.tensors import Header, PlanArrays

__all__ = ["LayerVariant", "has_trees", "layer_facts"]


@dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """What is known of a layer when a kernel is compiled.

    Attributes:
        group_size: query heads per KV head.
        dim_qk, dim_vo: columns of queries and keys, and of values.
        page_size: tokens a page; None: keys are packed rows.
        window_left, window_right, num_sink_tokens, logits_soft_cap: see ``AttentionSpec``.
        trees: segments may have token trees.
        source: of the classes that tell kernels what follows from all this. Triton keeps kernels on disk by the code of
            their functions and by these fields; of properties it knows nothing.
    """

    group_size: int
    dim_qk: int
    dim_vo: int
    page_size: int | None
    window_left: int | None
    window_right: int | None
    num_sink_tokens: int
    logits_soft_cap: float | None
    trees: bool
    source: str = field(init=False)
    _source: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Read when it is imported, as what runs was; a file may be replaced under a process that runs."""
        super().__init_subclass__()
        modules = dict.fromkeys(kind.__module__ for kind in cls.__mro__[:-1])
        cls._source = hash_bytes("".join(map(_source_of, modules)).encode())

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self._source)


def _source_of(module: str) -> str:
    """A module's text; where there is none, as in an interactive session, something that no kernel was kept by."""
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return secrets.token_hex()


def layer_facts(launch: Attend) -> dict[str, Any]:
    """The fields of :class:`LayerVariant` for a launch."""
    spec = launch.spec
    return {
        "group_size": spec.group_size,
        "dim_qk": spec.head_dim_qk,
        "dim_vo": spec.head_dim_vo,
        "page_size": launch.page_size,
        "window_left": spec.window_left,
        "window_right": spec.window_right,
        "num_sink_tokens": spec.num_sink_tokens,
        "logits_soft_cap": spec.logits_soft_cap,
        "trees": has_trees(launch.arrays),
    }


def has_trees(arrays: PlanArrays) -> bool:
    """Whether some segment of a plan has a token tree."""
    return arrays[Header.TREES_AT] < arrays[Header.TABLE_AT]
