"""Hugging Face models on Sennit: ``attn_implementation="sennit"``, continuous batching, ``generate`` and ``stream``."""

from __future__ import annotations

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("sennit.hf needs transformers 5.16 or newer: pip install 'sennit[hf]'") from error

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 16):
    raise ImportError(
        f"sennit.hf needs transformers 5.16 or newer, found {transformers.__version__}: pip install -U 'sennit[hf]'"
    )

from sennit.hf.attention import register
from sennit.hf.batcher import Batcher
from sennit.hf.forward import step_keywords
from sennit.hf.generation import generate, stream
from sennit.hf.loading import load
from sennit.hf.models import check_supported, layer_specs
from sennit.hf.requests import Completion, Event
from sennit.hf.sampling import Sampling
from sennit.hf.stats import BatcherStats

__all__ = [
    "Batcher",
    "BatcherStats",
    "Completion",
    "Event",
    "Sampling",
    "check_supported",
    "generate",
    "layer_specs",
    "load",
    "step_keywords",
    "stream",
]

register()
