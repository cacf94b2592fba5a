"""``generate`` and ``stream``: a list of prompts in, their completions or tokens out, by continuous batching."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sennit.cache.layout import read_page_size
from sennit.errors import RequestFailed
from sennit.hf.batcher import MAX_BATCH_TOKENS, MAX_NEW_TOKENS, MAX_REQUESTS, PAGE_SIZE, Batcher
from sennit.hf.models import context_length, layer_specs, model_device, vocab_size
from sennit.hf.options import Options, OptionsByPrompt, split_options
from sennit.hf.prompts import Prompt, check_prompts, check_tokenizer, encode
from sennit.hf.requests import Completion, Event
from sennit.hf.sizing import default_tokens, flag, positive, tokens_for

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from sennit.spec import AttentionSpec

__all__ = ["generate", "stream"]


def generate(
    model: Any, tokenizer: Any | None, prompts: Sequence[Prompt], **options: Unpack[Options]
) -> list[Completion]:
    """Generate for many prompts at once; greedily, unless a temperature is given.

    Greedy tokens are those of transformers' own ``generate``, one prompt at a time.

    Args:
        model: a transformers causal language model of a supported architecture.
        tokenizer: its tokenizer; None when prompts are token ids.
        prompts: strings, messages or token ids, in a list; see :func:`sennit.hf.prompts.encode`.
        **options: two kinds of keywords.

            Those of :meth:`sennit.hf.Batcher.submit` (``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``,
            ``min_p``, ``seed``, ``stop``, ``eos_token_id``, ``raw``, ``logprobs``) take one value for all prompts, or a
            list of one a prompt. A list of strings is one value of ``stop``, a list of integers one of
            ``eos_token_id``: one a prompt is there a list of lists. One seed for all gives equal prompts equal tokens.

            Those of :class:`sennit.hf.Batcher`. Without ``memory`` and ``num_tokens`` the cache holds all prompts that
            run together at their full length, if a sensible part of the free memory allows.

    Returns:
        One completion a prompt, in the prompts' order.

    Raises:
        InvalidInput: an option does not exist (the text lists those that do); else see :class:`sennit.hf.Batcher` and
            its ``submit``. What is wrong with one prompt is told of ``prompts[i]``. Nothing has been computed then.
        UnsupportedModel, UnsupportedFeature, CapacityExceeded: likewise.
        RequestFailed: the model's logits are no numbers for some prompts, or the tokenizer raised while it decoded; the
            text names ``prompts[i]``, and ``requests`` has the indices.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> tiny = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    >>> model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, max_position_embeddings=64, **tiny, **heads))
    >>> first, second = generate(model, None, [[1, 2, 3], [4]], max_new_tokens=[5, 4], temperature=[0.0, 0.8])
    >>> len(first.token_ids), second.finish_reason
    (5, 'length')
    >>> again = generate(model, None, [[4]], max_new_tokens=4, temperature=0.8, seed=second.seed)
    >>> again[0].token_ids == second.token_ids
    True
    """
    found: dict[int, Completion] = {}
    for event in stream(model, tokenizer, prompts, **options):
        if event.completion is not None:
            found[event.request] = event.completion
    return [found[index] for index in range(len(found))]


def stream(
    model: Any, tokenizer: Any | None, prompts: Sequence[Prompt], **options: Unpack[Options]
) -> Generator[Event, None, None]:
    """Generate like :func:`generate`, and yield each token as it comes.

    Prompts and options are checked by the call itself, before the first token is asked for. Closing the generator ends
    everything and frees the cache.

    Yields:
        Events in the order in which they happen; ``event.request`` is the index of the prompt.
    """
    of_requests, own = split_options(options)
    specs = layer_specs(model)  # refuses a model by name before anything is asked of it
    vocabulary, context = vocab_size(model), context_length(model.config)
    check_tokenizer(tokenizer)
    listed = check_prompts(prompts)
    asked = OptionsByPrompt(of_requests, count=len(listed))
    requests, lengths = [], []
    for i, prompt in enumerate(listed):
        with asked.named(i):
            request = asked[i]
            raw = flag("raw", request.pop("raw", False))
            ids = encode(prompt, tokenizer, raw=raw, vocab_size=vocabulary, context_length=context)
            new = positive("max_new_tokens", request.get("max_new_tokens", MAX_NEW_TOKENS))
            lengths.append(min(len(ids) + new, context))
            requests.append((ids, request))
    if own.get("memory") is None and own.get("num_tokens") is None:
        own["num_tokens"] = _cache_tokens(specs, model_device(model), lengths, own)
    batcher = Batcher(model, tokenizer, **own)
    for i, (ids, request) in enumerate(requests):
        with asked.named(i):
            batcher.submit(ids, **request)
    if not requests:  # an option that is wrong for all prompts is wrong for none, too
        batcher.submit([0], **asked.shared)
        batcher.close()
    return _events(batcher)


def _events(batcher: Batcher) -> Generator[Event, None, None]:
    with batcher:
        while batcher.has_work:
            try:
                events = batcher.step()
            except RequestFailed as error:  # of requests; the caller knows prompts
                raise RequestFailed(error.problem, requests=error.requests, named="prompts[{}]") from error.__cause__
            yield from events


def _cache_tokens(
    specs: Sequence[AttentionSpec], device: torch.device, lengths: Sequence[int], options: Mapping[str, Any]
) -> int:
    page_size = read_page_size(options.get("page_size", PAGE_SIZE))
    max_requests = positive("max_requests", options.get("max_requests", MAX_REQUESTS))
    max_batch_tokens = positive("max_batch_tokens", options.get("max_batch_tokens", MAX_BATCH_TOKENS))
    wanted = tokens_for(lengths, page_size=page_size, max_requests=max_requests)
    return default_tokens(
        wanted,
        specs,
        device,
        page_size=page_size,
        max_requests=max_requests,
        max_batch_tokens=max_batch_tokens,
    )
