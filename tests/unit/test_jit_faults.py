"""What stands in the way of a build is said in one error with a way out, and nothing half done is left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_libraries import tiny

from sennit import jit
from sennit.errors import BuildFailed, BuildUnavailable
from sennit.jit import building, processes, store
from sennit.jit.runtime import runtime


def answer(path):
    return runtime().load_module(str(path)).answer()


def visible(folder):
    """What is in a folder beside locks and what compilers said."""
    return sorted(path.name for path in folder.glob("*") if path.suffix not in (".lock", ".json"))


@contextmanager
def mounted(place, *options):
    """A mount for a while; needs privileges, and skips the test without them."""
    if subprocess.run(["mount", *options, str(place)], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_rejected_source_shows_the_compilers_first_errors_and_keeps_a_report(compiler, libraries):
    source = jit.Source("broken", (("good.cpp", "int x;"), ("bad.cpp", "int f() {\n  return nonsense;\n}\n")), None)
    with pytest.raises(BuildFailed) as caught:
        jit.build(source)
    text = str(caught.value)
    assert text.startswith("broken: ")
    assert "units/bad.cpp:2:10: error: " in text
    assert "nonsense" in text
    assert f"{compiler.path} -std=c++20 " in text
    report = Path(text.rsplit("attach ", 1)[1])
    assert report.parent.parent == libraries
    for part in ("nonsense", "return nonsense;", "exit status 1", "int x;", str(compiler.path)):
        assert part in report.read_text()
    assert (report.parent / "units" / "bad.cpp").read_text() == source.units[1][1]
    assert visible(libraries) == [report.parent.name]


def test_a_source_that_failed_is_tried_again_and_keeps_one_report_until_it_succeeds(compiler, libraries):
    compiler.does("echo 'tiny.cpp:1:1: error: not today'; exit 1", when="*-c*")
    for _ in range(2):
        with pytest.raises(BuildFailed, match="error: not today"):
            jit.load(tiny(1))
    assert len(visible(libraries)) == 1
    compiler.does("")
    assert jit.load(tiny(1)).answer() == 1
    assert visible(libraries) == [entry.folder.name for entry in store.entries()]


def test_an_error_of_the_linker_is_a_failed_build(libraries):
    with pytest.raises(BuildFailed, match="cannot find -lnowhere"):
        jit.build(tiny(1, flags=["-lnowhere"]))


def test_a_missing_function_is_an_error_when_the_library_is_loaded_and_not_when_it_is_called(libraries):
    text = tiny("missing_function()").units[0][1]
    source = jit.Source("missing", (("tiny.cpp", f"long missing_function();\n{text}"),), None)
    with pytest.raises(BuildFailed, match=r"cannot be loaded:\n  missing\.so: .*missing_function"):
        jit.load(source)


def test_users_flags_are_named_when_a_build_fails(libraries, monkeypatch):
    monkeypatch.setenv("SENNIT_CXXFLAGS", "-fno-such-flag")
    with pytest.raises(BuildFailed, match="SENNIT_CXXFLAGS adds: -fno-such-flag; try without") as caught:
        jit.build(tiny(1))
    assert "error: unrecognized" in str(caught.value)


@pytest.mark.parametrize("kind", ["a file in its place", "a file above it", "a folder that is only read"])
def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(libraries, kind):
    root = libraries.parent
    with within(root, kind), pytest.raises(BuildUnavailable) as caught:
        jit.build(tiny(1))
    wrong = "cannot be written" if "read" in kind else "is not a folder"
    place = libraries if "in its place" in kind else root
    assert f"tiny cannot be built: {place} {wrong}; " in str(caught.value)
    assert "SENNIT_CACHE_DIR" in str(caught.value)


@contextmanager
def within(root, kind):
    if kind == "a file in its place":
        root.mkdir()
        (root / "libraries").write_text("")
        yield
    elif kind == "a file above it":
        root.write_text("")
        yield
    else:
        root.mkdir()
        with read_only(root):
            yield


@contextmanager
def read_only(folder):
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield


def test_a_library_in_a_cache_that_cannot_be_written_is_used(compiler, libraries):
    jit.build(tiny(1))
    with read_only(libraries.parent):
        assert jit.load(tiny(1)).answer() == 1
        with pytest.raises(BuildUnavailable, match=r"cannot be built: .* cannot be written"):
            jit.build(tiny(2))
    assert jit.load(tiny(2)).answer() == 2


def test_a_full_disk_is_an_error_and_with_room_again_the_build_works(libraries):
    root = libraries.parent
    root.mkdir()
    with mounted(root, "-t", "tmpfs", "-o", "size=512k", "none"):
        (root / "filler").write_bytes(b"0" * 500_000)
        with pytest.raises(BuildUnavailable, match=r"libraries: No space left on device.*; make some MB free"):
            jit.build(tiny(1))
        assert visible(libraries) == []
        (root / "filler").unlink()
        assert answer(jit.build(tiny(1))) == 1


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("echo '/tmp/x.s: Fatal error: cannot write: No space left on device'; exit 1", "No space left on device"),
        ("echo 'c++: fatal error: Killed signal terminated program cc1plus'; exit 1", "memory"),
        ("kill -9 $$", "memory"),
    ],
)
@pytest.mark.parametrize("step", ["*-c*", "*-shared*"])
def test_a_compiler_that_runs_out_of_disk_or_memory_is_not_the_sources_fault(compiler, libraries, does, text, step):
    compiler.does(does, when=step)
    with pytest.raises(BuildUnavailable, match=text):
        jit.build(tiny(1))
    assert visible(libraries) == []
    compiler.does("")
    assert answer(jit.build(tiny(1))) == 1


def test_a_compiler_that_disappears_is_an_error(compiler):
    jit.find_toolchain()
    compiler.path.unlink()
    with pytest.raises(BuildUnavailable, match=r"the compiler cannot be run: No such file or directory: '.*/compiler'"):
        jit.build(tiny(1))


@pytest.mark.parametrize(
    ("does", "problem"), [(":", "cannot open shared object file"), ("echo garbage > tiny.so", "file too short")]
)
def test_a_linker_that_makes_no_library_is_a_failed_build_and_nobody_sees_what_it_made(
    compiler, libraries, does, problem
):
    compiler.does(f"{does}; exit 0", when="*-shared*")
    with pytest.raises(BuildFailed, match=f"made a library that cannot be loaded:\n  tiny.so: {problem}"):
        jit.build(tiny(1))
    assert [path.name.split("-")[0] for path in libraries.iterdir() if path.is_dir()] == ["failed"]
    compiler.does("")
    assert answer(jit.build(tiny(1))) == 1


@pytest.mark.parametrize("step", ["*-c*", "*-shared*"])
def test_a_cache_that_is_removed_during_a_build_is_an_error_that_says_so(compiler, libraries, step):
    compiler.does(f"rm -rf {libraries}", when=step)
    with pytest.raises(BuildUnavailable, match=f"tiny was not built: {libraries} was removed meanwhile"):
        jit.build(tiny(1))
    compiler.does("")
    assert answer(jit.build(tiny(1))) == 1


def test_what_a_compiler_leaves_running_is_not_waited_for(compiler, tmp_path):
    pid = tmp_path / "pid"
    compiler.does(f"sleep 60 & echo $! > {pid}", when="*-c*")
    jit.build(tiny(1))
    left = int(pid.read_text())
    assert runs(left)
    os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_that_ends_the_process_ends_its_compilers(compiler, tmp_path, number):
    jit.find_toolchain()
    pid = tmp_path / "pid"
    compiler.does(f"sleep 60 & echo $! > {pid}.new; mv {pid}.new {pid}; wait", when="*-c*")
    process = multiprocessing.get_context("fork").Process(target=jit.build, args=(tiny(1),))
    process.start()
    while not pid.exists():
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == -number
    assert not runs(int(pid.read_text()))


def test_an_interrupt_ends_a_compiler_that_hangs_and_leaves_nothing(compiler, libraries, tmp_path):
    jit.find_toolchain()
    pid = tmp_path / "pid"
    compiler.does(f"sleep 1000 & echo $! > {pid}; wait", when="*-c*")
    with interrupted_when(pid.exists), pytest.raises(KeyboardInterrupt):
        jit.build_all([tiny(1), tiny(2), tiny(3)])
    assert not runs(int(pid.read_text()))
    assert visible(libraries) == []
    compiler.does("")
    assert answer(jit.build(tiny(1))) == 1


@contextmanager
def interrupted_when(condition):
    """Raise KeyboardInterrupt in this thread, a moment after a condition holds."""

    def look(number, frame):
        if condition():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_compiler_that_cannot_be_started_stops_the_others_before_their_folder_goes(monkeypatch, tmp_path):
    started, stopped = threading.Event(), []

    def run(command, *, folder, stop):
        if command == ["absent"]:
            started.wait(5)
            raise FileNotFoundError(2, "absent")
        started.set()
        stopped.append(stop.wait(5))
        raise processes.Stopped

    monkeypatch.setattr(processes, "run", run)
    with processes.Workers() as workers:
        with pytest.raises(FileNotFoundError):
            workers.run([["absent"], ["running"]], tmp_path)
        assert stopped == [True] * started.is_set()  # with one processor the other never begins


def runs(process):
    """Whether a process is there and not merely unburied."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def test_one_failure_of_several_is_raised_after_the_others_are_built(libraries):
    broken = jit.Source("broken", (("bad.cpp", "nonsense"),), None)
    with pytest.raises(BuildFailed, match="broken: "):
        jit.build_all([broken, tiny(1), tiny(2)])
    assert [entry.name for entry in store.entries()] == ["tiny", "tiny"]


