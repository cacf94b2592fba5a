"""How tests run on the CPU backend where its planner has no say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sennit.backends.cpu.backend import CpuBackend
from sennit.plan.cost import KernelConfig
from sennit.spec import AttentionSpec


@pytest.fixture(autouse=True)
def wide_tiles(request, monkeypatch):
    """Where a test is marked so, all tiles are wide: the planner would give few problems of tests any."""
    if request.node.get_closest_marker("wide_tiles") is None:
        return
    offered = CpuBackend.configs

    def configs(self: CpuBackend, spec: AttentionSpec, device: torch.device) -> list[KernelConfig]:
        found = offered(self, spec, device)
        return [replace(config, name=f"{config.name}-wide", strands=config.strands[:1]) for config in found]

    monkeypatch.setattr(CpuBackend, "configs", configs)
