"""Fixtures: tiny random models, and a tokenizer whose tokens are single bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(params=["llama", "qwen3-tied"])
def model(request: pytest.FixtureRequest) -> Any:
    name, _, tied = request.param.partition("-")
    return tiny_model(name, tied=bool(tied))


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<eos>", "<extra>", "<more>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = CHAT_TEMPLATE
    return made
