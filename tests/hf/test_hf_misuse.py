"""What goes wrong around a model: tokenizers that raise, damaged folders, NaN logits, odd prompt files."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import reference_tokens, tiny_model
from typer.testing import CliRunner

import sennit
import sennit.hf.batcher as batcher_module
from sennit.cli.generate import _read_prompts
from sennit.hf import Batcher, generate
from sennit.hf.loading import load


class FailingTokenizer:
    """Decodes ids to letters, but raises at one call."""

    chat_template = None

    def __init__(self, fails_at: int, error: type[BaseException]) -> None:
        self.calls, self.fails_at, self.error = 0, fails_at, error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.error("decode")
        return "".join(chr(65 + i % 26) for i in ids)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5, 6, 7, 9, 12, 20, 31, 44, 49, 50, 51, 52])
def test_a_tokenizer_that_raises_once_loses_no_token_and_no_event(fails_at: int, error: type[BaseException]) -> None:
    model = tiny_model("llama")
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    expected = generate(model, FailingTokenizer(-1, error), prompts, max_new_tokens=8, eos_token_id=[])
    with Batcher(model, FailingTokenizer(fails_at, error), num_tokens=1024) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=8, eos_token_id=[])
        events, steps = [], 0
        while batcher.has_work:
            steps += 1
            assert steps < 60
            try:
                events += batcher.step()
            except error:
                continue
    for request, completion in enumerate(expected):
        mine = [event for event in events if event.request == request]
        assert [event.token_id for event in mine] == completion.token_ids
        assert "".join(event.text for event in mine) == completion.text
        assert mine[-1].completion == completion
        assert all(event.completion is None for event in mine[:-1])


def test_a_cancelled_request_ends_without_the_tokens_that_could_not_be_decoded() -> None:
    with Batcher(tiny_model("llama"), FailingTokenizer(1, RuntimeError), num_tokens=256) as batcher:
        request = batcher.submit([1, 2, 3], max_new_tokens=8, eos_token_id=[])
        with pytest.raises(RuntimeError):
            batcher.step()
        assert batcher.cancel(request)
        (last,) = batcher.step()
        assert (last.token_id, last.finish_reason, last.completion.token_ids) == (None, "cancelled", [])
    with Batcher(tiny_model("llama"), num_tokens=256) as batcher:
        batcher.submit([1], max_new_tokens=1)
        batcher.submit([2], max_new_tokens=1)
        with pytest.raises(sennit.InvalidInput, match="request"):
            batcher.cancel(True)


class TokenlessTokenizer(FailingTokenizer):
    """Cannot decode one token, ever."""

    def __init__(self, token: int) -> None:
        super().__init__(-1, RuntimeError)
        self.token = token

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.token in ids:
            raise KeyError(self.token)
        return super().decode(ids, skip_special_tokens)


def test_a_token_that_cannot_be_decoded_is_its_requests_alone() -> None:
    model, prompts = tiny_model("llama"), [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]
    bad = next(token for token in expected[1] if token not in expected[0] + expected[2])
    place = expected[1].index(bad)
    with Batcher(model, TokenlessTokenizer(bad), num_tokens=256) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=6, eos_token_id=[])
        events = [event for _ in range(place) for event in batcher.step()]
        for _ in range(2):
            with pytest.raises(sennit.RequestFailed, match=r"^request 1: the tokenizer raised KeyError") as caught:
                batcher.step()
            assert (caught.value.requests, type(caught.value.__cause__)) == ((1,), KeyError)
        assert batcher.cancel(1)
        while batcher.has_work:
            events += batcher.step()
    for request, tokens in enumerate(expected):
        mine = [event for event in events if event.request == request]
        had = tokens[:place] if request == 1 else tokens
        assert [event.token_id for event in mine if event.token_id is not None] == had
        assert mine[-1].completion.token_ids == had
        assert "".join(event.text for event in mine) == mine[-1].completion.text
        assert mine[-1].finish_reason == ("cancelled" if request == 1 else "length")
    with pytest.raises(sennit.RequestFailed, match=r"^prompts\[1\]: the tokenizer raised KeyError"):
        generate(model, TokenlessTokenizer(bad), prompts, max_new_tokens=6, eos_token_id=[])


def test_logits_that_are_no_numbers_name_their_request_and_the_others_go_on_without_it() -> None:
    model, prompts = tiny_model("llama"), [[1, 2], [3, 200], [4]]
    expected = [reference_tokens(model, prompt, 3) for prompt in prompts]
    assert 200 not in expected[0] + expected[2]
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = torch.nan
    with Batcher(model, num_tokens=256) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=3, eos_token_id=[])
        with pytest.raises(sennit.RequestFailed, match=r"^request 1: expected logits, got NaN"):
            batcher.step()
        assert batcher.cancel(1)
        done = {}
        while batcher.has_work:
            done |= {event.request: event.completion for event in batcher.step() if event.completion}
    assert (done[0].token_ids, done[2].token_ids) == (expected[0], expected[2])
    with pytest.raises(sennit.RequestFailed, match=r"^prompts\[1\]: expected logits, got NaN"):
        generate(model, None, prompts, max_new_tokens=3)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("call", range(8))
@pytest.mark.parametrize("what", ["NewToken", "computed"])
def test_an_interrupt_after_a_step_loses_no_token(
    name: str, call: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = tiny_model(name), [list(range(20)), [4, 5], [6]]
    calls = 0
    with Batcher(model, num_tokens=256, max_batch_tokens=8, max_requests=4, page_size=4) as batcher:
        place = batcher_module if what == "NewToken" else batcher._queue
        original = getattr(place, what)

        def interrupted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise KeyboardInterrupt
            return original(*args)

        monkeypatch.setattr(place, what, interrupted)
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=4, eos_token_id=[])
        events, stopped = [], 0
        while batcher.has_work:
            try:
                events += batcher.step()
            except KeyboardInterrupt:
                stopped += 1
            batcher.cache.check()
    assert stopped == 1
    for request, prompt in enumerate(prompts):
        mine = [event for event in events if event.request == request]
        expected = reference_tokens(model, prompt, 4)
        assert [event.token_id for event in mine] == mine[-1].completion.token_ids == expected


def test_logits_that_are_no_numbers_are_an_error_and_not_token_zero() -> None:
    model = tiny_model("llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(sennit.SennitError, match="expected logits, got NaN"):
        generate(model, None, [[1, 2]], max_new_tokens=2)


@pytest.fixture
def folder(tmp_path: Any, tokenizer: Any) -> Any:
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def change(folder: Any, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "x"},
        {"hidden_size": 48},
        {"num_attention_heads": 0},
        {"hidden_act": "bogus"},
        {"dtype": "bogus"},
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_a_typed_error(folder: Any, values: dict[str, object]) -> None:
    change(folder, **values)
    with pytest.raises((sennit.ModelNotFound, sennit.UnsupportedModel), match=str(folder)):
        load(folder)


def test_weights_that_the_configuration_does_not_use_are_warned_of(folder: Any) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change(folder, num_hidden_layers=layers - 1)
    with pytest.warns(UserWarning, match="are not used by its configuration"):
        load(folder)


def test_a_damaged_generation_configuration_is_not_left_out(folder: Any) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(sennit.ModelNotFound, match="generation_config"):
        load(folder)


def test_a_name_that_no_file_system_takes_is_a_typed_error() -> None:
    with pytest.raises(sennit.ModelNotFound):
        load("./" + "a" * 300)


def test_a_prompt_file_is_cut_at_line_ends_only(tmp_path: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028two\x0cthree\r\nfour\rfive\n\n".encode())
    assert _read_prompts([], path) == ["one\u2028two\x0cthree", "four", "five"]


def test_split_sizes_beyond_32_bits_end_the_command_with_one_line() -> None:
    from sennit.cli import app

    result = CliRunner().invoke(app, ["plan", "1@1", "--split-size", "99999999999999999999"])
    assert result.exit_code == 2
    assert "--split-size" in result.output


def test_batchers_in_several_threads_take_turns_with_one_model() -> None:
    model, prompts = tiny_model("llama"), [[1, 2, 3], [4, 5], [6]]
    before = model.config._attn_implementation
    expected = [generate(model, None, [prompt], max_new_tokens=6)[0].token_ids for prompt in prompts]
    for layer in model.model.layers:  # a thread that waits in the middle of a step lets another begin
        layer.register_forward_hook(lambda *_: time.sleep(0.002))
    with ThreadPoolExecutor(3) as pool:
        done = pool.map(lambda prompt: generate(model, None, [prompt], max_new_tokens=6)[0].token_ids, prompts)
        assert list(done) == expected
    assert model.config._attn_implementation == before
