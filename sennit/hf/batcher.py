"""Continuous batching of a Hugging Face model: requests join, decode and leave, one packed step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sennit.cache.demand import is_integer
from sennit.cache.layout import read_page_size
from sennit.errors import CapacityExceeded, InvalidInput, RequestFailed, SennitError
from sennit.hf.drawing import NO_TOKEN
from sennit.hf.forward import PackedForward
from sennit.hf.generation_config import check_generation_config, stop_tokens
from sennit.hf.models import context_length, layer_specs, model_device, vocab_size
from sennit.hf.prompts import Prompt, check_tokenizer, encode
from sennit.hf.queue import RequestQueue
from sennit.hf.requests import Event, NewToken, Request
from sennit.hf.sampling import Sampling
from sennit.hf.sharing import SharedSequences
from sennit.hf.sizing import default_tokens, flag, longest_alone, longest_step, positive
from sennit.hf.stats import BatcherStats
from sennit.hf.stops import stop_strings
from sennit.hf.text import TextStream
from sennit.kvcache import KVCache

__all__ = ["MAX_BATCH_TOKENS", "MAX_NEW_TOKENS", "MAX_REQUESTS", "PAGE_SIZE", "Batcher"]

PAGE_SIZE = 16
MAX_REQUESTS = 64
MAX_BATCH_TOKENS = 2048
MAX_NEW_TOKENS = 64


class Batcher:
    """Generation for prompts that come and go, sharing every step of one model.

    Each :meth:`step` is one forward pass over packed tokens: one of every request that decodes, and as much of the
    prompts as the token budget allows. When memory runs out, finished sequences that were kept for their prefixes go
    first; then the request that started last is put back at the front of the queue and computed again later. A request
    that fills the whole cache alone ends with finish reason ``"capacity"``; windows in all layers keep it from that,
    once the cache has room for them. The same calls give the same steps.

    A request is decoded greedily unless it asks for a temperature, whatever sampling settings the model's generation
    configuration has. What is drawn for a request depends on its logits and its seed alone, not on what shares its
    steps. The last bits of its logits may depend on that: attention's without ``split_size``, and those of the model's
    own matrix products where a library rounds otherwise for another number of rows.

    The model's attention setting is Sennit's while a step runs and its own between steps. One thread at a time uses a
    batcher and its model.

    Args:
        model: a transformers causal language model of a supported architecture
            (:data:`sennit.hf.models.SUPPORTED`), on one device.
        tokenizer: its tokenizer; None when prompts are token ids (texts are then empty).
        memory: of the cache: ``"4GiB"``, bytes, or a fraction of what is free.
        num_tokens: or its size in tokens. Without either it holds ``max_requests`` sequences of the model's full
            length, or takes a sensible part of the free memory if that is less. Layers with a window take at most
            what ``max_requests`` windows and a step of ``max_batch_tokens`` need, and leave the rest to the others.
        page_size: tokens a page; also the unit in which prefixes are found.
        max_batch_tokens: tokens that a step computes at most; longer prompts are cut into chunks.
        max_requests: requests that run at the same time.
        share_prefixes: fork what another request has computed already, from one page on. In a model with windows only a
            prompt that continues another's tokens can: what the windows have passed is gone.
        split_size: keys of a fixed chunk of attention, so that a request's attention has the same bits whatever shares
            the step; see :meth:`sennit.BatchAttention.plan`. None lets the planner choose.
        backend: of the cache's attention, ``"auto"`` or a name.

    Raises:
        UnsupportedModel: the model's architecture has not been tested.
        UnsupportedFeature: see :func:`sennit.hf.check_supported`; the model is spread over devices, or its generation
            configuration asks for something that changes tokens, such as a repetition penalty.
        InvalidInput: a number is out of range, or something else is no model, tokenizer or flag.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **tiny))
    >>> with Batcher(model, num_tokens=1024) as batcher:
    ...     first = batcher.submit([5, 6, 7], max_new_tokens=3, eos_token_id=[])
    ...     events = batcher.step()
    ...     second = batcher.submit([5, 6, 8], max_new_tokens=2, eos_token_id=[])
    ...     while batcher.has_work:
    ...         events += batcher.step()
    >>> [(event.request, event.finish_reason) for event in events]
    [(0, None), (0, None), (1, None), (0, 'length'), (1, 'length')]
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        memory: str | int | float | None = None,
        num_tokens: int | None = None,
        page_size: int = PAGE_SIZE,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        max_requests: int = MAX_REQUESTS,
        share_prefixes: bool = True,
        split_size: int | None = None,
        backend: str = "auto",
    ) -> None:
        max_requests = positive("max_requests", max_requests)
        max_batch_tokens = positive("max_batch_tokens", max_batch_tokens)
        self._split_size = None if split_size is None else positive("split_size", split_size)
        if max_batch_tokens < max_requests:
            raise InvalidInput(
                "max_batch_tokens",
                expected=f"at least max_requests={max_requests}, so that every request can decode",
                got=max_batch_tokens,
            )
        specs, device = layer_specs(model), model_device(model)
        self._generation_config = getattr(model, "generation_config", None)
        check_generation_config(self._generation_config)
        self._tokenizer = check_tokenizer(tokenizer)
        self._vocab_size = vocab_size(model)
        self._context = context_length(model.config)
        self._forward = PackedForward(model)
        if memory is None and num_tokens is None:
            wanted = max_requests * self._context
            num_tokens = default_tokens(
                wanted,
                specs,
                device,
                page_size=read_page_size(page_size),
                max_requests=max_requests,
                max_batch_tokens=max_batch_tokens,
            )
        self.cache = KVCache(
            specs,
            page_size=page_size,
            device=device,
            memory=memory,
            num_tokens=num_tokens,
            max_sequences=max_requests,
            max_step_tokens=max_batch_tokens,
            backend=backend,
        )
        self._capacity = longest_alone(self.cache) or self._context
        self._sequences = SharedSequences(
            self.cache, share=flag("share_prefixes", share_prefixes), max_retained=max_requests
        )
        self._queue = RequestQueue(
            self._sequences,
            capacity=self._capacity,
            max_batch_tokens=max_batch_tokens,
            max_step_tokens=longest_step(self.cache, max_batch_tokens=max_batch_tokens),
            max_requests=max_requests,
        )
        self._untold: list[NewToken] = []
        self._next_id = 0
        self._closed = False
        self._steps = self._tokens_computed = self._tokens_generated = 0

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        raw: bool = False,
        logprobs: bool = False,
    ) -> int:
        """Queue a prompt and return the request's id; ids count from 0.

        Args:
            prompt: a string, messages or token ids; see :func:`sennit.hf.prompts.encode`.
            max_new_tokens: tokens to generate at most, at least 1; fewer where the model's context length ends.
            temperature: 0 decodes greedily; with more, tokens are drawn at random.
            top_k, top_p, min_p: what they are drawn from; see :class:`sennit.hf.Sampling`. None keeps all tokens.
            seed: of the random numbers. Without one a fresh seed is drawn, which the completion reports.
            stop: string or strings that end the request; its text is cut before the first.
            eos_token_id: token or tokens that end the request, of those that the model has; those of its generation
                configuration when left out, none with an empty list.
            raw: do not apply the chat template to a string.
            logprobs: also report the natural logarithm of each generated token's probability by the model alone:
                at temperature 1 and without filters.

        Raises:
            InvalidInput: the prompt is empty, of another form or fills the model's context length, an argument is out
                of range or has no effect beside the others, or there are stop strings and no tokenizer.
            CapacityExceeded: the prompt and one new token are more than the cache can hold.
        """
        self._check_open()
        max_new_tokens = positive("max_new_tokens", max_new_tokens)
        raw, logprobs = flag("raw", raw), flag("logprobs", logprobs)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        text = TextStream(self._tokenizer, stop_strings(stop, self._tokenizer))
        ends = stop_tokens(eos_token_id, self._generation_config, vocab_size=self._vocab_size)
        tokens = encode(prompt, self._tokenizer, raw=raw, vocab_size=self._vocab_size, context_length=self._context)
        if len(tokens) + 1 > self._capacity:
            raise CapacityExceeded(
                f"a prompt of {len(tokens)} tokens and one new one do not fit the cache of {self._capacity} tokens; "
                "give the batcher more memory or shorten the prompt"
            )
        new = min(max_new_tokens, self._context - len(tokens))
        request = Request(self._next_id, tokens, new, sampling.seeded(), ends, logprobs, text)
        self._next_id += 1
        self._queue.waiting.append(request)
        return request.id

    def cancel(self, request: int) -> bool:
        """End a request; the next step reports its end, with finish reason ``"cancelled"`` and what it had until then.

        Nothing is decoded for that: a token that could not be, and an incomplete last character, are left out.

        Returns:
            False when it had ended already.

        Raises:
            InvalidInput: no such request was submitted.
        """
        self._check_open()
        if not is_integer(request) or not 0 <= request < self._next_id:
            raise InvalidInput(
                "request", expected=f"an id that submit returned ({self._next_id} so far, from 0)", got=repr(request)
            )
        found = self._queue.find(request)
        if found is None:
            return False
        decoded = [new for new in self._untold if new.request is found and new.text is not None]
        self._untold = [new for new in self._untold if new.request is not found]
        self._queue.ended += [new.undecided() for new in decoded]
        self._queue.end_early(found, "cancelled")
        return True

    def step(self) -> list[Event]:
        """Run one packed forward pass and return what happened, ends of cancelled requests first.

        Without anything to do there are no events. When it raises, no request has lost anything: the same step can be
        tried again, after :meth:`cancel` without the requests that cannot go on.

        Raises:
            RequestFailed: the model's logits are no numbers for some requests, or the tokenizer raised while it
                decoded their tokens; the text and ``requests`` name them.
        """
        self._check_open()
        self._tell()
        chunks = self._queue.schedule()
        if chunks:
            self._compute(chunks)
        self._tell()
        events, self._queue.ended = self._queue.ended, []
        if not chunks and not events and self.has_work:
            raise SennitError(f"no request can proceed: {self.stats()}; this is a bug in Sennit")
        return events

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits, or an end has not been reported yet."""
        return bool(len(self._queue) or self._queue.ended or self._untold)

    def stats(self) -> BatcherStats:
        """Return counters since the start, and what the batcher holds now."""
        return BatcherStats(
            steps=self._steps,
            tokens_computed=self._tokens_computed,
            tokens_generated=self._tokens_generated,
            prompts_chunked=self._queue.prompts_chunked,
            forks=self._sequences.forks,
            tokens_shared=self._sequences.tokens_shared,
            preemptions=self._queue.preemptions,
            evictions=self._sequences.evictions,
            running=len(self._queue.running),
            waiting=len(self._queue.waiting),
            retained=self._sequences.num_retained,
        )

    def close(self) -> None:
        """Forget every request and empty the cache; the batcher cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._queue.running.clear()
            self._queue.waiting.clear()
            self._queue.ended.clear()
            self._untold.clear()
            self._sequences.clear()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _compute(self, chunks: list[tuple[Request, int]]) -> None:
        """Run the model over these chunks, and give every request whose known tokens are all computed its next one."""
        ids: list[int] = []
        rows: list[int] = []
        complete = [request for request, count in chunks if count == request.pending]
        for request, count in chunks:
            ids += request.tokens[request.cached : request.cached + count]
            if count == request.pending:
                rows.append(len(ids) - 1)
        choices = [request.choice for request in complete]
        logprobs = any(request.wants_logprobs for request in complete)
        items = [(request.running, count) for request, count in chunks]
        with torch.inference_mode(), self.cache.step(items, split_size=self._split_size) as step:
            tokens, chances = self._forward(step, ids, rows, choices, logprobs=logprobs)
            _check_tokens(tokens, complete)
        self._steps += 1
        self._tokens_computed += len(ids)
        self._tokens_generated += len(complete)
        for i, request in enumerate(complete):
            chance = chances[i] if chances is not None and request.wants_logprobs else None
            self._untold.append(NewToken(request, choices[i][1], tokens[i], chance))
        for request, count in chunks:
            self._queue.computed(request, count)

    def _tell(self) -> None:
        """Turn new tokens into events, and end the requests whose last token or stop string has come.

        A tokenizer that raises loses nothing: what it could not decode stays for the next call, and must be told, or
        its request cancelled, before the next step.
        """
        failed: dict[int, Exception] = {}
        for new in self._untold[:]:
            try:
                event = new.event()
            except Exception as error:  # a tokenizer's own
                failed[new.request.id] = error
                continue
            self._untold.remove(new)
            if event.completion is not None:
                self._queue.end(new.request)
            self._queue.ended.append(event)
        if failed:
            first = next(iter(failed.values()))
            problem = f"the tokenizer raised {type(first).__name__} while it decoded a new token: {first}"
            raise RequestFailed(problem, requests=list(failed)) from first

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("batcher", expected="an open batcher", got="one that was closed", hint="make a new one")


def _check_tokens(tokens: Sequence[int], requests: Sequence[Request]) -> None:
    broken = [request.id for request, token in zip(requests, tokens, strict=True) if token == NO_TOKEN]
    if broken:
        raise RequestFailed(
            "expected logits, got NaN or infinity; the model's weights hold NaN, or numbers overflow in its dtype (try "
            "bfloat16 or float32)",
            requests=broken,
        )
