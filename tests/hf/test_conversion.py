"""A converted GGUF model is the model that transformers reads from the file, with the tokenizer that the file names."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
import torch
import transformers

from sennit.hf.conversion import convert
from sennit.hf.loading import load


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    source, converted = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("converted")
    tiny_gguf.write(source / "tiny.gguf")
    convert(source / "tiny.gguf", converted)
    return source, converted


def test_weights_are_bit_for_bit_those_that_transformers_reads(folders: tuple[Path, Path]) -> None:
    source, converted = folders
    options = {"gguf_file": "tiny.gguf", "dtype": torch.float32, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):  # older releases dequantise without being told
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    expected = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    model, _ = load(converted)
    weights = model.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(weights[name], value), name
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)
    for key in ("rope_parameters", "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(model.config, key) == getattr(expected.config, key)


def test_digits_are_single_tokens_and_do_not_change_the_spaces_before_them(folders: tuple[Path, Path]) -> None:
    _, tokenizer = load(folders[1])
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]
    assert tokenizer.tokenize(" hi") == ["Ġhi"]


def test_text_with_special_tokens_and_every_byte_survives_a_round_trip(folders: tuple[Path, Path]) -> None:
    _, tokenizer = load(folders[1])
    text = "<|im_start|>naïve 日本 🙂\t x² .\n\n7<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[len("<|im_start|>") : -len("<|im_end|>")]


def test_end_and_padding_tokens_and_the_chat_template_are_the_files(folders: tuple[Path, Path]) -> None:
    model, tokenizer = load(folders[1])
    for ids in (tokenizer, model.config, model.generation_config):
        assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 512
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_progress_ends_at_the_size_of_all_weights(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    seen: list[int] = []
    convert(folders[0] / "tiny.gguf", tmp_path, on_bytes=seen.append)
    model, _ = load(folders[1])
    assert seen == sorted(seen)
    assert seen[-1] == sum(p.numel() * 4 for p in model.parameters())


def test_another_tokenizer_than_the_one_that_is_built_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "other.gguf", pre_tokenizer="llama-bpe")
    with pytest.raises(ValueError, match="llama-bpe"):
        convert(tmp_path / "other.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
