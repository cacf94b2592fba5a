"""During a step linear layers take the CPU backend's kernel for few rows, and after it they are themselves again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sennit.hf
from sennit.backends.cpu import linear as kernel
from sennit.hf.linears import few_row_linears, linears_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 80}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that the kernel has computed."""
    if not kernel.ready():
        pytest.skip("the processor does not multiply pairs of bfloat16")
    rows, multiply = [], kernel.linear

    def noted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(x.numel() // x.shape[-1])
        return multiply(x, *others)

    monkeypatch.setattr(kernel, "linear", noted)
    return rows


def tiny(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().to(dtype)


def generate(model: Any, **options: Any) -> list[list[int]]:
    prompts = [[5, 6, 7], list(range(3, 60))]
    return [c.token_ids for c in sennit.hf.generate(model, None, prompts, max_new_tokens=4, **options)]


def test_decodes_and_the_rows_of_the_head_are_multiplied_by_the_kernel(calls: list[int]) -> None:
    model = tiny()
    generate(model)
    linears = linears_of(model)
    assert len(linears) == 15
    assert calls == [2] * (1 + 3 * len(linears))  # the head of the prompts' step, then everything
    assert not any("forward" in layer.__dict__ for layer in linears)


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float32, "auto"), (torch.bfloat16, "reference")])
def test_other_dtypes_and_backends_are_pytorchs(calls: list[int], dtype: torch.dtype, backend: str) -> None:
    generate(tiny(dtype), backend=backend)
    assert not calls


def test_layers_of_other_kinds_and_replaced_ones_are_left_alone(calls: list[int]) -> None:
    class Own(torch.nn.Linear):
        pass

    layers = torch.nn.ModuleList([Own(32, 8), torch.nn.Linear(32, 8), torch.nn.Linear(32, 8)]).bfloat16()
    layers[2].forward = lambda x: x
    found = linears_of(layers)
    assert found == [layers[1], layers[2]]
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    with torch.no_grad(), few_row_linears(found):
        layers[0](x), layers[1](x)
        assert torch.equal(layers[2](x), x)
        with few_row_linears(found):  # of another thread's step, or one in this
            layers[1](x)
        layers[1](x)
    assert calls == [1, 1, 1]
    assert torch.equal(layers[2](x), x)
    assert "forward" not in layers[1].__dict__


def test_copies_that_are_made_meanwhile_compute_with_their_own_weights(calls: list[int]) -> None:
    layer, x = torch.nn.Linear(32, 8).bfloat16(), torch.ones(1, 32, dtype=torch.bfloat16)
    with torch.no_grad(), few_row_linears([layer]):
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        assert torch.equal(other(x), layer(x))
        other.float().weight.data.zero_()
        assert torch.equal(other(x.float())[0], other.bias)
    assert not calls


def test_a_forward_that_is_set_meanwhile_stays(calls: list[int]) -> None:
    layer = torch.nn.Linear(32, 8).bfloat16()
    with few_row_linears([layer]):
        layer.forward = lambda x: -x
    assert "forward" in layer.__dict__


def test_transformed_calls_are_pytorchs(calls: list[int]) -> None:
    layer, x = torch.nn.Linear(32, 8).bfloat16(), torch.randn(3, 2, 32).bfloat16()
    with torch.no_grad(), few_row_linears([layer]):
        assert torch.vmap(layer)(x).shape == (3, 2, 8)
        with pytest.raises(RuntimeError):
            layer(torch.tensor(1.0).bfloat16())
    assert not calls


def test_layers_are_themselves_again_after_an_error(calls: list[int]) -> None:
    layer = torch.nn.Linear(32, 8).bfloat16()
    with torch.no_grad(), pytest.raises(RuntimeError), few_row_linears([layer]):
        layer(layer(torch.ones(1, 32, dtype=torch.bfloat16)))  # of 8 numbers, not 32
    assert calls == [1]
    assert "forward" not in layer.__dict__
    layer(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None
