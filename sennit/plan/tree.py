"""Token trees: pending tokens of which each sees its ancestors and itself, for speculative verification."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.errors import InvalidInput
from sennit.plan.integers import host_integers

__all__ = ["Tree", "read_trees"]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

MAX_NODES = 4096  # ancestors are a square matrix


class Tree:
    """The tree that a request's last ``len(parents)`` keys form; those before them are committed.

    A node sees all committed keys, its ancestors and itself. Its position, as a query and as a key, is the number of
    committed keys plus its depth; windows, ALiBi and functions of positions use that.

    Args:
        parents: of every node, in the order in which their keys are stored: the index of its parent, which comes before
            it, or -1 where it follows the last committed key.

    Raises:
        InvalidInput: ``parents`` are not host integers, are more than 4096, or one does not come before its node.

    >>> tree = Tree([-1, 0, 0, 1])  # a root, its two children, and a child of the first of these
    >>> tree.depths.tolist()
    [0, 1, 1, 2]
    >>> tree.ancestors.astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """

    def __init__(self, parents: Any) -> None:
        given = host_integers("parents", parents).astype(np.int64)
        wrong = np.flatnonzero((given < -1) | (given >= np.arange(len(given))))
        if len(wrong):
            node = int(wrong[0])
            raise InvalidInput(
                f"parents[{node}]", expected=f"an earlier node, -1 to {node - 1}", got=int(given[node]),
                hint="-1 marks a node that follows the last committed token",
            )  # fmt: skip
        if len(given) > MAX_NODES:
            raise InvalidInput("parents", expected=f"at most {MAX_NODES} nodes", got=len(given))
        given.setflags(write=False)
        self._parents: Int64Array = given
        self._words: dict[int, Int32Array] = {}

    @property
    def parents(self) -> Int64Array:
        """int64 ``[nodes]``, read-only."""
        return self._parents

    def __len__(self) -> int:
        return len(self.parents)

    def __repr__(self) -> str:
        return f"Tree({self.parents.tolist()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and np.array_equal(self.parents, other.parents)

    def __hash__(self) -> int:
        return hash(self.parents.tobytes())

    @cached_property
    def ancestors(self) -> npt.NDArray[np.bool_]:
        """bool ``[nodes, nodes]``: whether the row's node sees the column's."""
        sees = np.eye(len(self), dtype=bool)
        above = self.parents.copy()
        while len(nodes := np.flatnonzero(above >= 0)):  # each round doubles how far up the rows have looked
            sees[nodes] |= sees[above[nodes]]
            above[nodes] = above[above[nodes]]
        sees.setflags(write=False)
        return sees

    @cached_property
    def depths(self) -> Int64Array:
        """int64 ``[nodes]``: ancestors of each node, itself not counted."""
        depths: Int64Array = self.ancestors.sum(axis=1, dtype=np.int64) - 1
        depths.setflags(write=False)
        return depths

    @property
    def row_words(self) -> int:
        """int32 words of a node's bits in :meth:`words`."""
        return -(-len(self) // 32)

    def words(self, q_len: int) -> Int32Array:
        """The tree for kernels, as int32 words: the depth of every node, then the bits of each of the last ``q_len``.

        Bit ``j % 32`` of word ``j // 32`` of a node's :attr:`row_words` words says whether it sees node ``j``.
        """
        if q_len in self._words:
            return self._words[q_len]
        bits = np.zeros((q_len, 32 * self.row_words), bool)
        bits[:, : len(self)] = self.ancestors[len(self) - q_len :]
        packed = np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)
        words = np.concatenate([self.depths.astype(np.int32), packed.view(np.int32).ravel()])
        words.setflags(write=False)
        return self._words.setdefault(q_len, words)


def read_trees(
    trees: Sequence[Tree | None] | None, q_lens: Int64Array, kv_lens: Int64Array, causal: Int64Array
) -> list[Tree | None]:
    """One tree or None a request, checked against lengths; empty where there is no tree at all.

    Raises:
        InvalidInput: a wrong type or count, a tree that has fewer nodes than its request has rows or more than it has
            keys, or a request that is not causal.
    """
    if trees is None:
        return []
    if isinstance(trees, Tree) or not isinstance(trees, Sequence) or isinstance(trees, (str, bytes)):
        raise InvalidInput("tree", expected="a list of one Tree or None a request", got=type(trees).__name__)
    if len(trees) != len(q_lens):
        raise InvalidInput("tree", expected=f"{len(q_lens)} entries, one a request", got=len(trees))
    for r, tree in enumerate(trees):
        if tree is None:
            continue
        if not isinstance(tree, Tree):
            raise InvalidInput(f"tree[{r}]", expected="a Tree or None", got=type(tree).__name__)
        if not q_lens[r] <= len(tree) <= kv_lens[r]:
            raise InvalidInput(
                f"tree[{r}]",
                expected=f"at least the request's {q_lens[r]} rows and at most its {kv_lens[r]} keys as nodes",
                got=f"{len(tree)} nodes",
                hint="a tree has all pending tokens of a request, of which the last are this step's rows",
            )
        if len(tree) and not causal[r]:
            raise InvalidInput("causal", expected=f"True for request {r}, which has a tree", got=False)
    return [tree if tree is not None and len(tree) else None for tree in trees] if any(trees) else []
