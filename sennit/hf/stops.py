"""Stop strings: text is held back while it may turn out to begin one, and cut before the first that is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sennit.errors import InvalidInput

__all__ = ["StopStrings", "stop_strings"]


class StopStrings:
    """Lets a growing text through up to the first stop string, whatever pieces it comes in.

    The first one is the one that is complete first; of several that end together, the longest.

    Attributes:
        matched: the stop string that came; None until then.

    >>> stop = StopStrings(["END", "..."])
    >>> [stop.push(piece) for piece in ["so. ", "The E", "X. The EN", "D and more"]]
    ['so. ', 'The ', 'EX. The ', '']
    >>> stop.matched
    'END'
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece; return what certainly comes before any stop string, nothing once one has matched."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, end, self.matched = min(found)
            self._held = ""
        else:
            end = len(text) - self._open(text)
            self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return what was held back: nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)


def stop_strings(stop: str | Sequence[str] | None, tokenizer: Any | None) -> tuple[str, ...]:
    """Return the stop strings of a request.

    Args:
        stop: one string or several; none when left out or empty.
        tokenizer: needed as soon as there is one.

    Raises:
        InvalidInput: an empty string, something that is no string, or no tokenizer; a string that no text can have: a
            special token, or what UTF-8 cannot hold.

    >>> stop_strings("###", object()), stop_strings(None, None)
    (('###',), ())
    """
    given: Any = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) and one for one in given):
        raise InvalidInput("stop", expected="a string or a list of strings, none of them empty", got=repr(stop))
    if given and tokenizer is None:
        raise InvalidInput(
            "stop", expected="no strings, since no tokenizer was given", got=repr(stop), hint="pass tokenizer="
        )
    special = getattr(tokenizer, "all_special_tokens", ()) if given else ()
    for one in given:
        if any("\ud800" <= letter <= "\udfff" for letter in one):
            raise InvalidInput("stop", expected="text that UTF-8 can hold", got=repr(one))
        if one in special:
            raise InvalidInput(
                "stop",
                expected="text, in which special tokens are left out",
                got=f"the special token {one!r}",
                hint=f"give eos_token_id={tokenizer.convert_tokens_to_ids(one)}",  # type: ignore[union-attr]
            )
    return tuple(given)
