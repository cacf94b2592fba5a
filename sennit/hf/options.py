"""Keywords of ``generate`` and ``stream``: the batcher's, and its requests', one for all prompts or one each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from sennit.errors import InvalidInput

__all__ = ["BatcherOptions", "Options", "OptionsByPrompt", "RequestOptions"]


class BatcherOptions(TypedDict, total=False):
    """Keywords of :class:`sennit.hf.Batcher`."""

    memory: str | int | float | None
    num_tokens: int | None
    page_size: int
    max_batch_tokens: int
    max_requests: int
    share_prefixes: bool
    split_size: int | None
    backend: str


class RequestOptions(TypedDict, total=False):
    """Keywords of :meth:`sennit.hf.Batcher.submit`: one value for all prompts, or a list of one a prompt.

    ``stop`` and ``eos_token_id`` may be lists themselves: theirs is a list of one a prompt as soon as an item is a list
    or None.
    """

    max_new_tokens: int | Sequence[int]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float | None] | None
    min_p: float | Sequence[float | None] | None
    seed: int | Sequence[int | None] | None
    stop: str | Sequence[str | Sequence[str] | None] | None
    eos_token_id: int | Sequence[int | Sequence[int] | None] | None
    raw: bool | Sequence[bool]
    logprobs: bool | Sequence[bool]


class Options(BatcherOptions, RequestOptions, total=False):
    """All of them."""


LISTS_THEMSELVES = ("stop", "eos_token_id")


class OptionsByPrompt:
    """What was asked for each of ``count`` prompts.

    Raises:
        InvalidInput: a list of one a prompt has another length.

    >>> asked = OptionsByPrompt({"temperature": [0.0, 0.8], "stop": ["a", "b"], "eos_token_id": [[2], None]}, count=2)
    >>> asked[1]
    {'temperature': 0.8, 'stop': ['a', 'b'], 'eos_token_id': None}
    """

    def __init__(self, options: Mapping[str, Any], *, count: int) -> None:
        self._options = options
        self._each = {name: each for name, value in options.items() if (each := _one_each(name, value)) is not None}
        for name, each in self._each.items():
            if len(each) != count:
                raise InvalidInput(name, expected=f"one value, or a list of {count}, one a prompt", got=len(each))

    def __getitem__(self, prompt: int) -> dict[str, Any]:
        return {name: self._each[name][prompt] if name in self._each else self._options[name] for name in self._options}

    @contextmanager
    def named(self, prompt: int) -> Iterator[None]:
        """Errors inside say of which prompt an argument is, where it was given for each."""
        try:
            yield
        except InvalidInput as error:
            if error.argument not in self._each:
                raise
            argument = f"{error.argument}[{prompt}]"
            raise InvalidInput(argument, expected=error.expected, got=error.got, hint=error.hint) from None


def _one_each(name: str, value: Any) -> list[Any] | None:
    """The values of the prompts, or None where one value is for all of them."""
    if getattr(value, "ndim", 0) == 1:  # NumPy arrays and tensors
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)):
        return None
    if name in LISTS_THEMSELVES and not any(item is None or isinstance(item, (list, tuple)) for item in value):
        return None
    return list(value)
