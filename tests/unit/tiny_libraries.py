"""A source that compiles in a moment, and a compiler that counts, waits or fails, for the tests of ``sennit.jit``."""

from __future__ import annotations

import shutil

from sennit import jit

# One function of tvm_ffi's calling convention, without its C++ headers: it compiles in a moment.
TINY = """
#include <tvm/ffi/c_api.h>
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_answer(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = ANSWER;
  return 0;
}
"""


def tiny(answer=42, *, name="tiny", headers=None, flags=()):
    """A source whose library has a function ``answer()``."""
    text = f"#define ANSWER {answer}\n{TINY}"
    return jit.Source(name, (("tiny.cpp", text),), headers, tuple(flags))


class Compiler:
    """A script for ``CXX``: it writes its arguments down, does something, and then becomes the real compiler."""

    def __init__(self, folder):
        self.path, self.log = folder / "compiler", folder / "compiler.log"
        self.does("")

    def does(self, what, *, when="*"):
        """Run a line of shell first, where the arguments match a pattern, such as ``"*-c*"`` for compiling."""
        real = shutil.which("c++")
        self.path.write_text(
            f'#!/bin/sh\necho "$*" >> {self.log}\ncase "$*" in {when}) :; {what}\n;; esac\nexec {real} "$@"\n'
        )
        self.path.chmod(0o755)

    @property
    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def units(self):
        """How many translation units it has compiled."""
        return sum(" -c " in line for line in self.calls)
