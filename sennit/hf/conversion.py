"""Converts the GGUF file of a Llama model into a folder of safetensors, configuration and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["convert"]

# GGUF's names of a layer's weights, and transformers'.
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def convert(gguf_file: Path, folder: Path, *, on_bytes: Callable[[int], None] = lambda size: None) -> None:
    """Write a Llama model from a GGUF file as float32 safetensors, with configuration and tokenizer.

    transformers can read GGUF files too, more slowly, and with a tokenizer that depends on its release: up to
    5.16 with a wrong end token, and later without splitting digits, so that a number after a line break gives other
    tokens than the model was trained with. This builds the tokenizer that the file describes (``gpt2`` byte-level
    BPE with the ``smollm`` pre-tokenizer, no others).

    Args:
        gguf_file: the file.
        folder: an existing folder; files of the same names are replaced.
        on_bytes: called with the number of bytes of weights converted so far.

    Raises:
        ImportError: gguf is not installed.
        ValueError: the file holds another architecture or another kind of tokenizer.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    kind = tuple(facts.get(f) for f in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(f"{gguf_file.name}: expected a llama model with a gpt2/smollm tokenizer, got {kind}")
    weights, size = {}, 0
    for name, array in _weights(reader, facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]):
        weights[name] = array
        size += array.nbytes
        on_bytes(size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tied = "lm_head.weight" not in weights
    (folder / "config.json").write_text(json.dumps(_config(facts, tied=tied), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(_special_ids(facts), indent=2) + "\n")
    _tokenizer(facts).save_pretrained(folder)


def _weights(reader: Any, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    from gguf.quants import dequantize

    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        *layer, part, _ = tensor.name.split(".")
        if part in heads:
            array = _halves_apart(array, heads[part])
        name = f"model.layers.{layer[1]}.{LAYER_WEIGHTS[part]}" if layer else OTHER_WEIGHTS[part]
        yield f"{name}.weight", np.ascontiguousarray(array, dtype=np.float32)


def _halves_apart(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder a projection's output rows from GGUF's rotary order (pairs side by side) to transformers' (in halves)."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2)
    return np.reshape(pairs, rows.shape)


def _special_ids(facts: dict[str, Any]) -> dict[str, int]:
    ids = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": int(facts[f"tokenizer.ggml.{key}_token_id"]) for name, key in ids.items()}


def _config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads, width = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": facts["llama.context_length"],
        # GGUF keeps these two in float32; the decimal that was rounded is the shortest that gives the same number.
        "rms_norm_eps": float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(str(np.float32(facts["llama.rope.freq_base"]))),
        },
        "tie_word_embeddings": tied,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        **_special_ids(facts),
    }


def _tokenizer(facts: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{role}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=facts["tokenizer.chat_template"],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )
