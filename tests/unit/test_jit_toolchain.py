"""Which compiler is taken, what is known of it, and that importing tvm_ffi compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess

import pytest
import torch

from sennit import env, jit
from sennit.errors import BuildUnavailable, InvalidInput
from sennit.jit import runtime as importing
from sennit.jit import toolchain as finding


@pytest.fixture
def programs(tmp_path, monkeypatch, libraries):
    """Make this folder all of PATH, and give the function that puts a shell script into it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, text):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
        return folder / name

    return add


def pretending(macros="", *, version="g++ 12.2", refused="-none"):
    """A script that answers as a compiler would."""
    defines = "\n".join(f"echo '#define {name} 1'" for name in macros.split())
    return f"""
case "$*" in
*{refused}*) echo "g++: error: unrecognized command-line option '{refused}'"; exit 1;;
--version) echo '{version}'; echo 'more lines';;
-dumpmachine) echo some-machine;;
*) {defines or ":"}
;; esac"""


def forget():
    """As in a new process."""
    finding._find.cache_clear()


AVX512 = "__AVX512F__ __AVX512BW__ __AVX512DQ__ __AVX512VL__"


@pytest.mark.parametrize(
    ("macros", "features"),
    [
        ("", set()),
        ("__AVX2__ __FMA__", set()),
        ("__AVX2__ __FMA__ __F16C__", {"avx2"}),
        ("__AVX512F__ __AVX512BW__ __AVX512DQ__", set()),
        (AVX512, {"avx512"}),
        (f"{AVX512} __AVX512BF16__", {"avx512", "avx512_bf16"}),
        ("__AMX_BF16__", set()),
        ("__AMX_TILE__ __AMX_BF16__ __AMX_INT8__", {"amx"}),
        ("__ARM_NEON", {"neon"}),
    ],
)
def test_features_are_read_off_the_compilers_macros(programs, macros, features):
    programs("c++", pretending(macros))
    assert jit.find_toolchain().features == features


def test_a_toolchain_says_what_its_compiler_says(programs):
    path = programs("g++", pretending())
    found = jit.find_toolchain()
    assert (found.compiler, found.version, found.target) == (path, "g++ 12.2", "some-machine")
    assert len(found.native) == 1


def test_features_of_this_processor_are_those_that_its_compiler_really_allows(libraries):
    found = jit.find_toolchain()
    text = "\n".join(f"{name}:{' '.join(needed)}" for name, needed in finding.MACROS.items())
    for line in text.splitlines():
        name, _, needed = line.partition(":")
        program = "".join(f"#ifndef {macro}\n#error\n#endif\n" for macro in needed.split())
        command = [*found.command, *found.native, "-x", "c++", "-fsyntax-only", "-"]
        result = subprocess.run(command, input=program, text=True, capture_output=True, check=False)
        assert (result.returncode == 0) == (name in found.features)


def test_what_a_compiler_says_on_standard_error_is_no_answer(programs):
    def found(name, warning):
        programs(name, f"{warning}\n{pretending('__AVX2__ __FMA__ __F16C__')}")
        return dataclasses.replace(jit.find_toolchain(), compiler="")

    programs("c++", pretending(refused="--version"))  # and so the next are taken
    noisy = found("g++", 'echo "ccache: warning: process $$" >&2')
    forget()
    assert noisy == found("g++", ":")
    assert noisy.features == {"avx2"}


def test_a_macro_without_a_name_is_no_answer(programs):
    programs("c++", pretending().replace(") :", ") echo '#define '"))
    with pytest.raises(BuildUnavailable, match="defines a macro without a name"):
        jit.find_toolchain()


def test_a_compiler_that_knows_no_native_flag_is_used_without(programs):
    programs("c++", pretending("__AVX2__ __FMA__ __F16C__", refused="=native"))
    assert jit.find_toolchain().native == ()


def test_without_any_compiler_the_error_says_what_was_looked_for_and_what_to_install(programs):
    with pytest.raises(BuildUnavailable) as caught:
        jit.find_toolchain()
    for part in ("CXX", "c++", "g++", "clang++", "PATH", "apt install g++"):
        assert part in str(caught.value)


@pytest.mark.parametrize("cxx", ["no-such-compiler", "/no/such/compiler -m64", "'"])
def test_a_compiler_that_cxx_names_and_is_not_there_is_an_error_although_others_are(programs, monkeypatch, cxx):
    programs("c++", pretending())
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(BuildUnavailable) as caught:
        jit.find_toolchain()
    assert repr(cxx) in str(caught.value)


def test_a_compiler_too_old_for_cxx20_is_passed_over_with_its_reason(programs):
    programs("c++", pretending(version="g++ 9.4", refused="-std=c++20"))
    with pytest.raises(BuildUnavailable) as caught:
        jit.find_toolchain()
    assert "g++ 9.4" in str(caught.value)
    assert "unrecognized command-line option '-std=c++20'" in str(caught.value)
    newer = programs("clang++", pretending(version="clang 16"))
    assert jit.find_toolchain().compiler == newer


@pytest.mark.parametrize("text", ["exit 3", "echo", "echo broken; exit 1"])
def test_a_program_that_is_no_compiler_is_no_compiler(programs, text):
    path = programs("c++", text)
    with pytest.raises(BuildUnavailable, match=re.escape(f"{path} --version failed: ")):
        jit.find_toolchain()


def test_a_file_that_cannot_be_run_is_no_compiler(programs):
    path = programs("c++", "")
    path.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(BuildUnavailable, match=re.escape(f"{path} cannot be run: ")):
        jit.find_toolchain()


