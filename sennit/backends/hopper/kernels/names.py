"""Names of Gluon that differ between releases of Triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["copy_box", "synchronize"]

copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # of the warps of a partition
