"""Turns generated token ids into text as they come, without ever cutting a character in two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sennit.hf.stops import StopStrings

__all__ = ["TextStream"]

# What decoders print for bytes that are not (yet) a whole UTF-8 character.
REPLACEMENT = "\ufffd"

# An incomplete character has up to three bytes; a decoder that gives up on a whole run of bytes then prints four more
# for the character before it. A longer run of replacements is not the beginning of anything.
INCOMPLETE, INVALID = 3, 8


class TextStream:
    """Text of one request's generated tokens, handed out piece by piece up to the first stop string.

    A piece is held back while it ends in the middle of a character, or while it may be the beginning of a stop string.
    The pieces joined are the text of all tokens decoded at once, cut before the first stop string. Special tokens are
    left out. Without a tokenizer every piece is empty.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = ()) -> None:
        self._decoder = None if tokenizer is None else Decoder(tokenizer)
        self._stops = StopStrings(stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._pieces)

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Add a token; return the text that has become certain with it, often empty."""
        return self._hand_out(self._stops.push(self._decoder.push(token)) if self._decoder else "")

    def finish(self) -> str:
        """Return what was held back: the end of the text, an incomplete last character included."""
        if self._decoder is None or self.matched is not None:
            return ""
        return self._hand_out(self._stops.push(self._decoder.finish()) + self._stops.finish())

    def finish_undecoded(self) -> str:
        """Return what was held back for the stop strings alone, without asking the tokenizer for more."""
        return self._hand_out(self._stops.finish())

    def _hand_out(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece


class Decoder:
    """Decodes tokens that come one by one; the pieces joined are the text of all tokens decoded at once.

    Each piece is the difference of two decodings of a short window, since decoding one token alone is wrong where a
    tokenizer joins bytes or puts spaces between words.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # First token of the window; first token whose text is not told, but for its first characters.
        self._window, self._told, self._ahead = 0, 0, 0
        self._pieces: list[str] = []

    def push(self, token: int) -> str:
        """Add a token; return the text that has become complete with it.

        When the tokenizer raises, nothing has changed: the token can be pushed again.
        """
        ids, told = [*self._ids[self._window :], token], self._told - self._window
        known, text = len(self._text(ids[:told])), self._text(ids)
        start, end = known + self._ahead, _settled(text)
        if end > start:
            count, length = self._settled_tokens(ids, text, end) or (told, known)
            self._ahead = end - length
            if count > told:
                self._window, self._told = self._told, self._window + count
            self._pieces.append(text[start:end])
        self._ids.append(token)
        return text[start:end]

    def finish(self) -> str:
        """Return what was held back: the end of the text, an incomplete last character included."""
        whole, told = self._text(self._ids), "".join(self._pieces)
        if not whole.startswith(told):
            # A tokenizer whose text depends on what follows (one that tidies spaces): only the window's view continues
            # what has been handed out already.
            whole, known = self._text(self._ids[self._window :]), self._text(self._ids[self._window : self._told])
            told = whole[: len(known) + self._ahead]
        self._pieces.append(whole[len(told) :])
        return self._pieces[-1]

    def _settled_tokens(self, ids: list[int], text: str, end: int) -> tuple[int, int] | None:
        """The most tokens whose text is that of all of them up to ``end`` or less, and the length of that text."""
        if end == len(text):
            return len(ids), end
        for count in range(len(ids) - 1, self._told - self._window, -1):
            first = self._text(ids[:count])
            if len(first) <= end and text.startswith(first):
                return count, len(first)
        return None

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _settled(text: str) -> int:
    """How many of the first characters will stay what they are, whatever tokens follow."""
    run = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - (run if run < INVALID else INCOMPLETE)
