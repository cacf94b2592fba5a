"""Which C++ compiler there is, what it says of itself and of this processor, and how it is called."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from sennit.env import library_dir
from sennit.errors import BuildUnavailable
from sennit.jit.files import hash_bytes, read_object, write_atomically
from sennit.jit.processes import Finished, run

__all__ = ["INSTALL", "NAMES", "Toolchain", "find_toolchain"]

T = TypeVar("T")

NAMES = ("c++", "g++", "clang++")
INSTALL = (
    "install g++ 10 or newer, or clang 14 or newer (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
    "macOS: xcode-select --install), or name one in CXX"
)
ANSWER = 60.0  # seconds in which a compiler must say what it is
STANDARD = "-std=c++20"

# Sums may be fused, but NaN and infinities keep their meaning: -ffast-math is no option here.
COMPILE = (
    STANDARD,
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
LINK = ("-shared", "-fPIC", "-pthread")
# Linux binds functions late by default, and a missing one would end the process at its first call.
LINK_LINUX = ("-Wl,-z,now",)

# An instruction set counts where all of its macros are defined.
MACROS = {
    "amx": ("__AMX_BF16__", "__AMX_TILE__"),
    "avx512_bf16": ("__AVX512BF16__",),
    "avx512": ("__AVX512F__", "__AVX512BW__", "__AVX512DQ__", "__AVX512VL__"),
    "avx2": ("__AVX2__", "__FMA__", "__F16C__"),
    "neon": ("__ARM_NEON",),
}


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler that can build libraries for the processor that it runs on.

    Attributes:
        compiler: the program.
        arguments: words behind it in ``CXX``, as in ``CXX="ccache g++"``.
        version: first line of what it says of its version.
        target: the platform that it builds for, such as ``"x86_64-linux-gnu"``.
        native: the flags that allow all instructions of this processor.
        features: instruction sets that ``native`` allows, of "amx", "avx512_bf16", "avx512", "avx2" and "neon".
        macros: a hash of all macros that ``native`` predefines.
    """

    compiler: Path
    arguments: tuple[str, ...]
    version: str
    target: str
    native: tuple[str, ...]
    features: frozenset[str]
    macros: str

    @property
    def command(self) -> tuple[str, ...]:
        """The words by which the compiler is started."""
        return (str(self.compiler), *self.arguments)

    def compile(
        self, unit: str, output: str, *, includes: Sequence[str], system: Sequence[str], flags: Sequence[str]
    ) -> list[str]:
        """Return the command that compiles one translation unit to an object file."""
        folders = [f"-I{folder}" for folder in includes]
        foreign = [word for folder in system for word in ("-isystem", folder)]
        return [*self.command, *COMPILE, *folders, *foreign, *flags, "-c", unit, "-o", output]

    def link(self, objects: Sequence[str], output: str, *, libraries: Sequence[str], flags: Sequence[str]) -> list[str]:
        """Return the command that links object files and shared libraries, given by path, to a library."""
        found = [word for path in libraries for word in (f"-L{os.path.dirname(path)}", f"-l{_plain_name(path)}")]
        usual = [*LINK, *(LINK_LINUX if sys.platform == "linux" else ())]
        return [*self.command, *usual, *flags, *objects, *found, "-o", output]


