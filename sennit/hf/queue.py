"""A batcher's requests, waiting and running: who starts, who is put back, and what each step computes of whom."""

from __future__ import annotations

from collections import deque

from sennit.hf.requests import Event, FinishReason, Request
from sennit.hf.scheduling import Chunk, cut_to_pages, growing_room, share_budget, tokens_that_fit
from sennit.hf.sharing import SharedSequences

__all__ = ["RequestQueue"]


class RequestQueue:
    """First come, first served, as far as memory goes.

    Invariants: a running request has a sequence in the cache, a waiting one has none; nobody is in both lists; the
    request that has run longest is never put back for lack of room, so that somebody always finishes.
    """

    def __init__(
        self,
        sequences: SharedSequences,
        *,
        capacity: int,
        max_batch_tokens: int,
        max_step_tokens: int,
        max_requests: int,
    ) -> None:
        self._sequences = sequences
        self._capacity = capacity  # tokens of the longest sequence that fits alone,
        self._max_step_tokens = max_step_tokens  # computed in steps of so many
        self._max_batch_tokens, self._max_requests = max_batch_tokens, max_requests
        self.running: list[Request] = []  # in the order in which they started
        self.waiting: deque[Request] = deque()
        self.ended: list[Event] = []  # events that nobody has been told about
        self.preemptions = self.prompts_chunked = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def find(self, request: int) -> Request | None:
        """Return the request with an id, if it has not ended."""
        return next((r for r in (*self.running, *self.waiting) if r.id == request), None)

    def end(self, request: Request) -> None:
        """Take a request out of the queue."""
        if request.sequence is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._sequences.retire(request.sequence)
            request.sequence = None

    def end_early(self, request: Request, reason: FinishReason) -> None:
        """End a request with what it has; the event goes to :attr:`ended`."""
        self.end(request)
        self.ended.append(request.end(reason))

    def schedule(self) -> list[tuple[Request, int]]:
        """Return the next step's requests, each with the number of tokens that it computes; some may end instead."""
        self._settle()
        chunks = dict(self._place_running())
        chunks |= self._admit(list(chunks.items()))
        return [(r, chunks[r.running]) for r in self.running if r.running in chunks]

    def computed(self, request: Request, tokens: int) -> None:
        """Say that a step has put that many more of a request's tokens into the cache."""
        self._holds(request, request.cached + tokens)
        if request.pending and not request.chunked:
            request.chunked = True
            self.prompts_chunked += 1

    def _settle(self) -> None:
        """Make good a step that was interrupted after the cache had taken its tokens, and before anybody knew."""
        for request in reversed(self.running[:]):
            length = self._sequences.length(request.running)
            if length == len(request.tokens):  # the token that comes next was computed, and is lost
                self._put_back(request)
            elif length != request.cached:
                self._holds(request, length)

    def _holds(self, request: Request, length: int) -> None:
        request.cached = length
        self._sequences.computed(request.running, request.tokens, length)

    def _place_running(self) -> list[Chunk]:
        """Chunks of the running requests, after making the room that their decoding needs."""
        room = self._sequences
        while self.running:
            wanted = share_budget(self._pending(), max_tokens=self._max_batch_tokens)
            room.make_room(wanted)
            chunks = cut_to_pages(wanted, missing_pages=room.missing_pages)
            if chunks is not None:
                return chunks
            if len(self.running) > 1:
                self._put_back(self.running[-1])
            else:
                self.end_early(self.running[0], "capacity")
        return []

    def _admit(self, placed: list[Chunk]) -> list[Chunk]:
        """Start waiting requests while there is room for all that they need; return their chunks beside the others."""
        chunks: list[Chunk] = []
        max_tokens = self._max_batch_tokens - sum(tokens for _, tokens in placed)
        held_back: list[Request] = []
        try:
            while self.waiting and max_tokens > 0 and len(self.running) < self._max_requests:
                request = self.waiting[0]
                if len(request.tokens) > self._capacity:
                    self.end_early(request, "capacity")
                    continue
                started = self._sequences.start(request.tokens)
                if started is None:  # a page or more of its prefix is being computed right now
                    held_back.append(self.waiting.popleft())
                    if len(held_back) == self._max_requests:
                        break
                    continue
                sequence, shared = started
                new = (sequence, len(request.tokens) - shared)
                # All known tokens of everybody must fit, so that a prompt which has been started is also finished.
                known, spare = [*self._pending(), new], growing_room(len(self.running))
                if not self._sequences.make_room(known, spare=spare, max_step_tokens=self._max_step_tokens):
                    self._sequences.drop(sequence)
                    break
                self._start(self.waiting.popleft(), sequence, shared)
                wanted = (sequence, min(new[1], max_tokens))
                count = tokens_that_fit(wanted, [*placed, *chunks], self._sequences.missing_pages)
                if not count:
                    break
                chunks.append((sequence, count))
                max_tokens -= count
        finally:
            self.waiting.extendleft(reversed(held_back))
        return chunks

    def _pending(self) -> list[Chunk]:
        return [(r.running, r.pending) for r in self.running]

    def _start(self, request: Request, sequence: int, shared: int) -> None:
        request.sequence, request.cached, request.chunked = sequence, shared, False
        self._sequences.started(sequence, request.tokens, shared)
        self.running.append(request)

    def _put_back(self, request: Request) -> None:
        self._sequences.drop(request.running)
        request.sequence, request.cached = None, 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
