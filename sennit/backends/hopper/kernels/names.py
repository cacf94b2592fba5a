"""Names of Gluon that differ between releases of Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["as_shape", "copy_box", "copy_rows", "synchronize"]

copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # of the warps of a partition
PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def as_shape(memory, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory, looked at as of another shape."""
    if PUBLIC:
        found = memory.reinterpret(memory.dtype, shape, layout)
    else:
        found = memory._reinterpret(memory.dtype, shape, layout)
    return found
