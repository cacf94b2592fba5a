"""``sennit kernels``: which architectures are meant."""

from __future__ import annotations

import pytest

from sennit.backends.base import Support
from sennit.bench import compiling
from sennit.errors import InvalidInput


@pytest.fixture
def asked(monkeypatch):
    """The architectures that are compiled for; nothing is compiled."""
    found = []

    def compile_layers(layers, architectures, backend, told):
        found.extend(architectures)
        raise InvalidInput("architecture", expected="another", got="this")

    monkeypatch.setattr(compiling, "compile_layers", compile_layers)
    return found


@pytest.mark.parametrize("text", ["sm_80,sm_90", "sm_80, sm_90,", ",sm_80,,sm_90,sm_80"])
def test_architectures_have_commas_between_or_behind_them(sennit, asked, text):
    sennit("kernels", "--arch", text)
    assert asked == ["sm_80", "sm_90"]


@pytest.mark.parametrize(("text", "got"), [("", "''"), (",", "','"), ("sm_80,sm_75", "'sm_75'")])
def test_what_is_no_architecture_is_refused(sennit, asked, text, got):
    result = sennit("kernels", "--arch", text)
    assert result.stderr == f"error: --arch: expected some of sm_80, sm_86, sm_89, sm_90, got {got}\n"
    assert not asked


def test_an_error_of_an_architecture_names_the_option(sennit, asked):
    assert sennit("kernels", "--arch", "sm_80").stderr == "error: --arch: expected another, got this\n"


def test_without_triton_it_is_said_what_to_install(sennit, monkeypatch):
    monkeypatch.setattr(compiling, "installed", lambda: Support.not_yet("Triton is not installed; pip install triton"))
    result = sennit("kernels")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: Triton is not installed; pip install triton\n"
