"""Text comes in pieces that are whole characters and add up to the text of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sennit.hf.text import TextStream

LETTERS = bytes_to_unicode()  # of every byte the letter that byte-level tokenizers write for it


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    return tokenizer.convert_tokens_to_ids([LETTERS[byte] for byte in data])


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


@settings(deadline=None)
@given(
    data=st.lists(st.sampled_from([b"\xff", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\x80", b"a"]), max_size=60)
)
def test_pieces_of_text_that_is_mostly_invalid_join_to_the_whole(tokenizer: Any, data: list[bytes]) -> None:
    ids = byte_ids(tokenizer, b"".join(data))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_endless_invalid_text_is_told_as_it_comes_and_decoded_a_window_at_a_time(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lengths.append(len(ids)) or decode(ids, **options))
    stream = TextStream(tokenizer)
    for count, token in enumerate(byte_ids(tokenizer, b"\xff" * 500), 1):
        stream.push(token)
        assert count - len(stream.text) <= 8
    assert max(lengths) <= 24
    assert stream.text + stream.finish() == "\ufffd" * 500


def test_a_decoder_that_gives_up_on_whole_runs_of_bytes_shows_no_part_of_a_character() -> None:
    """As tokenizers with byte fallback do: a run of byte tokens that is not UTF-8 has a replacement for every byte."""
    core = Tokenizer(models.BPE(vocab={f"<0x{i:02X}>": i for i in range(256)} | {"a": 256}, merges=[]))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fallback = PreTrainedTokenizerFast(tokenizer_object=core)
    assert fallback.decode([*"😀".encode(), 0xF0]) == "\ufffd" * 5
    text = "a😀😀€éa😀😀😀a"
    ids = [i for letter in text for i in ([256] if letter == "a" else letter.encode())]
    pieces = pieces_of(fallback, ids)
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_text_before_an_incomplete_character_is_told_without_it() -> None:
    class Chunks:
        """Tokens of several bytes."""

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return b"".join([b"so\xe2", b"\x82", b"\xac!\xf0\x9f", b"\x98\x80"][i] for i in ids).decode(
                "utf-8", "replace"
            )

    assert pieces_of(Chunks(), [0, 1, 2, 3]) == ["so", "", "€!", "😀", ""]


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
