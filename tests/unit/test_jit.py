"""Libraries are built once, found again by everything that decides what they are, and never used half."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_libraries import tiny

from sennit import jit
from sennit.errors import InvalidInput
from sennit.jit import key, store
from sennit.jit.runtime import runtime


def answer(path):
    return runtime().load_module(str(path)).answer()


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.suffix == ".tmp"]


def test_a_source_is_built_loaded_and_called_and_its_module_is_kept(libraries):
    module = jit.load(tiny(7))
    assert module.answer() == 7
    assert jit.load(tiny(7)) is module
    assert jit.load(tiny(8)).answer() == 8


def test_a_library_in_the_cache_is_not_built_again(compiler):
    path = jit.build(tiny(1))
    before = path.stat()
    assert jit.build(tiny(1)) == path
    assert compiler.units == 1
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_units_see_the_headers_and_flags_of_their_source(libraries, tmp_path):
    headers = tmp_path / "headers"
    (headers / "inner").mkdir(parents=True)
    (headers / "first.h").write_text("#define FIRST 40\n")
    (headers / "inner" / "second.h").write_text("inline int second() { return SECOND; }\n")
    text = '#include "first.h"\n#include "inner/second.h"\nint sum() { return FIRST + second(); }\n'
    units = (("sum.cpp", text), ("tiny.cpp", "int sum();\n" + tiny("sum()").units[0][1]))
    source = jit.Source("several", units, headers, ("-DSECOND=2",))
    assert jit.load(source).answer() == 42


def test_changed_headers_make_another_library(libraries, tmp_path):
    (tmp_path / "h").mkdir()
    source = jit.Source("header", (("tiny.cpp", '#include "a.h"\n' + tiny("A").units[0][1]),), tmp_path / "h")
    found = []
    for value in (1, 2, 1):
        (tmp_path / "h" / "a.h").write_text(f"#define A {value}\n")
        found.append(jit.build(source))
    assert [answer(path) for path in found] == [1, 2, 1]
    assert found[0] == found[2] != found[1]


def test_the_users_flags_come_last_and_make_another_library(libraries, monkeypatch):
    source = jit.Source("flags", tiny("VALUE").units, None, ("-DVALUE=1",))
    first = jit.build(source)
    monkeypatch.setenv("SENNIT_CXXFLAGS", "-UVALUE '-DVALUE=1 + 1'")
    second = jit.build(source)
    assert (answer(first), answer(second)) == (1, 2)
    assert jit.load(source).answer() == 2
    monkeypatch.delenv("SENNIT_CXXFLAGS")
    assert jit.load(source).answer() == 1
    assert json.loads((second.parent / "manifest.json").read_text())["flags"] == [
        "-DVALUE=1", "-UVALUE", "-DVALUE=1 + 1"
    ]  # fmt: skip


def changed(part, **changes):
    return lambda arguments: arguments | {part: dataclasses.replace(arguments[part], **changes)}


INGREDIENTS = {
    "nothing": lambda arguments: arguments,
    "name": changed("source", name="other"),
    "name of a unit": changed("source", units=(("b.cpp", "int x;"),)),
    "text of a unit": changed("source", units=(("a.cpp", "int y;"),)),
    "another unit": changed("source", units=(("a.cpp", "int x;"), ("b.cpp", ""))),
    "flags": changed("source", flags=("-mavx2",)),
    "the user's flags": lambda arguments: arguments | {"extra": ["-mavx2"]},
    "a header's text": lambda arguments: arguments | {"headers": {"a.h": b"2"}},
    "a header's name": lambda arguments: arguments | {"headers": {"b.h": b"1"}},
    "another header": lambda arguments: arguments | {"headers": {"a.h": b"1", "b.h": b""}},
    "compiler": changed("toolchain", compiler="/usr/local/bin/c++"),
    "words behind the compiler": changed("toolchain", arguments=("g++",)),
    "version of the compiler": changed("toolchain", version="g++ 13"),
    "target": changed("toolchain", target="aarch64-linux-gnu"),
    "macros of the processor": changed("toolchain", macros="1"),
    "version of tvm_ffi": lambda arguments: arguments | {"runtime": "0.1.99"},
}


def test_everything_that_decides_what_is_built_changes_the_key(libraries, monkeypatch):
    source = jit.Source("one", (("a.cpp", "int x;"),), None)
    toolchain = jit.Toolchain("/usr/bin/c++", (), "g++ 12", "x86_64-linux-gnu", (), frozenset(), "0")
    arguments = {"source": source, "headers": {"a.h": b"1"}, "toolchain": toolchain, "extra": [], "runtime": "0.1.15"}
    keys = {what: key.key_of(**change(arguments)) for what, change in INGREDIENTS.items()}
    for constant in ("FORMAT", "COMPILE", "LINK"):
        with monkeypatch.context() as patch:
            patch.setattr(key, constant, "changed")
            keys[constant] = key.key_of(**arguments)
    assert len(set(keys.values())) == len(keys) == len(INGREDIENTS) + 3
    assert key.key_of(**arguments) == keys["nothing"]
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in keys.values())


def flip_a_byte(entry, other):
    library = entry / "tiny.so"
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    write_anew(library, bytes(data))


def truncate(entry, other):
    write_anew(entry / "tiny.so", (entry / "tiny.so").read_bytes()[:-1])


def write_anew(path, data):
    path.unlink()  # another process may have loaded it
    path.write_bytes(data)


def copy_another(entry, other):
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


def become_a_file(entry, other):
    shutil.rmtree(entry)
    entry.write_text("something else")


def become_garbage(entry, other):
    for path in entry.iterdir():
        if path.is_file():
            path.write_bytes(b"\xff\x00garbage")


DAMAGE = {
    "a flipped byte": flip_a_byte,
    "a truncated library": truncate,
    "no library": lambda entry, other: (entry / "tiny.so").unlink(),
    "no manifest": lambda entry, other: (entry / "manifest.json").unlink(),
    "an empty manifest": lambda entry, other: (entry / "manifest.json").write_text(""),
    "a manifest that is a list": lambda entry, other: (entry / "manifest.json").write_text("[]"),
    "a manifest nested too deeply": lambda entry, other: (entry / "manifest.json").write_text("[" * 200_000),
    "another's manifest": lambda entry, other: shutil.copy(other / "manifest.json", entry),
    "another's entry": copy_another,
    "a file in its place": become_a_file,
    "garbage in every file": become_garbage,
    "an empty folder": lambda entry, other: (shutil.rmtree(entry), entry.mkdir()),
}


@pytest.fixture(scope="module")
def two_entries(tmp_path_factory):
    """A cache with the libraries of ``tiny(1)`` and ``tiny(2)``, to be copied."""
    root = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENNIT_CACHE_DIR", str(root))
        return root / "libraries", *(path.parent.name for path in jit.build_all([tiny(1), tiny(2)]))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_entry_is_built_anew(libraries, two_entries, damage):
    original, name, other = two_entries
    shutil.copytree(original, libraries)
    DAMAGE[damage](libraries / name, libraries / other)
    assert answer(path := jit.build(tiny(1))) == 1
    assert path.read_bytes() == (original / name / "tiny.so").read_bytes()
    assert [store.find(*entry.rsplit("-", 1)).parent.name for entry in (name, other)] == [name, other]
    assert leftovers(libraries) == []


def test_an_undamaged_copy_of_an_entry_is_used_as_it_is(libraries, two_entries):
    shutil.copytree(two_entries[0], libraries)
    before = {path: path.stat().st_mtime_ns for path in libraries.rglob("*.so")}
    jit.build_all([tiny(1), tiny(2)])
    assert before == {path: path.stat().st_mtime_ns for path in libraries.rglob("*.so")}


def test_replacing_an_entry_leaves_the_old_library_whole_for_who_has_it_open(libraries):
    path = jit.build(tiny(1))
    whole = path.read_bytes()
    with path.open("rb") as held:
        (path.parent / "manifest.json").unlink()
        jit.build(tiny(1))
        assert held.read() == whole


def test_an_entry_that_is_whole_but_cannot_be_loaded_is_built_anew(compiler):
    path = jit.build(tiny(5))
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    path.write_bytes(b"made for another machine")
    store.seal(path.parent, "tiny", path.parent.name.removeprefix("tiny-"), compiler="", flags=())
    before = compiler.units
    assert jit.load(tiny(5)).answer() == 5
    assert compiler.units == before + 1


def test_an_entry_holds_what_repeats_its_build(libraries, tmp_path):
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "a.h").write_text("#define A 9\n")
    source = jit.Source("again", (("tiny.cpp", '#include "a.h"\n' + tiny("A").units[0][1]),), tmp_path / "h")
    path = jit.build(source)
    (copy := tmp_path / "copy").mkdir()
    shutil.copytree(path.parent, copy, dirs_exist_ok=True)
    (copy / "again.so").unlink()
    shutil.rmtree(tmp_path / "h")
    assert os.system(f"cd {copy} && sh -e build.sh") == 0
    assert answer(copy / "again.so") == 9


def test_eight_processes_at_once_make_one_build(compiler):
    compiler.does("sleep 0.3", when="*-c*")
    jit.find_toolchain()
    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)

    def work():
        start.wait()
        assert answer(jit.build(tiny(3))) == 3

    processes = [context.Process(target=work) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert compiler.units == 1


def test_eight_threads_at_once_make_one_build_and_get_one_module(compiler):
    compiler.does("sleep 0.2", when="*-c*")
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        return jit.load(tiny(4))

    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(work, range(8)))
    assert all(module is modules[0] for module in modules)
    assert compiler.units == 1


def test_build_all_gives_paths_in_order_and_builds_what_is_missing_once(compiler):
    there = jit.build(tiny(1))
    sources = [tiny(2), tiny(1), tiny(3), tiny(2)]
    paths = jit.build_all(sources)
    assert [answer(path) for path in paths] == [2, 1, 3, 2]
    assert paths[1] == there
    assert compiler.units == 3


@pytest.mark.slow
def test_a_build_killed_at_any_moment_leaves_a_cache_that_works(compiler, libraries):
    choose = random.Random(5)
    jit.find_toolchain()
    context = multiprocessing.get_context("fork")
    whole = 0
    for attempt in range(50):
        source = tiny(attempt // 5)
        process = context.Process(target=lambda source=source: (os.setsid(), jit.build(source)))
        process.start()
        process.join(choose.uniform(0.0, 0.3))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        whole += process.exitcode == 0
        for entry in store.entries():  # what is there is whole
            assert store.find(entry.name, entry.key)
    assert 0 < whole < 50, "the delays no longer hit the middle of a build"
    time.sleep(0.5)  # compilers that have lost their parent end
    assert [answer(jit.build(tiny(number))) for number in range(10)] == list(range(10))
    jit.build(tiny(10))
    assert leftovers(libraries) == []


def test_a_build_sweeps_what_dead_builds_left_and_nothing_of_living_ones(libraries):
    libraries.mkdir(parents=True)
    for stem in ("dead-1", "alive-2", "unknown-3", "old-4"):
        (libraries / f".{stem}.0123abcd.tmp").mkdir()
        (libraries / f".{stem}.0123abcd.tmp" / "object.o").write_text("half")
    for stem in ("dead-1", "alive-2"):
        (libraries / f".{stem}.lock").touch()
    os.utime(libraries / ".old-4.0123abcd.tmp", (time.time() - 2 * 86400,) * 2)
    with store.lock("alive-2", waiting=pytest.fail):
        in_other_process(lambda: jit.build(tiny(1)))
    assert sorted(leftovers(libraries)) == [".alive-2.0123abcd.tmp", ".unknown-3.0123abcd.tmp"]


def in_other_process(work):
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_clearing_removes_everything_but_what_is_being_built(libraries, two_entries):
    shutil.copytree(two_entries[0], libraries)
    (libraries / "failed-tiny-0").mkdir()
    (libraries / ".tiny-0.0123abcd.tmp").mkdir()
    busy = libraries / two_entries[2]

    def clear():
        done = store.clear()
        assert (done.libraries, done.busy) == (1, (busy.name,))
        assert done.size > 10_000

    with store.lock(busy.name, waiting=pytest.fail):
        in_other_process(clear)
    assert [path for path in libraries.iterdir() if path.suffix != ".lock"] == [busy]
    assert answer(jit.build(tiny(1))) == 1


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"units": ()}, "units"),
        ({"units": (("a/b.cpp", ""),)}, "units"),
        ({"units": (("a.h", ""),)}, "units"),
        ({"units": (("a.cpp", ""), ("a.cpp", ""))}, "units"),
    ],
)
def test_a_source_with_names_that_are_no_file_names_is_refused(change, argument):
    with pytest.raises(InvalidInput) as caught:
        dataclasses.replace(tiny(1), **change)
    assert caught.value.argument == argument


def test_headers_must_be_a_folder(tmp_path):
    with pytest.raises(InvalidInput, match="headers: expected an existing folder"):
        tiny(1, headers=tmp_path / "nowhere")
