"""Turns generated token ids into text as they come, without ever cutting a character in two."""

from __future__ import annotations

from typing import Any

__all__ = ["TextStream"]

# What decoders print for bytes that are not (yet) a whole UTF-8 character.
REPLACEMENT = "\ufffd"


class TextStream:
    """Text of one request's generated tokens, handed out piece by piece.

    A piece is held back while it ends in the middle of a character. The pieces joined are the text of all tokens
    decoded at once. Special tokens are left out. Without a tokenizer every piece is empty.

    Each piece is the difference of two decodings of a short window, since decoding one token alone is wrong where a
    tokenizer joins bytes or puts spaces between words.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window, self._told = 0, 0  # first token of the window; first token whose text is held back
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Add a token; return the text that has become complete with it, often empty."""
        if self._tokenizer is None:
            return ""
        ids = [*self._ids[self._window :], token]
        known, longer = self._text(ids[: self._told - self._window]), self._text(ids)
        self._ids.append(token)  # last, so that a token whose decoding fails can be pushed again
        if len(longer) <= len(known) or longer.endswith(REPLACEMENT):
            return ""
        self._window, self._told = self._told, len(self._ids)
        return self._hand_out(longer[len(known) :])

    def finish(self) -> str:
        """Return what was held back: the end of the text, an incomplete last character included."""
        if self._tokenizer is None:
            return ""
        whole, told = self._decode(0, len(self._ids)), self.text
        if whole.startswith(told):
            return self._hand_out(whole[len(told) :])
        # A tokenizer whose text depends on what follows (one that tidies spaces): only the window's view continues
        # what has been handed out already.
        known, longer = self._decode(self._window, self._told), self._decode(self._window, len(self._ids))
        return self._hand_out(longer[len(known) :])

    def _hand_out(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _decode(self, start: int, stop: int) -> str:
        return self._text(self._ids[start:stop])

    def _text(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
