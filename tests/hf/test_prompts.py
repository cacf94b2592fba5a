"""Every form of prompt gives the token ids that transformers' own calls give, and anything else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sennit.errors import InvalidInput
from sennit.hf import generate
from sennit.hf.prompts import check_prompts, encode

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def ids_of(prompt: Any, tokenizer: Any, *, raw: bool = False) -> list[int]:
    return encode(prompt, tokenizer, raw=raw, vocab_size=260, context_length=64)


def template_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_string_is_one_user_message_under_the_chat_template(tokenizer: Any) -> None:
    assert ids_of("Hi", tokenizer) == template_ids(tokenizer, [{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids_of("Hi", tokenizer)) == "<user>Hi<bot>"


def test_a_raw_string_is_tokenized_as_it_is(tokenizer: Any) -> None:
    assert ids_of("Hi", tokenizer, raw=True) == tokenizer("Hi")["input_ids"]


def test_a_string_without_a_chat_template_is_tokenized_as_it_is(tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert ids_of("Hi", tokenizer) == tokenizer("Hi")["input_ids"]


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    assert ids_of(MESSAGES, tokenizer) == template_ids(tokenizer, MESSAGES)
    assert ids_of(tuple(MESSAGES), tokenizer) == template_ids(tokenizer, MESSAGES)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_token_ids_are_taken_as_they_are(form: Any) -> None:
    got = ids_of(form([3, 1, 2]), None)
    assert got == [3, 1, 2]
    assert all(type(i) is int for i in got)


@pytest.mark.parametrize(
    ("prompt", "raw", "message"),
    [
        (None, False, "prompt: expected a string, .* got NoneType"),
        (b"Hi", False, "got bytes"),
        (7, False, "got int"),
        ([3, "a"], False, "got a list of int, str"),
        ([True, False], False, "got a list of bool"),
        ([[1, 2]], False, "got a list of list"),
        ([0.5], False, "got a list of float"),
        (np.zeros((1, 3), np.int64), False, r"got ndarray of shape \(1, 3\)"),
        ({"role": "user", "content": "Hi"}, False, "got dict"),
        ([], False, "at least one token, got no tokens from an empty list"),
        ("", True, "at least one token, got no tokens from an empty string"),
        ([3, 260], False, "token ids from 0 to 259, got 260"),
        ([-1], False, "token ids from 0 to 259, got -1"),
        ([1] * 64, False, "prompt: expected fewer tokens than the model's context length, 64, got 64 tokens"),
        (MESSAGES, True, "with raw=True, got messages"),
        ([{"text": "Hi"}], False, r"prompt\[0\]: expected a message with 'role' and 'content'"),
    ],
)
def test_other_forms_are_refused(tokenizer: Any, prompt: Any, raw: bool, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ids_of(prompt, tokenizer, raw=raw)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no tokenizer was given"):
        ids_of("Hi", None)


def test_messages_without_a_chat_template_are_refused(tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InvalidInput, match="no chat template"):
        ids_of(MESSAGES, tokenizer)


@pytest.mark.parametrize(
    ("prompts", "got"),
    [
        ("Hi", "one string"),
        ([1, 2], "one list of token ids"),
        (torch.tensor([1, 2]), "one list of token ids"),
        (MESSAGES, "one list of messages"),
        (MESSAGES[0], "dict"),
        (7, "int"),
    ],
)
def test_a_single_prompt_must_be_put_in_a_list(prompts: Any, got: str) -> None:
    with pytest.raises(InvalidInput, match=rf"got {got}; put a single prompt in a list"):
        check_prompts(prompts)


def test_a_list_of_prompts_may_mix_forms() -> None:
    prompts = ["Hi", [1, 2], MESSAGES]
    assert check_prompts(prompts) == prompts
    assert check_prompts([]) == []
    assert check_prompts(iter(prompts)) == prompts


def test_messages_that_utf8_cannot_hold_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^prompt: expected text that UTF-8 can hold"):
        ids_of([{"role": "user", "content": "a\ud800"}], tokenizer)


@pytest.mark.parametrize("prompts", [[{3, 1}], [frozenset([3])], {"a", "b"}, {3, 1}])
def test_sets_have_no_order_and_are_no_prompts(prompts: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^prompts?: expected .*got (frozen)?set"):
        encode(check_prompts(prompts)[0], None, raw=False, vocab_size=8, context_length=8)


def test_what_a_tokenizer_raises_at_a_prompt_names_the_prompt() -> None:
    core = Tokenizer(models.WordLevel({"known": 0}))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    message = r"^prompts\[1\]: expected text that the tokenizer can encode, got Exception: .*Missing \[UNK\]"
    with pytest.raises(InvalidInput, match=message) as caught:
        generate(tiny_model("llama"), tokenizer, ["known", "unknown"])
    assert type(caught.value.__cause__) is Exception
