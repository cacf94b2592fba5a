"""Models load from complete folders without a network, and everything else is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from sennit.device import resolve_device
from sennit.errors import InvalidInput, ModelNotFound, UnsupportedModel
from sennit.hf import smollm2
from sennit.hf.conversion import convert
from sennit.hf.loading import load


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny_gguf.write(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder)
    (folder / "tiny.gguf").unlink()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A complete model folder to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a test went to the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def test_a_folder_loads_in_its_own_dtype_ready_for_inference(folder: Path) -> None:
    for name in (folder, str(folder)):
        model, tokenizer = load(name)
        assert (model.dtype, model.device.type, model.training) == (torch.float32, resolve_device(None).type, False)
        assert tokenizer("hi")["input_ids"]


def test_dtype_overrides_the_stored_one(folder: Path) -> None:
    model, _ = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_no_model_is_the_default_one(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "ensure", lambda: whole)
    model, _ = load()
    assert model.config.hidden_size == tiny_gguf.WIDTH


def test_a_folder_in_the_working_directory_goes_before_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert load("model")[0].config.hidden_size == tiny_gguf.WIDTH


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (["config.json"], "no config.json (it has"),
        (["model.safetensors"], "no weights (*.safetensors or pytorch_model*.bin) (it has"),
        (["tokenizer.json"], "no tokenizer (tokenizer.json or"),
        (["config.json", "model.safetensors"], "no config.json and no weights"),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, files: list[str], part: str) -> None:
    for name in files:
        (folder / name).unlink()
    with pytest.raises(ModelNotFound) as caught:
        load(folder)
    assert part in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "save_pretrained" in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", Path("nowhere"), "../up"])
def test_a_path_that_does_not_exist_never_reaches_the_hub(name: str | Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nowhere|a/b/c|up"):
        load(name)


def test_a_file_is_no_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFound, match="expected a folder, got the file"):
        load(file)


def test_a_hub_id_that_cannot_be_fetched_gives_the_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        assert options["local_files_only"] is False
        raise OSError("\nWe couldn't connect.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(ModelNotFound) as caught:
        load("someone/something")
    assert "someone/something" in str(caught.value)
    assert "We couldn't connect;" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_a_model_not_found(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"{ this is not it")
    with pytest.raises(ModelNotFound, match="save or fetch the model again") as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_in_no_file_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"1 of its weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("model_type", ["no-such-thing", "t5"])
def test_what_transformers_has_no_causal_model_for_is_unsupported(folder: Path, model_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type=model_type, architectures=["Other"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"model"):
        load(folder)


def test_wrong_arguments_are_refused_before_anything_is_read() -> None:
    with pytest.raises(InvalidInput, match="device: expected a torch device"):
        load("/nowhere", device="nonsense")
    with pytest.raises(InvalidInput, match=r'device: expected (one of|"cpu", since)'):
        load("/nowhere", device="cuda:99")
    with pytest.raises(InvalidInput, match=r"dtype: expected a torch\.dtype"):
        load("/nowhere", dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="model: expected a folder"):
        load(" ")


@pytest.mark.parametrize("spoiled", [False, True])
def test_settings_of_the_process_are_as_before(folder: Path, spoiled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    if spoiled:
        (folder / "model.safetensors").write_bytes(b"")
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        try:
            load(folder)
        except ModelNotFound:
            assert spoiled
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
        assert capfd.readouterr() == ("", ""), "loading says nothing"
    finally:
        logging.set_verbosity_warning()
