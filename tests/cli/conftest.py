"""Fixtures of the command line's tests: a runner, a tiny model on disk, and a backend that makes mistakes."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from sennit.backends import registry
from sennit.cli import app


@pytest.fixture
def sennit():
    """Run the command line in this process: ``sennit("plan", "1@1", width=80)``."""

    def run(*arguments, width=80, stdin=None, env=None):
        environment = {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"} | (env or {})
        return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)

    return run


@pytest.fixture
def add_backend(monkeypatch):
    """Register a backend for one test: ``add_backend("name", "module:ATTRIBUTE")``."""

    def add(name, place):
        monkeypatch.setitem(registry.BUILT_IN, name, place)
        registry._locations.cache_clear()
        registry.load.cache_clear()
        return name

    yield add
    monkeypatch.undo()
    registry._locations.cache_clear()
    registry.load.cache_clear()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random Llama of two layers and a tokenizer of bytes, as ``save_pretrained`` writes them."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<bot>"
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
