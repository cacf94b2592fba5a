"""Turns what a caller may give as a prompt (a string, messages, token ids) into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any, TypeAlias

from sennit.errors import InvalidInput

__all__ = ["Prompt", "check_prompts", "check_tokenizer", "encode"]

Prompt: TypeAlias = "str | Sequence[Mapping[str, Any]] | Sequence[int]"

FORMS = "a string, a list of messages ({'role': ..., 'content': ...}) or a list of token ids"


def encode(prompt: Prompt, tokenizer: Any | None, *, raw: bool, vocab_size: int, context_length: int) -> list[int]:
    """Return the token ids of a prompt.

    - A string is one user message under the tokenizer's chat template, with the template's generation prompt after
      it; with ``raw=True``, or when the tokenizer has no chat template, it is tokenized as it is.
    - Messages always go through the chat template.
    - Token ids are taken as they are.

    Args:
        prompt: one of the three.
        tokenizer: a transformers tokenizer; None when prompts are token ids.
        raw: do not apply the chat template to a string.
        vocab_size: ids must be below it.
        context_length: of the model; there must be fewer ids, so that at least one can follow.

    Raises:
        InvalidInput: the prompt has another form, is empty or too long, has ids out of range, or needs a tokenizer or
            a chat template that is not there.

    >>> encode([3, 1, 2], None, raw=False, vocab_size=8, context_length=16)
    [3, 1, 2]
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, _needed(tokenizer), raw=raw)
    elif _is_messages(prompt):
        ids = _encode_messages(prompt, _needed(tokenizer), raw=raw)
    elif _is_ids(prompt):
        ids = [int(i) for i in prompt]  # type: ignore[arg-type]
    else:
        raise InvalidInput("prompt", expected=FORMS, got=_describe(prompt))
    if not ids:
        raise InvalidInput("prompt", expected="at least one token", got=f"no tokens from {_describe(prompt)}")
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise InvalidInput("prompt", expected=f"token ids from 0 to {vocab_size - 1}", got=outside)
    if len(ids) >= context_length:
        raise InvalidInput(
            "prompt",
            expected=f"fewer tokens than the model's context length, {context_length}",
            got=f"{len(ids)} tokens",
            hint="shorten it; the model's positions do not go further",
        )
    return ids


def check_prompts(prompts: Any) -> list[Prompt]:
    """Return ``prompts`` as a list of prompts; a single prompt that was not put in a list is refused with a hint.

    Raises:
        InvalidInput: ``prompts`` is one string, one list of token ids, one list of messages, or no sequence.
    """
    wrap = "put a single prompt in a list: [prompt]"
    if isinstance(prompts, str):
        raise InvalidInput("prompts", expected="a list of prompts", got="one string", hint=wrap)
    if isinstance(prompts, (Mapping, Set)) or not hasattr(prompts, "__iter__"):
        raise InvalidInput("prompts", expected="a list of prompts", got=type(prompts).__name__, hint=wrap)
    if _is_ids(prompts) and len(prompts):
        raise InvalidInput("prompts", expected="a list of prompts", got="one list of token ids", hint=wrap)
    listed: list[Prompt] = list(prompts)
    if _is_messages(listed):
        raise InvalidInput("prompts", expected="a list of prompts", got="one list of messages", hint=wrap)
    return listed


def check_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer, or None; raise :class:`InvalidInput` if it is something that cannot decode."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise _no_tokenizer(tokenizer)
    return tokenizer


def _encode_text(text: str, tokenizer: Any, *, raw: bool) -> list[int]:
    if raw or not getattr(tokenizer, "chat_template", None):
        return _tokenize(text, tokenizer)
    return _apply_template([{"role": "user", "content": text}], tokenizer)


def _encode_messages(messages: Any, tokenizer: Any, *, raw: bool) -> list[int]:
    if raw:
        raise InvalidInput(
            "prompt", expected="a string or token ids with raw=True", got="messages", hint="leave raw out"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            "prompt",
            expected="a string or token ids, since the tokenizer has no chat template",
            got="messages",
            hint="set tokenizer.chat_template, or format the messages yourself",
        )
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidInput(
                f"prompt[{i}]",
                expected="a message with 'role' and 'content'",
                got=f"keys {sorted(map(str, message))}",
            )
    return _apply_template([dict(m) for m in messages], tokenizer)


def _apply_template(messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs, and raise what they like
        raise InvalidInput(
            "prompt",
            expected="messages that the tokenizer's chat template accepts",
            got=f"{type(error).__name__}: {error}",
        ) from error
    # The template has written the special tokens already.
    return _tokenize(text, tokenizer, add_special_tokens=False)


def _tokenize(text: str, tokenizer: Any, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("prompt", expected="text that UTF-8 can hold", got=repr(text[error.start])) from None
    try:
        ids = tokenizer(text, **options)["input_ids"]
    except Exception as error:  # whatever a tokenizer raises; some know no token for what they were never shown
        raise InvalidInput(
            "prompt", expected="text that the tokenizer can encode", got=f"{type(error).__name__}: {error}"
        ) from error
    return [int(i) for i in ids]


def _needed(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise InvalidInput(
            "prompt", expected="token ids, since no tokenizer was given", got="text", hint="pass tokenizer="
        )
    if not callable(tokenizer):
        raise _no_tokenizer(tokenizer)
    return tokenizer


def _no_tokenizer(given: Any) -> InvalidInput:
    return InvalidInput("tokenizer", expected="a transformers tokenizer, or None", got=type(given).__name__)


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _is_ids(prompt: Any) -> bool:
    if (
        isinstance(prompt, (str, bytes, bytearray, Mapping, Set))  # a set has no order
        or not hasattr(prompt, "__len__")
        or not hasattr(prompt, "__iter__")
    ):
        return False
    if getattr(prompt, "ndim", 1) != 1:
        return False
    # NumPy arrays and tensors give their numbers through tolist().
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    return all(isinstance(i, Integral) and not isinstance(i, bool) for i in values)


def _describe(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "an empty string" if not prompt else f"a string of {len(prompt)} characters"
    if isinstance(prompt, (list, tuple)):
        kinds = sorted({type(p).__name__ for p in prompt})
        return f"a {type(prompt).__name__} of {', '.join(kinds)}" if kinds else f"an empty {type(prompt).__name__}"
    shape = getattr(prompt, "shape", None)
    return type(prompt).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
