"""``generate`` and ``stream``: a list of prompts in, their completions or tokens out, by continuous batching."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from sennit.hf.batcher import MAX_NEW_TOKENS, MAX_REQUESTS, PAGE_SIZE, Batcher
from sennit.hf.models import layer_specs, model_device, vocab_size
from sennit.hf.prompts import Prompt, check_prompts, encode
from sennit.hf.requests import Completion, Event
from sennit.hf.sizing import default_tokens, positive, tokens_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BatcherOptions", "generate", "stream"]


class BatcherOptions(TypedDict, total=False):
    """Keywords of :class:`sennit.hf.Batcher` that ``generate`` and ``stream`` pass on."""

    memory: str | int | float | None
    num_tokens: int | None
    page_size: int
    max_batch_tokens: int
    max_requests: int
    share_prefixes: bool
    backend: str


def generate(
    model: Any,
    tokenizer: Any | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    raw: bool = False,
    logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    **options: Unpack[BatcherOptions],
) -> list[Completion]:
    """Generate greedily for many prompts at once; the same tokens as transformers' own ``generate`` one by one.

    Args:
        model: a transformers ``LlamaForCausalLM`` or ``Qwen3ForCausalLM``.
        tokenizer: its tokenizer; None when prompts are token ids.
        prompts: strings, messages or token ids, in a list; see :func:`sennit.hf.prompts.encode`.
        max_new_tokens: tokens to generate at most for each prompt.
        raw: do not apply the chat template to strings.
        logprobs: also return the natural logarithm of each generated token's probability.
        eos_token_id: token or tokens that end a completion; the model's own when left out, none with an empty list.
        **options: of :class:`sennit.hf.Batcher`. Without ``memory`` and ``num_tokens`` the cache holds all prompts
            that run together at their full length, if a sensible part of the free memory allows.

    Returns:
        One completion a prompt, in the prompts' order.

    Raises:
        InvalidInput, UnsupportedModel, UnsupportedFeature, CapacityExceeded: see :class:`sennit.hf.Batcher` and its
            ``submit``; nothing has been computed then.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> tiny = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    >>> model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, max_position_embeddings=64, **tiny, **heads))
    >>> first, second = generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> len(first.token_ids), second.finish_reason
    (5, 'length')
    """
    found: dict[int, Completion] = {}
    events = stream(
        model,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        raw=raw,
        logprobs=logprobs,
        eos_token_id=eos_token_id,
        **options,
    )
    for event in events:
        if event.completion is not None:
            found[event.request] = event.completion
    return [found[index] for index in range(len(found))]


def stream(
    model: Any,
    tokenizer: Any | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    raw: bool = False,
    logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    **options: Unpack[BatcherOptions],
) -> Generator[Event, None, None]:
    """Generate like :func:`generate`, and yield each token as it comes.

    Prompts are checked by the call itself, before the first token is asked for. Closing the generator ends everything
    and frees the cache.

    Yields:
        Events in the order in which they happen; ``event.request`` is the index of the prompt.
    """
    encoded = _encoded(model, tokenizer, prompts, raw=raw)
    positive("max_new_tokens", max_new_tokens)
    if options.get("memory") is None and options.get("num_tokens") is None:
        options["num_tokens"] = _cache_tokens(model, [len(ids) + max_new_tokens for ids in encoded], options)
    batcher = Batcher(model, tokenizer, **options)
    for ids in encoded:
        batcher.submit(ids, max_new_tokens=max_new_tokens, logprobs=logprobs, eos_token_id=eos_token_id)
    return _events(batcher)


def _events(batcher: Batcher) -> Generator[Event, None, None]:
    with batcher:
        while batcher.has_work:
            yield from batcher.step()


def _encoded(model: Any, tokenizer: Any | None, prompts: Sequence[Prompt], *, raw: bool) -> list[list[int]]:
    layer_specs(model)  # refuses a model by name before anything is asked of it
    size = vocab_size(model)
    return [
        encode(prompt, tokenizer, raw=raw, vocab_size=size, argument=f"prompts[{i}]")
        for i, prompt in enumerate(check_prompts(prompts))
    ]


def _cache_tokens(model: Any, lengths: Sequence[int], options: BatcherOptions) -> int:
    page_size = positive("page_size", options.get("page_size", PAGE_SIZE))
    max_requests = positive("max_requests", options.get("max_requests", MAX_REQUESTS))
    wanted = tokens_for(lengths, page_size=page_size, max_requests=max_requests)
    return default_tokens(wanted, layer_specs(model), model_device(model), page_size=page_size)
