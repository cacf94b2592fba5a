"""What backends with sums in float32 share: the dtypes that they take, and rows as their kernels read them."""

from __future__ import annotations

import torch

from sennit.backends.base import Support
from sennit.spec import AttentionSpec

__all__ = ["computed_in_float32", "dense_columns"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def computed_in_float32(spec: AttentionSpec) -> Support:
    """Whether float32 is enough for a spec's dtypes."""
    for field in ("dtype", "kv_dtype"):
        if (dtype := getattr(spec, field)) not in DTYPES:
            return Support.no(f"{field}={dtype} is not computed in float32, which is all that it has")
    return Support.yes()


def dense_columns(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, with the elements of a row next to each other."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