def test_a_build_that_takes_long_says_one_line_on_standard_error(compiler, libraries, monkeypatch, capfd):
    monkeypatch.setattr(building, "PATIENCE", 0.2)
    compiler.does("sleep 0.6", when="*-c*")
    jit.build(dataclasses.replace(tiny(1), purpose="two"))
    assert capfd.readouterr() == ("", f"sennit: building tiny for two (once; kept in {libraries})\n")


def test_of_several_builds_that_are_called_the_same_one_line_is_said(compiler, libraries, monkeypatch, capfd):
    monkeypatch.setattr(building, "PATIENCE", 0.1)
    compiler.does("sleep 0.4", when="*-c*")
    for number in (1, 2, 3):
        jit.build(tiny(number))
    assert capfd.readouterr() == ("", f"sennit: building tiny (once; kept in {libraries})\n")


def test_a_build_that_takes_longer_says_how_long_it_has_taken(compiler, libraries, monkeypatch, capfd):
    monkeypatch.setattr(building, "PATIENCE", 0.1)
    monkeypatch.setattr(building, "REMINDER", 0.8)
    compiler.does("sleep 1.1", when="*-c*")
    jit.build(tiny(1))
    assert re.search(r"^sennit: building tiny, [1-9] s so far$", capfd.readouterr().err, re.MULTILINE)


