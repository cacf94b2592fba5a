"""FlashInfer's paged wrappers as a backend, asked for by name: a second opinion, and a way to compare."""

from __future__ import annotations

from sennit.backends.flashinfer.backend import FlashInferBackend

__all__ = ["BACKEND"]

BACKEND = FlashInferBackend()
