"""The Hopper backend's kernel is compiled for sm_90 on machines without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from sennit.backends.hopper.backend import HopperBackend  # noqa: E402
from sennit.backends.hopper.configs import kernel_configs, takes  # noqa: E402
from sennit.bench import compiling, machine_code  # noqa: E402
from sennit.env import triton_interpreted  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(triton_interpreted(), reason="the interpreter compiles nothing")]
SHARED_MEMORY = compiling.ARCHITECTURES["sm_90"].shared_memory
LAYERS = {name: layer for name, layer in compiling.usual_layers().items() if takes(layer.spec).accepted}


def launch(layer: compiling.Layer, config: Any) -> None:
    """Twice, since a second launch of the same form goes past Triton's own launcher."""
    attend = compiling.attend_of(layer, config)
    attend = attend._replace(lse=torch.empty(len(attend.q), layer.spec.num_qo_heads))
    for _ in range(2):
        HopperBackend().attend(attend)


DEVICES = itertools.count(1000)


class Recorder(machine_code.Recorder):
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
    monkeypatch.setattr(machine_code, "_looked_at", keeping(machine_code._looked_at, listings))
    for config in (kernel_configs(LAYERS["bf16 128"].spec, 132)[n] for n in (0, 3, 4)):
        launch(LAYERS["bf16 128"], config)
    assert len(listings) == 3
    for listing in listings:
        assert listing.count("HGMMA") > 4 * listing.count("WARPGROUP.DEPBAR")
        assert "NANOSLEEP" not in listing


def test_warps_sleep_only_where_they_are_asked_to(recorder, monkeypatch):
    listings = []
    monkeypatch.setattr(machine_code, "_looked_at", keeping(machine_code._looked_at, listings))
    monkeypatch.setattr(HopperBackend, "attend", HopperBackend.attend_with_pauses)
    launch(LAYERS["bf16 128"], kernel_configs(LAYERS["bf16 128"].spec, 132)[0])
    assert listings[0].count("NANOSLEEP") > 10


def keeping(look, listings):
    def looked_at(program: str, option: str, binary: bytes) -> str:
        if program == "cuobjdump":
            listings.append(look("nvdisasm", "-c", binary))
        return look(program, option, binary)

    return looked_at
