"""Attention on GPUs by portable Triton kernels, which also run in Triton's interpreter on a CPU."""

from sennit.backends.triton.backend import TritonBackend

__all__ = ["BACKEND"]

BACKEND = TritonBackend()
