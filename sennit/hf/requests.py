"""What a batcher knows about one request, and what it tells its caller: events and completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sennit.hf.drawing import Choice
from sennit.hf.sampling import Sampling
from sennit.hf.text import TextStream

__all__ = ["Completion", "Event", "FinishReason", "Request"]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "capacity"]


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    Attributes:
        text: the generated text, cut before a stop string, special tokens left out; empty without a tokenizer.
        token_ids: the generated tokens, a stop token or all tokens of a stop string included.
        finish_reason: ``"stop"`` (a stop token or a stop string came), ``"length"`` (``max_new_tokens``, or the model's
            context length), ``"cancelled"``, or ``"capacity"``: the request alone filled the whole cache. What it had
            is here.
        stopped_by: the stop token or stop string, where the reason is ``"stop"``; None otherwise.
        logprobs: natural logarithm of each generated token's probability by the model alone (the softmax of its logits,
            whatever the temperature and the filters), where they were asked for.
        num_prompt_tokens: tokens of the prompt.
        seed: with which the request's random choices can be repeated, given or drawn; None where it was greedy.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stopped_by: int | str | None
    logprobs: list[float] | None
    num_prompt_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Event:
    """One thing that happened to a request: a new token, its end, or both.

    Attributes:
        request: the id that ``submit`` returned; in ``stream`` the index of the prompt.
        token_id: the new token; None when the request ended without one (cancelled, capacity).
        text: new text, often empty while a character is incomplete or a stop string may have begun. The texts of a
            request's events joined are its completion's text.
        logprob: natural logarithm of the token's probability, where it was asked for; see :class:`Completion`.
        completion: everything that was generated, on the request's last event; None on the others.
    """

    request: int
    token_id: int | None
    text: str
    logprob: float | None = None
    completion: Completion | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, on its last event; None on the others."""
        return self.completion.finish_reason if self.completion else None


@dataclass(eq=False)
class Request:
    """One request on its way: its tokens so far, what it may still generate, and where it is in the cache.

    Attributes:
        tokens: the prompt's tokens, then those generated. The last generated one is not in the cache yet.
        sequence: the cache's id while the request is running; None while it waits.
        cached: how many of the tokens the cache holds.
        chunked: a step has computed some of its known tokens but not all, since it started running.
    """

    id: int
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    wants_logprobs: bool
    stream: TextStream
    num_prompt_tokens: int = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    sequence: int | None = None
    cached: int = 0
    chunked: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def running(self) -> int:
        """The cache's id of a request that is known to be running."""
        assert self.sequence is not None
        return self.sequence

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def choice(self) -> Choice:
        """How its next token is chosen: the same whatever shares the step, and when it is computed again."""
        return self.sampling, len(self.tokens) - self.num_prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens that are known and not in the cache yet."""
        return len(self.tokens) - self.cached

    def put(self, place: int, token: int, logprob: float | None) -> None:
        """Make ``token`` the generated token at a place, from 0, and the last one; saying it again changes nothing."""
        self.tokens[self.num_prompt_tokens + place :] = [token]
        if logprob is not None:
            self.logprobs[place:] = [logprob]

    def end(self, reason: FinishReason) -> Event:
        """Return the event of a request that ends without a new token; nothing is decoded for it."""
        return Event(self.id, None, self.stream.finish_undecoded(), None, self.completion(reason))

    def completion(self, reason: FinishReason) -> Completion:
        """What the caller gets in the end."""
        tokens, logprobs = self.generated, list(self.logprobs) if self.wants_logprobs else None
        by = (self.stream.matched or tokens[-1]) if reason == "stop" else None
        return Completion(self.stream.text, tokens, reason, by, logprobs, self.num_prompt_tokens, self.sampling.seed)


@dataclass(eq=False)
class NewToken:
    """A token computed for a request, which takes it once it is decoded.

    Decoding is a tokenizer's code, which may raise or be interrupted: :meth:`event` can then be tried again.
    """

    request: Request
    place: int  # among the request's generated tokens, from 0
    token: int
    logprob: float | None
    text: str | None = None  # what has become complete with the token

    def event(self) -> Event:
        """Decode the token, give it to its request and return its event, the last one with the completion."""
        request = self.request
        if self.text is None:
            self.text = request.stream.push(self.token)
        request.put(self.place, self.token, self.logprob)
        stops = request.stream.matched is not None or self.token in request.stop_tokens
        if not stops and self.place + 1 < request.max_new_tokens:
            return self.undecided()
        text = self.text + request.stream.finish()
        return Event(request.id, self.token, text, self.logprob, request.completion("stop" if stops else "length"))

    def undecided(self) -> Event:
        """Return the event of a decoded token after which its request goes on, or ends in another way."""
        return Event(self.request.id, self.token, self.text or "", self.logprob)
