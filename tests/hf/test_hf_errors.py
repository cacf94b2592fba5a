"""Whatever Sennit cannot serve is refused by name, before anything is computed, and leaves the model as it was."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CACHE_ARGUMENT, reference_tokens, tiny_model
from transformers import (
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
)

import sennit.hf
import sennit.hf.sizing
from sennit.errors import CapacityExceeded, InvalidInput, PlanMismatch, UnsupportedFeature, UnsupportedModel
from sennit.hf import Batcher, check_supported, generation, layer_specs, step_keywords
from sennit.hf.masks import key_ranges
from sennit.hf.models import context_length
from sennit.hf.options import BatcherOptions, RequestOptions
from sennit.kvcache import KVCache

IDS = torch.tensor([[1, 2, 3, 4]])


def forward(model: Any, **inputs: Any) -> Any:
    model.set_attn_implementation("sennit")
    with torch.no_grad():
        return model(**({"input_ids": IDS} | inputs))


def other_model(kind: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    config_class, model_class = {
        "ministral": (MinistralConfig, MinistralForCausalLM),
        "gemma": (GemmaConfig, GemmaForCausalLM),
    }[kind]
    return model_class(config_class(**sizes)).eval()


@pytest.mark.parametrize(("kind", "name"), [("ministral", "Ministral"), ("gemma", "Gemma")])
def test_an_untested_architecture_is_refused_by_name_in_both_paths(kind: str, name: str) -> None:
    model = other_model(kind)
    supported = "supported: LlamaForCausalLM, Qwen3ForCausalLM, .*GptOssForCausalLM"
    with pytest.raises(UnsupportedModel, match=f"{kind} .*{name}Attention.* {supported}"):
        forward(model)
    with pytest.raises(UnsupportedModel, match=f"^{kind} has not been tested with Sennit; {supported}"):
        Batcher(model, num_tokens=64)
    with pytest.raises(UnsupportedModel, match=supported):
        sennit.hf.generate(model, None, [[1]])
    model.config.architectures = [type(model).__name__]
    with pytest.raises(UnsupportedModel, match=f"^{name}ForCausalLM has not been tested"):
        check_supported(model.config)


def test_a_subclass_with_the_name_of_a_tested_layer_is_refused(llama: Any) -> None:
    layer = llama.model.layers[0].self_attn
    layer.__class__ = type("LlamaAttention", (type(layer),), {"__module__": "elsewhere"})
    with pytest.raises(UnsupportedModel, match="LlamaAttention"):
        forward(llama)


def test_a_supported_type_under_another_architecture_is_refused(llama: Any) -> None:
    llama.config.architectures = ["LlamaForSomethingElse"]
    with pytest.raises(UnsupportedModel, match=r"^LlamaForSomethingElse has not been tested"):
        Batcher(llama, num_tokens=64)
    with pytest.raises(UnsupportedModel, match=r"^LlamaModel has not been tested"):
        Batcher(tiny_model("llama").model, num_tokens=64)


@pytest.mark.parametrize("model", ["text", None, torch.nn.Linear(2, 2)])
def test_something_that_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidInput, match="model: expected a transformers causal language model"):
        Batcher(model, num_tokens=64)


def test_windows_that_an_architecture_does_not_apply_are_refused_in_both_paths(llama: Any) -> None:
    llama.config.sliding_window = 3
    with pytest.raises(UnsupportedFeature, match=r"sliding_window: .*sliding_window=3 .*does not apply them"):
        Batcher(llama, num_tokens=64)
    llama.config.sliding_window = None
    with pytest.raises(UnsupportedFeature, match="sliding_window: this architecture has not been tested with a window"):
        forward(llama, sliding_window=3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_batch_are_refused(llama: Any, kind: str) -> None:
    llama.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedFeature, match=f"rope_type='{kind}'"):
        Batcher(llama, num_tokens=64)


def test_attention_that_is_not_causal_is_refused_in_both_paths(llama: Any) -> None:
    llama.config.is_causal = False
    with pytest.raises(UnsupportedFeature, match="is_causal"):
        Batcher(llama, num_tokens=64)
    with pytest.raises(UnsupportedFeature, match=r"is_causal|bidirectional"):
        forward(llama)
    with pytest.raises(UnsupportedFeature, match="is_causal"):
        forward(tiny_model("llama"), is_causal=False)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, UnsupportedFeature, "row 0 .* padding between tokens"),
        ({"attention_mask": torch.ones(1, 1, 4, 4).bool()}, InvalidInput, "4-D masks need attn_implementation='sdpa'"),
        ({"attention_mask": torch.ones(1, 4, 4).bool()}, UnsupportedFeature, r"expected a padding mask \[1, length\]"),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": False},
            UnsupportedFeature,
            "several sequences packed in one row",
        ),
        ({"output_attentions": True}, UnsupportedFeature, "output_attentions: .*'eager'"),
        ({"softcap": 30.0}, UnsupportedFeature, "softcap"),
        ({"s_aux": torch.zeros(4)}, UnsupportedFeature, "s_aux"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, UnsupportedFeature, "cu_seq_lens_q: .*not known"),
        ({"anything_new": 1}, UnsupportedFeature, "anything_new: this attention keyword is not known"),
    ],
)
def test_a_forward_that_cannot_be_right_is_refused(
    llama: Any, inputs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        forward(llama, **inputs)


def test_keywords_that_say_nothing_are_accepted(llama: Any) -> None:
    forward(llama, softcap=None, output_attentions=False, output_hidden_states=True, is_causal=True)


def test_attention_outputs_asked_for_in_the_configuration_are_refused(llama: Any) -> None:
    llama.set_attn_implementation("eager")
    llama.config.output_attentions = True
    with pytest.raises(UnsupportedFeature, match="output_attentions"):
        forward(llama)


def test_training_is_refused(llama: Any) -> None:
    llama.set_attn_implementation("sennit")
    with pytest.raises(UnsupportedFeature, match=r"requires_grad: .*inference_mode"):
        llama(IDS)
    dropping = tiny_model("llama", attention_dropout=0.1).train()
    with pytest.raises(UnsupportedFeature, match=r"dropout: .*model.eval\(\)"):
        forward(dropping)
    with Batcher(dropping, num_tokens=1024) as batcher:
        batcher.submit([1], max_new_tokens=1)
        with pytest.raises(UnsupportedFeature, match="dropout"):
            batcher.step()
    assert dropping.config._attn_implementation == "sennit"  # as it was before the step


def test_generate_after_right_padding_is_refused_rather_than_wrong(llama: Any) -> None:
    llama.set_attn_implementation("sennit")
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with pytest.raises(UnsupportedFeature, match="row 1 of attention_mask has padding between tokens"):
        llama.generate(IDS.repeat(2, 1), attention_mask=mask, max_new_tokens=3, do_sample=False)


def test_a_layer_called_without_its_model_is_refused(llama: Any) -> None:
    llama.set_attn_implementation("sennit")
    layer = llama.model.layers[0].self_attn
    hidden = torch.zeros(1, 4, 32, dtype=torch.float64)
    rotary = llama.model.rotary_emb(hidden, torch.arange(4)[None])
    with torch.no_grad(), pytest.raises(InvalidInput, match="nothing at the attention layer"):
        layer(hidden, position_embeddings=rotary, attention_mask=None)
    with torch.no_grad(), pytest.raises(PlanMismatch, match="batch 1 with 3 queries and 3 keys"):
        layer(hidden, position_embeddings=rotary, attention_mask=key_ranges(1, 3, 3))


def test_a_packed_step_needs_one_row_and_no_transformers_cache(llama: Any) -> None:
    cache = KVCache(sennit.hf.layer_specs(llama), num_tokens=64, device="cpu")
    with pytest.raises(InvalidInput, match=r"sennit_step: .* got batch 2"), cache.step([(cache.add(), 4)]) as step:
        forward(llama, input_ids=IDS.repeat(2, 1), use_cache=False, sennit_step=step)
    before = DynamicCache(config=llama.config)
    forward(llama, **{CACHE_ARGUMENT: before})
    with pytest.raises(InvalidInput, match="4 queries and 8 keys"), cache.step([(cache.add(), 4)]) as step:
        forward(llama, sennit_step=step, **{CACHE_ARGUMENT: before})
    assert cache.stats().num_tokens == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("repetition_penalty", 1.2),
        ("encoder_no_repeat_ngram_size", 2),
        ("num_beams", 2),
        ("suppress_tokens", [3]),
        ("min_length", 5),
        ("stop_strings", ["x"]),
    ],
)
def test_generation_settings_that_change_greedy_tokens_are_refused(llama: Any, setting: str, value: Any) -> None:
    setattr(llama.generation_config, setting, value)
    with pytest.raises(UnsupportedFeature, match=f"generation_config.{setting}"):
        Batcher(llama, num_tokens=64)


def test_a_model_without_weights_or_over_several_devices_is_refused(llama: Any) -> None:
    with torch.device("meta"):
        empty = type(llama)(llama.config)
    with pytest.raises(UnsupportedFeature, match="no weights yet"):
        Batcher(empty, num_tokens=64)
    llama.model.layers[1].to("meta")
    with pytest.raises(UnsupportedFeature, match="device_map: the model is spread over cpu, meta"):
        Batcher(llama, num_tokens=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_requests": 0}, "max_requests: expected an integer of at least 1, got 0"),
        ({"max_batch_tokens": True}, "max_batch_tokens: expected an integer of at least 1, got True"),
        ({"max_batch_tokens": 8, "max_requests": 9}, "max_batch_tokens: expected at least max_requests=9"),
        ({"page_size": 0}, "page_size"),
        ({"memory": "much"}, "memory"),
        ({"memory": 4096, "num_tokens": 64}, "memory, num_tokens"),
    ],
)
def test_sizes_of_a_batcher_are_checked(llama: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Batcher(llama, **options)
    with pytest.raises(InvalidInput, match=message):
        sennit.hf.generate(llama, None, [[1]], **options)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InvalidInput, "prompt: expected at least one token"),
        ("Hi", {}, InvalidInput, "no tokenizer was given"),
        ([260], {}, InvalidInput, "token ids from 0 to 259, got 260"),
        ([1], {"max_new_tokens": 0}, InvalidInput, "max_new_tokens: expected an integer of at least 1, got 0"),
        ([1], {"max_new_tokens": 2.5}, InvalidInput, "max_new_tokens: .* got 2.5"),
        ([1], {"eos_token_id": "x"}, InvalidInput, "eos_token_id: expected an integer or a list of integers"),
        ([1], {"eos_token_id": 260}, InvalidInput, "eos_token_id: expected token ids from 0 to 259, got 260"),
        ([1], {"eos_token_id": [3, -1]}, InvalidInput, "eos_token_id: expected token ids from 0 to 259, got -1"),
        ([1] * 64, {}, CapacityExceeded, "^a prompt of 64 tokens and one new one do not fit the cache of 64 tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_when_it_is_submitted(
    llama: Any, prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with Batcher(llama, num_tokens=64, max_requests=4) as batcher:
        with pytest.raises(error, match=message):
            batcher.submit(prompt, **({"max_new_tokens": 4} | options))
        assert not batcher.has_work


def test_the_longest_prompt_that_fits_is_served(llama: Any) -> None:
    done = sennit.hf.generate(llama, None, [[1] * 63], max_new_tokens=4, num_tokens=64)
    assert done[0].finish_reason == "capacity"
    assert len(done[0].token_ids) == 2


def test_a_prompt_that_fills_the_context_is_refused_and_a_completion_ends_with_it() -> None:
    model = tiny_model("llama", max_position_embeddings=16)
    with pytest.raises(InvalidInput, match=r"^prompt: expected fewer tokens than .* context length, 16, got 16"):
        Batcher(model, num_tokens=64, max_requests=4).submit([1] * 16)
    (done,) = sennit.hf.generate(model, None, [[1] * 13], max_new_tokens=50)
    assert (done.finish_reason, len(done.token_ids)) == ("length", 3)
    assert done.token_ids == reference_tokens(model, [1] * 13, 3)


def test_no_memory_is_set_aside_for_tokens_beyond_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    monkeypatch.setattr(generation, "default_tokens", lambda tokens, *_, **__: wanted.append(tokens) or 64)
    model = tiny_model("llama", max_position_embeddings=32)
    sennit.hf.generate(model, None, [[1] * 30, [2]], max_new_tokens=[10**6, 3], page_size=8)
    assert wanted == [32 + 8 + 8 + 8]  # each has a page to grow into


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {"max_position_embeddings": 100}, 100),
        # Counted already, and not counted.
        ("deepseek_v3", {}, 2048),
        ("deepseek_v3", {"max_position_embeddings": 256}, 2048),
        ("llama", {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 256),
        ("gemma3", {}, 2048),
    ],
)
def test_the_context_length_counts_rotary_scaling(name: str, changes: dict[str, Any], expected: int) -> None:
    assert context_length(tiny_model(name, **changes).config) == expected


def test_unknown_and_closed_are_refused(llama: Any) -> None:
    batcher = Batcher(llama, num_tokens=64, max_requests=4)
    for request in (0, -1, "a", None):
        with pytest.raises(InvalidInput, match="request: expected an id that submit returned"):
            batcher.cancel(request)  # type: ignore[arg-type]
    batcher.close()
    for call in (batcher.step, lambda: batcher.submit([1], max_new_tokens=1), lambda: batcher.cancel(0)):
        with pytest.raises(InvalidInput, match="one that was closed"):
            call()


def test_generate_names_the_prompt_that_is_wrong(llama: Any, tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match=r"prompts\[1\]: expected a string"):
        sennit.hf.generate(llama, tokenizer, [[1], 3.5])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="prompts: expected a list of prompts, got one string"):
        sennit.hf.generate(llama, tokenizer, "Hi")
    with pytest.raises(InvalidInput, match=r"^prompts\[1\]\[0\]: expected a message"):
        sennit.hf.generate(llama, tokenizer, [[1], [{"role": "user"}]])
    with pytest.raises(InvalidInput, match=r"^prompts\[2\]: expected fewer tokens than .* 2048, got 2048 tokens"):
        sennit.hf.generate(llama, tokenizer, [[1], [2], [1] * 2048])
    with pytest.raises(CapacityExceeded, match=r"^prompts\[1\]: a prompt of 64 tokens and one new one do not fit"):
        sennit.hf.generate(llama, tokenizer, [[1], [1] * 64], num_tokens=64)
    # The call itself refuses; nobody has asked for the first token.
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        sennit.hf.stream(llama, tokenizer, [[1]], max_new_tokens=0)
    assert llama.config._attn_implementation != "sennit"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("do_sample", "give a temperature above 0"),
        ("max_length", "give max_new_tokens"),
        ("stop_strings", "give stop$"),
        ("num_beams", "no such setting of transformers' own generate"),
        ("repetition_penalty", "no such setting of transformers' own generate"),
        ("temprature", r"did you mean temperature\?"),
        ("batch_size", "got an unknown option"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_before_anything_is_asked_of_the_model(name: str, hint: str) -> None:
    for call in (sennit.hf.generate, sennit.hf.stream):
        with pytest.raises(InvalidInput, match=f"^{name}: expected one of max_new_tokens, .*, backend, .*{hint}"):
            call(None, None, [[1]], **{name: 2})


def test_the_options_of_generate_are_those_of_a_batcher_and_its_requests() -> None:
    for call, options in ((Batcher, BatcherOptions), (Batcher.submit, RequestOptions)):
        named = {p.name for p in signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert named == set(options.__annotations__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature: expected 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1"),
        ({"eos_token_id": 999}, "eos_token_id: expected token ids from 0 to 259"),
        ({"stop": "x"}, "stop: expected no strings"),
        ({"temperature": [0.5]}, "temperature: expected one value, or a list of 0"),
    ],
)
def test_options_are_checked_where_there_are_no_prompts(llama: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        sennit.hf.generate(llama, None, [], **options)
    assert sennit.hf.generate(llama, None, [], temperature=0.5) == []


def test_a_packed_step_is_refused_where_the_models_attention_would_not_know_of_it(llama: Any) -> None:
    cache = KVCache(sennit.hf.layer_specs(llama), num_tokens=64, device="cpu")
    llama.set_attn_implementation("sdpa")
    expected = "model: expected attention set to 'sennit', got 'sdpa'; call model.set_attn_implementation"
    with pytest.raises(InvalidInput, match=expected), cache.step([(cache.add(), 4)]) as step:
        sennit.hf.step_keywords(llama, step)
    with pytest.raises(UnsupportedModel, match="gemma"), cache.step([(cache.add(), 4)]) as step:
        sennit.hf.step_keywords(other_model("gemma"), step)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize(
    ("mask", "refused"),
    [
        (None, False),
        (torch.tensor([[1, 1, 1, 1]]), False),
        (torch.tensor([[0, 1, 0, 1]]), True),
        (torch.tensor([[0, 0, 1, 1]]), True),
        (torch.tensor([[1, 1, 1, 0]]), True),
        (torch.zeros(1, 1, 4, 4, dtype=torch.float64), True),
        (torch.ones(1, 1, 1, 1, dtype=torch.bool), True),
    ],
    ids=str,
)
def test_a_mask_beside_a_packed_step_is_refused_where_it_hides_anything(name: str, mask: Any, refused: bool) -> None:
    model = tiny_model(name)
    model.set_attn_implementation("sennit")
    cache = KVCache(layer_specs(model), num_tokens=64, device="cpu")
    with torch.inference_mode():
        for given in (None, mask):
            with (
                pytest.raises(UnsupportedFeature, match=r"^attention_mask: a packed step has no padding")
                if refused and given is not None
                else nullcontext(),
                cache.step([(cache.add(), 2), (cache.add(), 2)]) as step,
            ):
                model(IDS, attention_mask=given, **step_keywords(model, step))


def test_what_is_no_model_or_no_step_is_refused_by_name(llama: Any) -> None:
    llama.set_attn_implementation("sennit")
    with pytest.raises(InvalidInput, match=r"^step: expected an open step of a sennit.KVCache, got NoneType"):
        step_keywords(llama, None)
    with pytest.raises(InvalidInput, match=r"^model: expected a transformers causal language model, got NoneType"):
        step_keywords(None, None)


def test_logits_for_tokens_without_an_embedding_are_refused(llama: Any) -> None:
    llama.lm_head = torch.nn.Linear(32, 300, bias=False, dtype=torch.float64)
    with pytest.raises(UnsupportedFeature, match=r"^lm_head: it has logits for 300 tokens, and only 260"):
        Batcher(llama, num_tokens=64)
    llama.lm_head = torch.nn.Linear(32, 100, bias=False, dtype=torch.float64)
    Batcher(llama, num_tokens=64).close()


@pytest.mark.parametrize("prompts", [["a"], [[1]]])
def test_something_that_is_no_tokenizer_is_refused_before_anything_runs(llama: Any, prompts: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^tokenizer: expected a transformers tokenizer, or None, got str"):
        sennit.hf.generate(llama, "tok", prompts)
    with pytest.raises(InvalidInput, match=r"^tokenizer: expected a transformers tokenizer, or None, got Decoder"):
        sennit.hf.generate(llama, type("Decoder", (), {"decode": str})(), ["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_requests": 10**30}, "max_requests: expected an integer of at most 2147483647"),
        (
            {"max_requests": 1, "max_batch_tokens": 10**30},
            "max_batch_tokens: expected an integer of at most 2147483647",
        ),
        ({"page_size": 2**30}, "page_size: expected pages that fit the memory"),
        ({"share_prefixes": "no"}, "share_prefixes: expected a boolean, got 'no'"),
        ({"raw": "no"}, "raw: expected a boolean, got 'no'"),
        ({"logprobs": "no"}, "logprobs: expected a boolean, got 'no'"),
        ({"raw": [True, 1]}, r"raw\[1\]: expected a boolean, got 1"),
        ({"logprobs": [None, True]}, r"logprobs\[0\]: expected a boolean, got None"),
        ({"temperature": 10**400}, "temperature: expected 0"),
        ({"temperature": 1, "top_p": -(10**400)}, "top_p: expected a number above 0"),
        (
            {"temperature": [0.0, 0.8], "top_p": 0.9},
            r"top_p: .* got 0.9, and prompts\[0\] has temperature 0; give a list with None for greedy prompts",
        ),
        ({"temperature": [0.0, 0.8], "top_p": 5}, "top_p: expected a number above 0, at most 1, got 5"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant_are_named_as_they_were_given(
    llama: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sennit.hf.sizing, "free_bytes", lambda device: 2**36)
    with pytest.raises(InvalidInput, match=f"^{message}"):
        sennit.hf.generate(llama, None, [[1], [2]], **options)


def test_flags_of_numpy_are_flags(llama: Any) -> None:
    done = sennit.hf.generate(llama, None, [[1], [2]], max_new_tokens=1, logprobs=np.array([True, False]), raw=np.True_)
    assert [one.logprobs is None for one in done] == [False, True]


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_of_nothing_is_named_as_the_configuration_says_it(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=r"^sliding_window=0: a window counts the token itself"):
        Batcher(tiny_model(name, sliding_window=0), num_tokens=64)


@pytest.mark.parametrize("setting", ["suppress_tokens", "bad_words_ids", "begin_suppress_tokens"])
def test_empty_lists_in_a_generation_configuration_change_nothing(llama: Any, setting: str) -> None:
    expected = reference_tokens(llama, [1, 2], 4)
    setattr(llama.generation_config, setting, [])
    assert sennit.hf.generate(llama, None, [[1, 2]], max_new_tokens=4)[0].token_ids == expected


def test_importing_sennit_does_not_import_transformers() -> None:
    assert run_python("import sys, sennit; print('transformers' in sys.modules)") == "False"


@pytest.mark.parametrize(("found", "said"), [("None", "needs transformers 5.16"), ("old", "found 5.15.2")])
def test_a_missing_or_old_transformers_is_named(found: str, said: str) -> None:
    fake = "type(sys)('transformers')" if found == "old" else "None"
    code = (
        "import sys; import sennit\n"
        f"fake = {fake}\n"
        "if fake is not None: fake.__version__ = '5.15.2'\n"
        "sys.modules['transformers'] = fake\n"
        "try:\n    import sennit.hf\nexcept ImportError as error:\n    print(error)"
    )
    assert said in run_python(code)