def test_what_could_be_built_and_what_is_there_is_found_without_building(compiler, libraries, monkeypatch):
    jit.check_buildable()
    assert jit.find(tiny(1)) is None
    assert compiler.units == 0
    assert not visible(libraries)
    path = jit.build(tiny(1))
    with read_only(libraries.parent):
        assert jit.find(tiny(1)) == path
        with pytest.raises(BuildUnavailable, match=f"{libraries} cannot be written"):
            jit.check_buildable()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(BuildUnavailable, match="no such program"):
        jit.check_buildable()


def test_waiting_for_another_process_that_builds_is_said(libraries, monkeypatch, capfd):
    monkeypatch.setattr(building, "PATIENCE", 0.1)
    path = jit.build(tiny(1))
    capfd.readouterr()
    shutil.rmtree(path.parent)
    child = os.fork()
    if child == 0:
        with store.lock(path.parent.name, waiting=pytest.fail):
            time.sleep(0.6)
        os._exit(0)
    time.sleep(0.2)
    jit.build(tiny(1))
    os.waitpid(child, 0)
    assert capfd.readouterr().err.startswith("sennit: waiting for another that is building tiny\n")


def test_a_short_build_and_a_found_library_say_nothing(libraries, monkeypatch, capfd):
    monkeypatch.setattr(building, "PATIENCE", 30.0)
    jit.build(tiny(1))
    jit.build(tiny(1))
    assert capfd.readouterr() == ("", "")


def test_a_child_inherits_no_locks_of_threads_that_it_does_not_have():
    code = "import os, threading; from sennit.jit import loading; loading._locks['key'] = threading.Lock(); "
    code += "loading._locks['key'].acquire(); child = os.fork() or os._exit(len(loading._locks)); "
    code += "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(loading._locks))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
