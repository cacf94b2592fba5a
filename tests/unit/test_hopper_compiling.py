"""The Hopper backend's kernel is compiled for sm_90 on machines without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from sennit.backends.base import Attend  # noqa: E402
from sennit.backends.hopper.backend import HopperBackend  # noqa: E402
from sennit.backends.hopper.configs import kernel_configs, takes  # noqa: E402
from sennit.backends.triton import compiling  # noqa: E402
from sennit.env import triton_interpreted  # noqa: E402
from sennit.plan.tensors import PlanArrays  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(triton_interpreted(), reason="the interpreter compiles nothing")]
SHARED_MEMORY = compiling.ARCHITECTURES["sm_90"].shared_memory
LAYERS = {name: layer for name, layer in compiling.usual_layers().items() if takes(layer.spec).accepted}
del LAYERS["bf16 128, pages of one token"]


def launch(layer: compiling.Layer, config: Any) -> None:
    spec, slots = layer.spec, () if layer.page_size is None else (layer.page_size,)
    plan = compiling._plan(layer, config)
    pools = [
        torch.empty(2, *slots, spec.num_kv_heads, dim, dtype=spec.kv_dtype)
        for dim in (spec.head_dim_qk, spec.head_dim_vo)
    ]
    per_head = torch.zeros(spec.num_qo_heads)
    HopperBackend().attend(
        Attend(
            spec=spec, config=config, page_size=layer.page_size, arrays=PlanArrays(plan.tensors.host.numpy()),
            plan=plan.tensors.device, page_table=plan.tensors.page_table, kv_lens=None,
            q=torch.empty(plan.num_rows, spec.num_qo_heads, spec.head_dim_qk, dtype=spec.dtype), k=pools[0], v=pools[1],
            out=torch.empty(plan.output_shape, dtype=spec.dtype), lse=torch.empty(plan.num_rows, spec.num_qo_heads),
            sm_scale=0.1, packed_mask=plan.tensors.packed_mask, sinks=per_head if spec.learned_sinks else None,
            alibi_slopes=per_head if spec.alibi else None, captures=layer.captures,
        )
    )  # fmt: skip


DEVICES = itertools.count(1000)


class Recorder(compiling.Recorder):
    """On a device of its own, since Triton keeps kernels by device."""

    def __init__(self) -> None:
        super().__init__(90)
        self.device = next(DEVICES)

    def get_current_device(self) -> int:
        return self.device


@pytest.fixture
def recorder():
    from triton.runtime import driver

    before, made = dict(vars(driver)), Recorder()
    driver.set_active(made)
    yield made
    vars(driver).update(before)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_compiles_and_has_room(name, recorder):
    configs = kernel_configs(LAYERS[name].spec, 132)
    for config in configs if name == "bf16 128" else configs[:1]:
        launch(LAYERS[name], config)
    kernels = recorder.kernels
    assert len(kernels) == (len(configs) if name == "bf16 128" else 1)
    assert all(kernel.shared_memory <= SHARED_MEMORY for kernel in kernels)


def test_products_are_left_to_run_while_weights_are_made(recorder, monkeypatch):
    """Where the compiler cannot follow a product around a loop, it waits for every instruction of it."""
    listings = []
    monkeypatch.setattr(compiling, "_looked_at", keeping(compiling._looked_at, listings))
    for config in (kernel_configs(LAYERS["bf16 128"].spec, 132)[n] for n in (0, 3, 4)):
        launch(LAYERS["bf16 128"], config)
    assert len(listings) == 3
    for listing in listings:
        assert listing.count("HGMMA") > 4 * listing.count("WARPGROUP.DEPBAR")


def keeping(look, listings):
    def looked_at(program: str, option: str, binary: bytes) -> str:
        if program == "cuobjdump":
            listings.append(look("nvdisasm", "-c", binary))
        return look(program, option, binary)

    return looked_at