def find_toolchain() -> Toolchain:
    """Return the compiler that ``CXX`` names, or else the first of ``c++``, ``g++`` and ``clang++`` that is usable.

    What a compiler said is remembered, in this process and in the cache folder.

    Raises:
        BuildUnavailable: there is none, or none knows C++20; the text lists what was tried.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath), library_dir())


@cache
def _find(cxx: str, path: str, folder: Path) -> Toolchain:
    if sys.platform == "win32":
        raise BuildUnavailable("libraries cannot be built on Windows yet; WSL has Linux")
    reasons = []
    for words in _candidates(cxx, path):
        try:
            return _remembered(words, folder) or _ask(words, folder)
        except BuildUnavailable as error:
            reasons.append(str(error))
    raise BuildUnavailable(f"no usable C++ compiler: {'; '.join(reasons)}; {INSTALL}")


def _candidates(cxx: str, path: str) -> list[tuple[str, ...]]:
    """Commands that may be compilers, each with the whole path of its program."""
    if cxx.strip():
        try:
            name, *arguments = shlex.split(cxx)
        except ValueError as error:
            raise BuildUnavailable(f"no C++ compiler: CXX is {cxx!r}: {error}; {INSTALL}") from None
        if found := shutil.which(name, path=path):
            return [(os.path.abspath(found), *arguments)]
        raise BuildUnavailable(f"no C++ compiler: CXX is {cxx!r}, and there is no such program; {INSTALL}")
    programs = [os.path.abspath(found) for name in NAMES if (found := shutil.which(name, path=path))]
    if not programs:
        raise BuildUnavailable(f"no C++ compiler: CXX is not set, and {', '.join(NAMES)} are not on PATH; {INSTALL}")
    return [(program,) for program in programs]


def _ask(words: tuple[str, ...], folder: Path) -> Toolchain:
    """Ask a compiler for its version, its target and its macros, and remember what it said."""
    version = _first_line(_say(words, "--version"))
    target = _say(words, "-dumpmachine").strip()
    native, macros = _native(words, version)
    defined = [line.split() for line in macros if line.startswith("#define ")]
    if any(len(line) < 2 for line in defined):
        raise BuildUnavailable(f"{shlex.join(words)} ({version}) defines a macro without a name")
    names = {line[1] for line in defined}
    made = Toolchain(
        compiler=Path(words[0]),
        arguments=words[1:],
        version=version,
        target=target,
        native=native,
        features=frozenset(name for name, needed in MACROS.items() if names.issuperset(needed)),
        macros=hash_bytes("\n".join(macros).encode()),
    )
    with suppress(OSError):  # a cache that cannot be written costs the time of asking again
        _remember(made, folder)
    return made


def _native(words: tuple[str, ...], version: str) -> tuple[tuple[str, ...], list[str]]:
    """The flags that this compiler takes for "all that this processor has", and the macros that they define."""
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    # On x86, -mcpu is an old name of -mtune and allows no instructions; on Arm, -march leaves the tuning out.
    choices: tuple[tuple[str, ...], ...] = (("-march=native",),) if x86 else (("-mcpu=native",), ("-march=native",))
    for native in (*choices, ()):
        # With a header of C++20, since a compiler without one is of no use.
        answer = _answer(words, *native, STANDARD, "-dM", "-E", "-include", "bit", "-x", "c++", os.devnull)
        if answer.status == 0:
            return native, sorted(answer.printed.splitlines())
    raise BuildUnavailable(f"{shlex.join(words)} ({version}) has no C++20: {_first_line(answer.output)}")


def _say(words: tuple[str, ...], option: str) -> str:
    """What a compiler prints when asked for something that every compiler knows."""
    answer = _answer(words, option)
    if answer.status != 0 or not answer.printed.strip():
        raise BuildUnavailable(f"{shlex.join(words)} {option} failed: {_first_line(answer.output)}")
    return answer.printed


def _answer(words: tuple[str, ...], *options: str) -> Finished:
    try:
        return run((*words, *options), limit=ANSWER)
    except OSError as error:  # TimeoutError is one
        raise BuildUnavailable(f"{shlex.join(words)} cannot be run: {error.strerror or error}") from error


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it said nothing")


def _plain_name(library: str) -> str:
    return os.path.basename(library).removeprefix("lib").partition(".")[0]


def _remembered(words: tuple[str, ...], folder: Path) -> Toolchain | None:
    """What the cache folder holds of this very compiler on this very processor."""
    try:
        stored = read_object(_memory(words, folder))
        texts = {name: _checked(stored[name], str) for name in ("version", "target", "macros")}
        lists = {
            name: [_checked(word, str) for word in _checked(stored[name], list)] for name in ("native", "features")
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Toolchain(
        compiler=Path(words[0]),
        arguments=words[1:],
        native=tuple(lists["native"]),
        features=frozenset(lists["features"]),
        **texts,
    )


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _remember(toolchain: Toolchain, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = asdict(toolchain) | {"compiler": str(toolchain.compiler), "features": sorted(toolchain.features)}
    write_atomically(_memory(toolchain.command, folder), json.dumps(stored, indent=2) + "\n")


def _memory(words: tuple[str, ...], folder: Path) -> Path:
    """The file for what a compiler said: named by the programs in its command as they are now, and by the processor."""
    programs = []
    for word in words:
        if found := shutil.which(word):
            about = os.stat(found)
            programs.append((os.path.realpath(found), about.st_size, about.st_mtime_ns))
    identity = json.dumps([words, programs, _processor()])
    return folder / f".compiler-{hash_bytes(identity.encode())}.json"


def _processor() -> str:
    """What tells this processor from others: Linux's account of the first one, or else its name."""
    lines = []
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if not line.strip():  # the others are alike, and there may be hundreds
                    break
                if line.startswith(("model name", "flags", "Features", "CPU ")):
                    lines.append(line)
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "".join(lines)
