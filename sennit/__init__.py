"""Sennit: the attention of a whole LLM serving step in one call, over a paged KV cache."""

from __future__ import annotations

from sennit.attention import BatchAttention
from sennit.errors import (
    BackendUnavailable,
    BuildFailed,
    BuildUnavailable,
    CacheCorrupt,
    CapacityExceeded,
    FetchFailed,
    IncompleteStep,
    InvalidInput,
    ModelNotFound,
    OutOfPages,
    PagesReleased,
    PlanMismatch,
    RequestFailed,
    SennitError,
    StalePlan,
    StepClosed,
    StepOpen,
    UnknownSequence,
    UnsupportedFeature,
    UnsupportedModel,
)
from sennit.kvcache import KVCache
from sennit.plan.batch import Batch
from sennit.plan.buffers import PlanBuffers
from sennit.plan.mask import pack_mask
from sennit.plan.plan import Plan
from sennit.plan.tree import Tree
from sennit.spec import AttentionSpec
from sennit.states import merge_states

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BackendUnavailable",
    "Batch",
    "BatchAttention",
    "BuildFailed",
    "BuildUnavailable",
    "CacheCorrupt",
    "CapacityExceeded",
    "FetchFailed",
    "IncompleteStep",
    "InvalidInput",
    "KVCache",
    "ModelNotFound",
    "OutOfPages",
    "PagesReleased",
    "Plan",
    "PlanBuffers",
    "PlanMismatch",
    "RequestFailed",
    "SennitError",
    "StalePlan",
    "StepClosed",
    "StepOpen",
    "Tree",
    "UnknownSequence",
    "UnsupportedFeature",
    "UnsupportedModel",
    "merge_states",
    "pack_mask",
]
