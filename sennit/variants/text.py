"""Writes a graph as an expression that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sennit.variants.nodes import Node

__all__ = ["expression"]

NAMED_FROM = 10  # nodes; a longer expression that is used twice gets a name
ATOM, UNARY = 9, 7
INFIX = {
    "mul": ("*", 6), "truediv": ("/", 6), "floordiv": ("//", 6), "mod": ("%", 6), "add": ("+", 5), "sub": ("-", 5),
    "and": ("&", 4), "xor": ("^", 3), "or": ("|", 2),
    "eq": ("==", 1), "ne": ("!=", 1), "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1),
}  # fmt: skip
PREFIX = {"neg": "-", "not": "~"}


def expression(nodes: Sequence[Node]) -> str:
    """The last node in Python's notation; long parts that it uses twice come before it, as ``t0 = ...;``."""
    uses = Counter(arg for node in nodes for arg in node.args)
    texts: list[tuple[str, int]] = []  # with the precedence of the outermost operation
    sizes: list[int] = []
    named: list[str] = []
    for place, node in enumerate(nodes):
        text = _text(node, [texts[arg] for arg in node.args])
        size = 1 + sum(sizes[arg] for arg in node.args)
        if uses[place] > 1 and size >= NAMED_FROM:
            named.append(f"t{len(named)} = {text[0]}; ")
            text, size = (f"t{len(named) - 1}", ATOM), 1
        texts.append(text)
        sizes.append(size)
    return "".join(named) + texts[-1][0]


def _text(node: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    if node.op in INFIX:
        sign, level = INFIX[node.op]
        # Comparisons do not associate in Python; the others do to the left.
        left = _within(args[0], level + (level == 1))
        return f"{left} {sign} {_within(args[1], level + 1)}", level
    if node.op in PREFIX:
        return PREFIX[node.op] + _within(args[0], UNARY), UNARY
    if node.op == "const":
        return repr(node.value), ATOM
    listed = ", ".join(text for text, _ in args)
    if node.op == "index":
        return f"{node.value}[{listed}]" if args else str(node.value), ATOM
    if node.op == "cast":
        return f"{str(node.dtype).removeprefix('torch.')}({listed})", ATOM
    return f"{node.op}({listed})" if args else node.op, ATOM


def _within(text: tuple[str, int], level: int) -> str:
    return text[0] if text[1] >= level else f"({text[0]})"
