"""Text comes in pieces that are whole characters and add up to the text of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.hf.text import TextStream


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 259), max_size=30))
def test_pieces_join_to_the_whole_text_for_any_tokens(tokenizer: Any, ids: list[int]) -> None:
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(max_size=12))
def test_no_piece_has_part_of_a_character(tokenizer: Any, text: str) -> None:
    text = text.replace("\ufffd", "")
    pieces = pieces_of(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_is_told_as_soon_as_its_last_byte_is_there(tokenizer: Any) -> None:
    assert pieces_of(tokenizer, tokenizer("a€b")["input_ids"]) == ["a", "", "", "€", "b", ""]


def test_an_incomplete_last_character_is_told_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer("a€")["input_ids"][:-1]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "\ufffd"]


def test_spaces_between_words_are_kept_where_a_tokenizer_drops_the_first_one() -> None:
    class Words:
        """Every token is a word with a space before it, as in SentencePiece; the first space is dropped."""

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(f" w{i}" for i in ids)[1:]

    assert pieces_of(Words(), [1, 2, 3, 4]) == ["w1", " w2", " w3", " w4", ""]


def test_text_already_told_is_continued_where_a_tokenizer_rewrites_it() -> None:
    class Tidying:
        """Joins a full stop to the word before it, after that word was told with its space."""

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(("word ", ".")[i] for i in ids).replace(" .", ".")

    pieces = pieces_of(Tidying(), [0, 1, 0])
    assert pieces[0] == "word "


@pytest.mark.parametrize("ids", [[], [3, 200, 257]])
def test_without_a_tokenizer_every_piece_is_empty(ids: list[int]) -> None:
    assert set(pieces_of(None, ids)) == {""}
