"""Keywords of ``generate`` and ``stream``: the batcher's, and its requests', one for all prompts or one each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypedDict

from sennit.errors import CapacityExceeded, InvalidInput
from sennit.hf.sampling import NEEDS_TEMPERATURE

__all__ = ["BatcherOptions", "Options", "OptionsByPrompt", "RequestOptions", "split_options"]


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

# What transformers' own `generate` calls things that have another name or form here.
INSTEAD = {
    "do_sample": "give a temperature above 0 to sample, and none for greedy tokens",
    "max_length": "give max_new_tokens, which counts the generated tokens alone",
    "num_return_sequences": "give the prompt that many times",
    "pad_token_id": "leave it out, nothing is padded",
    "stop_strings": "give stop",
    "streamer": "use sennit.hf.stream",
}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of :class:`RequestOptions`, and those of :class:`BatcherOptions`.

    Raises:
        InvalidInput: an option is neither; the text says which there are, and what may have been meant.

    >>> split_options({"page_size": 8, "seed": 7})
    ({'seed': 7}, {'page_size': 8})
    >>> split_options({"temprature": 0.5})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    sennit.errors.InvalidInput: temprature: expected one of max_new_tokens, ..., backend, got an unknown option; \
did you mean temperature?
    """
    requests, batcher = RequestOptions.__annotations__, BatcherOptions.__annotations__
    names = [*requests, *batcher]
    for name in options:
        if name not in names:
            raise InvalidInput(
                name, expected=f"one of {', '.join(names)}", got="an unknown option", hint=_meant(name, names)
            )
    return {k: v for k, v in options.items() if k in requests}, {k: v for k, v in options.items() if k in batcher}


class OptionsByPrompt:
    """What was asked for each of ``count`` prompts.

    Attributes:
        shared: options with one value for all prompts.

    Raises:
        InvalidInput: a list of one a prompt has another length.

    >>> asked = OptionsByPrompt({"temperature": [0.0, 0.8], "stop": ["a", "b"], "eos_token_id": [[2], None]}, count=2)
    >>> asked[1]
    {'stop': ['a', 'b'], 'temperature': 0.8, 'eos_token_id': None}
    """

    def __init__(self, options: Mapping[str, Any], *, count: int) -> None:
        self._each = {name: each for name, value in options.items() if (each := _one_each(name, value)) is not None}
        self.shared = {name: value for name, value in options.items() if name not in self._each}
        for name, each in self._each.items():
            if len(each) != count:
                raise InvalidInput(name, expected=f"one value, or a list of {count}, one a prompt", got=len(each))

    def __getitem__(self, prompt: int) -> dict[str, Any]:
        return self.shared | {name: each[prompt] for name, each in self._each.items()}

    @contextmanager
    def named(self, prompt: int) -> Iterator[None]:
        """Errors inside say which prompt is wrong, or of which one an option that was given for each."""
        try:
            yield
        except InvalidInput as error:
            if error.expected == NEEDS_TEMPERATURE and error.argument in self.shared and "temperature" in self._each:
                raise InvalidInput(
                    error.argument,
                    expected=error.expected,
                    got=f"{self.shared[error.argument]}, and prompts[{prompt}] has temperature 0",
                    hint="give a list with None for greedy prompts",
                ) from None
            if error.argument in self._each:
                argument = f"{error.argument}[{prompt}]"
            elif error.argument.startswith("prompt"):  # the prompt, or one of its messages: prompt[2]
                argument = error.argument.replace("prompt", f"prompts[{prompt}]", 1)
            else:
                raise
            renamed = InvalidInput(argument, expected=error.expected, got=error.got, hint=error.hint)
            raise renamed from error.__cause__
        except CapacityExceeded as error:
            raise CapacityExceeded(f"prompts[{prompt}]: {error}") from None


def _meant(name: str, names: Sequence[str]) -> str:
    """What somebody who asked for an option that does not exist may have wanted."""
    from transformers import GenerationConfig

    if name in INSTEAD:
        return INSTEAD[name]
    if hasattr(GenerationConfig(), name):
        return (
            "Sennit has no such setting of transformers' own generate, which can run with attn_implementation='sennit'"
        )
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else ""


def _one_each(name: str, value: Any) -> list[Any] | None:
    """The values of the prompts, or None where one value is for all of them."""
    if getattr(value, "ndim", 0) == 1:  # NumPy arrays and tensors
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)):
        return None
    if name in LISTS_THEMSELVES and not any(item is None or isinstance(item, (list, tuple)) for item in value):
        return None
    return list(value)
