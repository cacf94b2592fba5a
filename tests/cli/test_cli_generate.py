"""``sennit generate``: the texts are those of ``sennit.hf.generate``, in the prompts' order, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import sennit.hf
from sennit.hf.loading import load

PROMPTS = ["Name [bold]three[/bold] colours", "What is a braid?", "[red]x"]


@pytest.fixture(scope="module")
def expected(model_folder):
    """Completions by the library, a prompt at a time."""
    model, tokenizer = load(model_folder)

    def generate(prompt, tokens=8, **options):
        return sennit.hf.generate(model, tokenizer, [prompt], max_new_tokens=tokens, **options)[0]

    return generate


@pytest.fixture
def generate(sennit, model_folder):
    def run(*arguments, tokens=8, **options):
        return sennit("generate", *arguments, "--model", str(model_folder), "--max-new-tokens", str(tokens), **options)

    return run


def test_one_prompt_prints_its_text_and_a_newline(generate, expected):
    result = generate(PROMPTS[0])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(PROMPTS[0]).text + "\n"


def test_json_has_prompt_text_tokens_and_reason_in_order(generate, expected):
    found = json.loads(generate(*PROMPTS, "--json", "--backend", "reference").stdout)
    for prompt, one in zip(PROMPTS, found, strict=True):
        wanted = expected(prompt)
        assert one == {
            "prompt": prompt,
            "text": wanted.text,
            "token_ids": wanted.token_ids,
            "finish_reason": wanted.finish_reason,
            "stopped_by": None,
            "seed": None,
            "backend": "reference",
        }


def test_one_prompt_with_json_is_a_list_of_one(generate):
    assert len(json.loads(generate("hi", "--json").stdout)) == 1


def test_several_prompts_are_printed_in_order_with_brackets_as_they_are(generate, expected):
    out = generate(*PROMPTS, width=100).stdout
    headings = [out.index(f"[{i}] {prompt}") for i, prompt in enumerate(PROMPTS, 1)]
    assert headings == sorted(headings)
    assert out.endswith(("\nbackend cpu\n", "\nbackend reference\n"))
    for prompt in PROMPTS:
        assert expected(prompt).text.strip("\n") in out


def test_several_prompts_are_one_batch(generate, monkeypatch):
    calls = []
    stream = sennit.hf.stream
    monkeypatch.setattr(
        sennit.hf, "stream", lambda m, t, prompts, **k: calls.append(prompts) or stream(m, t, prompts, **k)
    )
    generate(*PROMPTS)
    assert calls == [PROMPTS]


def test_a_file_gives_a_prompt_a_line_after_those_of_the_command_line(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffsecond\n\n  \nthird é\r\n".encode())
    found = json.loads(generate("first", "--file", str(file), "--json").stdout)
    assert [one["prompt"] for one in found] == ["first", "second", "third é"]


def test_without_prompts_all_of_standard_input_is_one(generate):
    found = json.loads(generate("--json", stdin="two\nlines\n").stdout)
    assert [one["prompt"] for one in found] == ["two\nlines"]


def test_a_dash_as_file_reads_a_prompt_a_line_from_standard_input(generate):
    found = json.loads(generate("--json", "--file", "-", stdin="two\n\nlines\n").stdout)
    assert [one["prompt"] for one in found] == ["two", "lines"]


def test_raw_leaves_the_chat_template_out(generate, expected):
    assert generate("braid", "--raw").stdout == expected("braid", raw=True).text + "\n"
    assert expected("braid", raw=True).token_ids != expected("braid").token_ids


def test_the_dtype_of_the_weights_is_the_one_asked_for(generate, monkeypatch):
    import torch

    seen = []
    stream = sennit.hf.stream
    monkeypatch.setattr(sennit.hf, "stream", lambda m, *a, **k: seen.append(m.dtype) or stream(m, *a, **k))
    generate("hi", "--dtype", "bfloat16")
    generate("hi")
    assert seen == [torch.bfloat16, torch.float32]


SAMPLING = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7")


def test_sampling_options_reach_the_model(generate, expected):
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 7}
    wanted = expected(PROMPTS[1], **options)
    assert wanted.token_ids != expected(PROMPTS[1]).token_ids
    assert generate(PROMPTS[1], *SAMPLING).stdout == wanted.text + "\n"
    found = json.loads(generate(*PROMPTS, *SAMPLING, "--json").stdout)
    assert [one["token_ids"] for one in found] == [expected(prompt, **options).token_ids for prompt in PROMPTS]
    assert [one["seed"] for one in found] == [7] * 3


def test_the_seed_that_was_drawn_is_printed_and_repeats_the_text(generate):
    first = json.loads(generate("hi", "--temperature", "1.5", "--json").stdout)[0]
    again = json.loads(generate("hi", "--temperature", "1.5", "--seed", str(first["seed"]), "--json").stdout)[0]
    assert again == first
    shown = generate("hi", "ho", "--temperature", "1.5", width=100).stdout
    assert len(set(re.findall(r"8 tokens, length, seed (\d+)", shown))) == 2


def test_texts_end_before_a_stop_string(generate, expected):
    free = expected("hi", tokens=16).text
    stop = next(letter for letter in free[2:] if letter.isascii() and letter.isprintable())
    result = generate("hi", "--stop", "no such text", "--stop", stop, tokens=16)
    assert result.stdout == free[: free.index(stop)] + "\n"
    found = json.loads(generate("hi", "--stop", "no such text", "--stop", stop, "--json", tokens=16).stdout)[0]
    assert (found["finish_reason"], found["stopped_by"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ((), "", "no prompt"),
        ((), " \n", "no prompt"),
        (("--file", "-"), "\n \n", "not blank"),
        (("a\udcff",), None, "UTF-8"),
        (("hi", "--device", "cuda:99"), None, "cuda:99"),
        (("--file", "/no/such/file"), None, "/no/such/file"),
        (("hi", "--temperature", "nan"), None, "--temperature: expected 0 (greedy decoding) or a positive number"),
        (("hi", "--temperature", "1", "--top-p", "1.5"), None, "--top-p: expected a number above 0, at most 1"),
        (("hi", "--seed", "7"), None, "--seed: expected a temperature above 0 beside it"),
        (("hi", "--stop", ""), None, "--stop: expected at least one character"),
        (("hi", "--stop", "a\udcff"), None, "--stop: expected text in UTF-8"),
    ],
)
def test_what_cannot_be_generated_from_is_said_before_anything_is_loaded(generate, monkeypatch, arguments, stdin, said):
    monkeypatch.setattr("sennit.hf.loading.load", lambda *a, **k: pytest.fail("loaded"))
    result = generate(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


def test_a_file_that_is_not_text_is_an_error(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"ab\xff\xfe")
    result = generate("--file", str(file))
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_an_interrupt_ends_the_line_and_frees_the_batch(generate, monkeypatch):
    closed = []

    def stream(*arguments, **options):
        try:
            yield sennit.hf.Event(0, 1, "so far")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(sennit.hf, "stream", stream)
    result = generate("hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "so far\n", "stopped\n")
    assert closed


def test_without_transformers_the_error_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; sys.argv = ['sennit', 'generate', 'hi']\n"
    code += "from sennit.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "pip install 'sennit[hf]'" in result.stderr
    assert "Traceback" not in result.stderr
