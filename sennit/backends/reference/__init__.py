"""The reference backend: PyTorch only, any device; it defines what is right."""

from sennit.backends.reference.backend import ReferenceBackend

__all__ = ["BACKEND", "ITEMS_BACKEND"]

BACKEND = ReferenceBackend("reference", by_items=False)
ITEMS_BACKEND = ReferenceBackend("reference-items", by_items=True)