def test_cxx_may_have_words_behind_the_compiler(programs, monkeypatch):
    path = programs("wrapper", 'shift\nexec "$0/../real" "$@"'.replace('"$0/../real"', '"${0%/*}/real"'))
    programs("real", pretending())
    monkeypatch.setenv("CXX", "wrapper real")
    found = jit.find_toolchain()
    assert (found.compiler, found.arguments) == (path, ("real",))
    assert found.compile("a.cpp", "a.o", includes=[], system=[], flags=[])[:2] == [str(path), "real"]


def test_what_a_compiler_said_is_remembered_in_the_cache_until_it_changes(compiler, libraries):
    first = jit.find_toolchain()
    asked = len(compiler.calls)
    forget()
    assert jit.find_toolchain() == first
    assert len(compiler.calls) == asked
    compiler.does("echo changed", when="--version")
    forget()
    assert jit.find_toolchain().version == "changed"
    [memory, _] = sorted(libraries.glob(".compiler-*.json"), key=lambda path: "changed" not in path.read_text())
    whole = json.loads(memory.read_text())
    numbers = {"version": 1, "target": 2, "macros": 3, "native": 4, "features": 5}
    wrong = [{}, numbers, *(whole | {name: value} for name, value in numbers.items()), whole | {"native": "-march=x"}]
    for damage in ("", "[]", "[" * 200_000, *map(json.dumps, wrong)):
        memory.write_text(damage)
        forget()
        assert jit.find_toolchain() == dataclasses.replace(first, version="changed")
        assert json.loads(memory.read_text()) == whole


def test_another_processor_is_asked_about_anew(compiler, monkeypatch):
    jit.find_toolchain()
    asked = len(compiler.calls)
    monkeypatch.setattr(finding, "_processor", lambda: "flags: more")
    forget()
    jit.find_toolchain()
    assert len(compiler.calls) == 2 * asked


def test_a_compiler_that_never_answers_is_an_error(programs, monkeypatch):
    monkeypatch.setattr(finding, "ANSWER", 0.2)
    programs("c++", "/bin/sleep 1000")
    with pytest.raises(BuildUnavailable, match=r"cannot be run: no answer in 0\.2 s"):
        jit.find_toolchain()


def test_nan_and_infinity_keep_their_meaning(libraries, tmp_path):
    """The flags that every unit is compiled with must not let the compiler assume that there are none."""
    (tmp_path / "a.cpp").write_text("#if defined __FAST_MATH__ || __FINITE_MATH_ONLY__\n#error\n#endif\n")
    command = jit.find_toolchain().compile("a.cpp", "a.o", includes=[], system=[], flags=[])
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    assert "-O3" in command


@pytest.mark.parametrize(
    ("tensor", "extension", "setting", "seen"),
    [
        ({"__dlpack_c_exchange_api__": 1}, False, None, None),
        ({"__c_dlpack_exchange_api__": 1}, False, None, None),
        ({}, False, None, "1"),
        ({}, False, "0", "0"),
        ({}, False, "1", "1"),
        ({}, True, None, None),
    ],
)
def test_importing_tvm_ffi_compiles_no_extension_unless_the_user_asks(monkeypatch, tensor, extension, setting, seen):
    kind = type("Tensor", (), tensor)
    monkeypatch.setattr(torch, "Tensor", kind)
    monkeypatch.delenv(importing.SWITCH, raising=False)
    if setting is not None:
        monkeypatch.setenv(importing.SWITCH, setting)
    at_import = []

    def import_module(name):
        if name == "torch_c_dlpack_ext":
            if not extension:
                raise ImportError(name)
            kind.__dlpack_c_exchange_api__ = 1
        else:
            at_import.append(os.environ.get(importing.SWITCH))

    monkeypatch.setattr(importing.importlib, "import_module", import_module)
    importing.runtime.__wrapped__()
    assert at_import == [seen]
    assert os.environ.get(importing.SWITCH) == setting


@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "avx512", "avx2", "neon", "generic"])
def test_the_instruction_set_can_be_named(monkeypatch, isa):
    monkeypatch.setenv("SENNIT_CPU_ISA", isa)
    assert env.cpu_isa() == isa


def test_a_cache_folder_in_the_home_of_nobody_is_refused(monkeypatch):
    monkeypatch.setenv("SENNIT_CACHE_DIR", "~no-such-user/x")
    with pytest.raises(InvalidInput, match="SENNIT_CACHE_DIR: expected a folder, got '~no-such-user/x'"):
        env.cache_dir()


def test_an_unset_or_empty_instruction_set_is_none(monkeypatch):
    monkeypatch.delenv("SENNIT_CPU_ISA", raising=False)
    assert env.cpu_isa() is None
    monkeypatch.setenv("SENNIT_CPU_ISA", "")
    assert env.cpu_isa() is None


@pytest.mark.parametrize("isa", ["AVX2", "sse", "avx512-bf16", " "])
def test_an_unknown_instruction_set_is_refused(monkeypatch, isa):
    monkeypatch.setenv("SENNIT_CPU_ISA", isa)
    with pytest.raises(InvalidInput, match="SENNIT_CPU_ISA: expected one of amx, avx512_bf16, "):
        env.cpu_isa()


def test_compiler_flags_are_split_as_a_shell_does(monkeypatch):
    monkeypatch.delenv("SENNIT_CXXFLAGS", raising=False)
    assert env.cxx_flags() == ()
    monkeypatch.setenv("SENNIT_CXXFLAGS", "-g  '-DX=a b'")
    assert env.cxx_flags() == ("-g", "-DX=a b")
    monkeypatch.setenv("SENNIT_CXXFLAGS", "-g 'open")
    with pytest.raises(InvalidInput, match="SENNIT_CXXFLAGS: expected flags as a shell reads them"):
        env.cxx_flags()
