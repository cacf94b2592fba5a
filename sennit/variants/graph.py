"""The expression graph of a user's score or mask function: what backends print, and specs compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from sennit.variants.nodes import Capture, Kind, Node
from sennit.variants.promotion import typed
from sennit.variants.text import expression

__all__ = ["Graph"]


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """What a ``score_mod`` or ``mask_mod`` computes for one pair of a query and a key.

    Equal where they compute the same by the same operations; ``name`` does not count. Made by
    :func:`~sennit.variants.trace`; picklable.

    Attributes:
        kind: ``"score"``: gives a number from ``score, b, h, q_idx, kv_idx``; ``"mask"``: gives a bool from the latter
            four.
        nodes: see :class:`Node`; arguments come before what uses them, each value once, and the last is the result.
        name: of the function.

    >>> from sennit.variants import trace
    >>> graph = trace(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 8), "mask")
    >>> print(graph)
    (q_idx >= kv_idx) & (q_idx - kv_idx <= 8)
    >>> graph.captures, len(graph.nodes)
    ((), 7)
    """

    kind: Kind
    nodes: tuple[Node, ...]
    name: str = field(default="")

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The tensors that it reads, by name."""
        reads = {node.value: node for node in self.nodes if node.op == "index"}
        return tuple(Capture(str(name), reads[name].dtype, len(reads[name].args)) for name in sorted(reads, key=str))

    @cached_property
    def key(self) -> str:
        """Short text, equal exactly for equal graphs, in every process."""
        text = repr((self.kind, [node.identity for node in self.nodes]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def typed(self, score_dtype: torch.dtype = torch.float32) -> tuple[Node, ...]:
        """The nodes with every conversion of dtypes written out: what a backend prints, with no rule of promotion.

        Constants have the dtype in which they are used; the value has all digits of the Python number and is rounded
        once, to that dtype. Arguments have the dtype of their node, but for the condition of ``where`` (bool), the two
        sides of a comparison (one dtype, int32 for an order of bools), the argument of ``cast``, and indices (int32 or
        int64). Bools only meet in comparisons for equality, and, or, xor, not and where. Arithmetic of float16 and
        bfloat16 is done in float32 and cast back, as PyTorch does it. The last node is bool for masks, ``score_dtype``
        for scores.

        Args:
            score_dtype: in which the score is given: float32 or float64. Values that depend on it follow, those that do
                not stay as they are.

        >>> from sennit.variants import trace
        >>> for node in trace(lambda score, b, h, q_idx, kv_idx: score + 0.5 * h, "score").typed():
        ...     print(node.op, node.dtype, node.args, node.value)
        score torch.float32 () None
        const torch.float32 () 0.5
        h torch.int32 () None
        cast torch.float32 (2,) None
        mul torch.float32 (1, 3) None
        add torch.float32 (0, 4) None
        """
        return _typed(self, score_dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return expression(self.nodes)

    def __repr__(self) -> str:
        return f"<{self.name}: {self}>" if self.name else f"<{self}>"


@lru_cache(maxsize=1024)
def _typed(graph: Graph, score_dtype: torch.dtype) -> tuple[Node, ...]:
    return typed(graph.nodes, score_dtype, torch.bool if graph.kind == "mask" else score_dtype)
