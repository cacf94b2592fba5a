"""Which instruction set the kernels are compiled for, and the compiler flags that say so."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache

from sennit.env import cpu_isa
from sennit.errors import BuildUnavailable
from sennit.jit import Toolchain, find_toolchain

__all__ = ["PAIR_SETS", "InstructionSet", "instruction_set"]

# From the most able to the least; a machine without any of them runs plain C++.
ORDER = ("amx", "avx512_bf16", "avx512", "avx2", "neon")
PAIR_SETS = ("amx", "avx512_bf16")  # that multiply pairs of bfloat16
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set of this machine.

    Attributes:
        name: one of "amx", "avx512_bf16", "avx512", "avx2", "neon" and "generic".
        flags: what the compiler is told.
        lanes: floats of a vector register.
    """

    name: str
    flags: tuple[str, ...]
    lanes: int


def instruction_set() -> InstructionSet:
    """The best instruction set of this machine, or the one that ``SENNIT_CPU_ISA`` names.

    Raises:
        BuildUnavailable: there is no compiler, or the machine lacks what the variable names.
    """
    return _find(cpu_isa(), find_toolchain())


@cache
def _find(wanted: str | None, toolchain: Toolchain) -> InstructionSet:
    features = toolchain.features
    if "amx" in features and not _matrix_registers_granted():
        features = features - {"amx"}
    here = [name for name in ORDER if name in features] + ["generic"]
    if wanted is not None and wanted not in here:
        raise BuildUnavailable(f"SENNIT_CPU_ISA asks for {wanted!r}, and this machine has {', '.join(here)}")
    name = wanted or here[0]
    defined = {"amx": ("-DSENNIT_AMX",), "avx512_bf16": ("-DSENNIT_BF16_DOTS",)}.get(name, ())
    x86 = {"avx2": ("-march=haswell",), "generic": ("-march=x86-64",)}
    arm = {"generic": ()}
    lower = x86 if toolchain.target.startswith(("x86_64", "amd64")) else arm
    lanes = 16 if name in ("amx", "avx512_bf16", "avx512") else 8 if name == "avx2" else 4
    return InstructionSet(name, (*lower.get(name, toolchain.native), *defined), lanes)


def _matrix_registers_granted() -> bool:
    """Ask Linux for the matrix registers of AMX, which a process may use only after that."""
    if sys.platform != "linux":
        return False
    syscall = ctypes.CDLL(None).syscall
    return int(syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) == 0
