"""The Hopper backend: one persistent kernel in which both strands share every SM."""

from sennit.backends.hopper.backend import HopperBackend

__all__ = ["BACKEND"]

BACKEND = HopperBackend()
