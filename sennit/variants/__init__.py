"""User functions that change scores or mask keys, traced into graphs that every backend prints."""

from sennit.variants.graph import Graph
from sennit.variants.library import alibi, causal, document, prefix_lm, relative_bias, sliding_window, soft_cap
from sennit.variants.nodes import Capture, Kind, Node
from sennit.variants.trace import trace

__all__ = [
    "Capture",
    "Graph",
    "Kind",
    "Node",
    "alibi",
    "causal",
    "document",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "soft_cap",
    "trace",
]
