"""What all commands have in common: help, errors, exit codes, pure JSON, and how little is imported."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import sennit as package
from sennit import cli
from sennit.bench import stepping
from sennit.cli.output import as_typed, file_to_write, write_json
from sennit.errors import BackendUnavailable, InvalidInput, UnsupportedFeature
from sennit.plan.batch import Batch

GROUPS = [("bench",), ("cache",)]
COMMANDS = [
    *[("generate",), ("info",), ("check",), ("plan",), ("kernels",), ("bench", "plan"), ("bench", "generate")],
    *[("cache", "list"), ("cache", "clear"), ("cache", "warm")],
]


@pytest.mark.parametrize("command", [(), *GROUPS, *COMMANDS], ids=" ".join)
def test_help_of_every_command_has_an_example_of_that_command(sennit, command):
    result = sennit(*command, "--help", width=100)
    assert result.exit_code == 0
    assert f"Example: {' '.join(('sennit', *command))}" in result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_prints_results_has_json(sennit, command):
    assert "--json" in sennit(*command, "--help").stdout


def test_version_is_the_packages(sennit):
    assert sennit("--version").stdout == f"sennit {package.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "12@x"),
        ("plan", "1@1", "--heads", "32"),
        ("plan", "1@1", "--heads", "9/2"),
        ("plan", "1@1", "--backend", "nobody"),
        ("check", "--device", "cuda:99"),
        ("check", "--only", "nothing/*"),
        ("bench", "plan", "1@"),
        ("bench", "plan", "1@1", "--out", ""),
        ("bench", "step", "1@1", "--out", ""),
        ("bench", "attention", "1@1", "--out", ""),
        ("generate", "hi", "--model", "/nowhere/at/all"),
    ],
    ids=" ".join,
)
def test_an_error_of_sennit_is_one_line_with_exit_code_2(sennit, arguments):
    result = sennit(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_brackets_in_what_a_user_wrote_are_printed_as_they_are(sennit):
    assert "[red]1@1[/red]" in sennit("plan", "[red]1@1[/red]").stderr


def test_an_error_is_red_on_a_terminal(sennit):
    result = sennit("plan", "12@x", env={"NO_COLOR": "", "FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert result.stderr.startswith("\x1b[31merror: ")


def test_a_warning_is_one_line_without_code(sennit, monkeypatch):
    parse = Batch.parse
    monkeypatch.setattr(Batch, "parse", lambda *a, **k: warnings.warn("[red]slow", stacklevel=1) or parse(*a, **k))
    assert sennit("plan", "1@1").stderr == "warning: [red]slow\n"


def test_an_interrupt_is_one_line_with_exit_code_130(sennit, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "parse", interrupt)
    result = sennit("plan", "1@1")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "stopped\n")


def test_an_interrupt_before_a_command_begins_ends_with_the_same_code(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


def test_a_batch_too_large_for_the_memory_is_an_error_and_no_traceback(sennit, monkeypatch):
    def exhaust(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(Batch, "parse", exhaust)
    result = sennit("plan", "1@1")
    assert result.exit_code == 2
    assert "too little memory" in result.stderr


def lacking_on_the_host():
    torch.empty(2**60, dtype=torch.uint8)


def lacking_on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 4 GiB")


@pytest.mark.parametrize(
    ("exhaust", "words"),
    [
        (lacking_on_the_host, f"this machine has too little memory for that: {2**60} bytes could not be had; ask for"),
        (lacking_on_a_gpu, "the GPU has too little memory for that: 20.00 GiB could not be had; ask for"),
    ],
)
def test_memory_that_pytorch_lacks_is_an_error_with_its_size(sennit, monkeypatch, exhaust, words):
    monkeypatch.setattr(Batch, "parse", lambda *_, **__: exhaust())
    result = sennit("plan", "1@1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_other_failures_are_not_hidden(sennit, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Batch, "parse", fail)
    assert str(sennit("plan", "1@1").exception) == "a bug"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("plan", "1@1", "--backend", "nobody"), "--backend"),
        (("plan", "1@1", "--window-left", str(2**40)), "--window-left"),
        (("plan", "1@1", "--heads", "9/2"), "--heads"),
        (("plan", "1@1", "--heads", "0/1"), "--heads"),
        (("plan", "1@1", "--heads", f"{2**31}/1"), "--heads"),
        (("plan", "1@1", "--head-dim", "0"), "--head-dim"),
        (("plan", "1@1", "--head-dim", "9" * 5000), "--head-dim"),
        (("plan", "1@1", "--sink-tokens", "4"), "--sink-tokens"),
        (("plan", "1@1", "--sink-tokens", str(2**40), "--window-left", "1"), "--sink-tokens"),
        (("plan", "1@1", "--workers", str(2**16 + 1)), "--workers"),
        (("bench", "step", f"{2**30}@{2**30}"), "batch"),
        (("bench", "step", f"1@{2**31 - 1}"), "batch"),
        (("bench", "step", "1@1", "--backend", "nobody"), "--backend"),
        (("check", "--device", "tpu"), "--device"),
        (("bench", "step", "--device", "tpu"), "--device"),
    ],
)
def test_an_error_names_the_option_as_it_was_typed(sennit, arguments, option):
    assert sennit(*arguments).stderr.startswith(f"error: {option}: expected ")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            InvalidInput("num_qo_heads", expected="page_size=8", got="page_size"),
            "--heads: expected --page-size=8, got p",
        ),
        (InvalidInput("heads, backend", expected="another", got=2), "--heads, backend: expected another, got 2"),
        (
            InvalidInput("kv[3]", expected="1", got=2, hint="ask for page_size"),
            "kv[3]: expected 1, got 2; ask for --pa",
        ),
        (UnsupportedFeature("page_size", "it is no heads"), "--page-size: it is no heads"),
        (BackendUnavailable("page_size"), "page_size"),
    ],
)
def test_an_error_is_about_the_options_that_became_its_parameters(error, text):
    options = {"num_qo_heads": "--heads", "heads": "--heads", "page_size": "--page-size"}
    found = as_typed(error, options)
    assert type(found) is type(error)
    assert str(found).startswith(text)


def test_sizes_with_other_names_than_options_are_said_as_typed(sennit):
    error = sennit("plan", "1@1", "--sink-tokens", "4").stderr
    assert "expected 0 where --window-left is None, got 4" in error


def test_a_cache_that_cannot_be_had_is_the_batchs_fault(monkeypatch):
    def refuse(*arguments, **options):
        raise InvalidInput("num_tokens", expected="less", got="much")

    monkeypatch.setattr(stepping, "KVCache", refuse)
    with pytest.raises(InvalidInput, match=r"^batch: expected less, got much$"):
        stepping.measure("1@1", device=torch.device("cpu"))


def test_a_file_is_written_through_symbolic_links(tmp_path):
    (tmp_path / "there").mkdir()
    path, target = tmp_path / "link.json", tmp_path / "there" / "file.json"
    path.symlink_to(target)
    for value in (1, 2):  # to a file that does not exist yet, then to one that does
        write_json(value, file_to_write("--out", str(path)))
        assert path.is_symlink()
        assert json.loads(target.read_text()) == value
    assert sorted(os.listdir(tmp_path / "there")) == ["file.json"]
    path.unlink()
    path.symlink_to(tmp_path / "nowhere" / "file.json")
    with pytest.raises(InvalidInput, match="--out: expected a file in an existing folder"):
        file_to_write("--out", str(path))


def test_what_cannot_be_written_is_printed_and_the_error_names_the_file(sennit, tmp_path, monkeypatch):
    folder = tmp_path / "taken"
    # It is free no more.
    monkeypatch.setattr("sennit.cli.bench.file_to_write", lambda option, name: folder.mkdir() or Path(name))
    result = sennit("bench", "plan", "3@9", "--repeat", "1", "--out", str(folder))
    assert result.exit_code == 2
    assert json.loads(result.stdout)["batches"][0]["batch"] == "3@9"
    assert result.stderr.startswith(f"error: {folder}: ")
    assert "standard output" in result.stderr
    assert os.listdir(tmp_path) == ["taken"]


def test_a_value_that_is_not_the_last_may_be_lost(tmp_path, capsys):
    write_json(1, tmp_path / "nowhere" / "file.json", last=False)
    assert capsys.readouterr() == ("", "")


def test_a_folder_that_may_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InvalidInput, match="may be written"):
        file_to_write("--out", str(tmp_path / "file.json"))


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("", "the current folder"),
        ("/", "the folder /"),
        ("new.json/", "the folder new.json/"),
        ("new.json/.", "the folder new.json/."),
    ],
)
def test_a_folder_is_no_file(sennit, name, got):
    result = sennit("bench", "plan", "1@1", "--out", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: --out: expected a file, got {got}; add the file's name\n"


def test_a_pipe_or_device_may_be_written():
    write_json(1, file_to_write("--out", os.devnull))


def test_a_link_to_itself_is_refused_and_stays(tmp_path):
    path = tmp_path / "file.json"
    path.symlink_to(path)
    with pytest.raises(
        InvalidInput, match=r"^--out: expected a file, got .*, a symbolic link that leads back to itself"
    ):
        file_to_write("--out", str(path))
    assert path.is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640])
def test_a_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "file.json"
    path.write_text("before")
    path.chmod(mode)
    write_json(1, file_to_write("--out", str(path)))
    assert (path.read_text(), path.stat().st_mode & 0o7777) == ("1\n", mode)


def test_a_new_file_has_the_mode_that_the_user_gives_new_files(tmp_path):
    write_json(1, tmp_path / "file.json")
    (tmp_path / "other.json").touch()
    assert (tmp_path / "file.json").stat().st_mode == (tmp_path / "other.json").stat().st_mode


def test_a_file_that_may_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    path.touch()
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != path)
    with pytest.raises(InvalidInput, match=r"^--out: expected a file that may be written"):
        file_to_write("--out", str(path))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS])
def test_a_file_whose_folder_may_not_be_written_is_written_where_it_is(tmp_path, monkeypatch, number):
    path = tmp_path / "file.json"
    path.write_text("before, and longer")
    before = path.stat()
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != tmp_path)

    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", refuse)
    write_json(1, file_to_write("--out", str(path)))
    assert path.read_text() == "1\n"
    assert path.stat().st_ino == before.st_ino
    assert os.listdir(tmp_path) == ["file.json"]
    with pytest.raises(OSError, match="standard output"):
        write_json(1, tmp_path / "new.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        ("plan", "3@5 + 2*1@40"),
        ("bench", "plan", "1@9", "--repeat", "1"),
        ("check", "--random", "0", "--only", "lengths/*", "--backend", "reference"),
    ],
    ids=" ".join,
)
def test_with_json_standard_output_is_json_and_nothing_else(sennit, arguments):
    result = sennit(*arguments, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)


def run_python(code, *, stdin=None):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, input=stdin, timeout=120)


def test_the_command_line_loads_no_model_library_compiler_or_backend():
    code = "import sys, sennit.cli; print([m for m in sys.modules if m.split('.')[0] in ('transformers', 'triton')"
    code += " or m.startswith(('sennit.hf', 'sennit.backends.', 'sennit.bench.'))])"
    loaded = eval(run_python(code).stdout)
    assert set(loaded) <= {"sennit.backends.base", "sennit.backends.registry"}


def test_output_survives_a_terminal_without_unicode():
    code = "import sys; sys.argv = ['sennit', 'plan', '64@64 + 1@99', '--workers', '3']\n"
    code += "sys.stdout.reconfigure(encoding='ascii'); from sennit.cli import main; main()"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert '"' in result.stdout.splitlines()[-2]
