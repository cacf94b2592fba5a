"""``sennit generate``: the texts are those of ``sennit.hf.generate``, in the prompts' order, and nothing else."""

from __future__ import annotations

import json
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
    found = json.loads(generate(*PROMPTS, "--json").stdout)
    for prompt, one in zip(PROMPTS, found, strict=True):
        wanted = expected(prompt)
        assert one == {
            "prompt": prompt,
            "text": wanted.text,
            "token_ids": wanted.token_ids,
            "finish_reason": wanted.finish_reason,
        }


def test_one_prompt_with_json_is_a_list_of_one(generate):
    assert len(json.loads(generate("hi", "--json").stdout)) == 1


def test_several_prompts_are_printed_in_order_with_brackets_as_they_are(generate, expected):
    out = generate(*PROMPTS, width=100).stdout
    headings = [out.index(f"[{i}] {prompt}") for i, prompt in enumerate(PROMPTS, 1)]
    assert headings == sorted(headings)
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


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ((), "", "no prompt"),
        ((), " \n", "no prompt"),
        (("--file", "-"), "\n \n", "not blank"),
        (("a\udcff",), None, "UTF-8"),
        (("hi", "--device", "cuda:99"), None, "cuda:99"),
        (("--file", "/no/such/file"), None, "/no/such/file"),
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
