"""Pauses of random length, for tests: results may not depend on which warps are late."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["pause"]

# A warp in four sleeps for up to some microseconds, by the low bits of its clock.
PAUSE = gl.constexpr("""{
    .reg .u32 number, chance;
    .reg .pred sleeps;
    mov.u32 number, %clock;
    mul.lo.u32 number, number, 2654435761;
    and.b32 chance, number, 0x60000;
    setp.eq.u32 sleeps, chance, 0;
    shr.u32 number, number, 20;
    @sleeps nanosleep.u32 number;
    mov.u32 $0, number;
}""")


@gluon.jit
def pause(variant: gl.constexpr):
    """Maybe, in variants with pauses; nothing in others."""
    if variant.pauses:
        gl.inline_asm_elementwise(PAUSE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
