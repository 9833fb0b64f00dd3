"""What a host's facts say of the modules in C."""

from __future__ import annotations

import importlib.util

import pytest

from harness import host


@pytest.fixture(autouse=True)
def _asked_anew():
    host.native.cache_clear()
    yield
    host.native.cache_clear()


def test_native_names_the_modules_that_are_built(monkeypatch):
    monkeypatch.delenv("PRFAAS_PURE_PYTHON", raising=False)
    words = host.facts()["native"].split(", ")
    for word, module in host._NATIVE.items():
        assert (word in words) == (importlib.util.find_spec(module) is not None)


def test_no_module_is_native_where_python_was_asked_for(monkeypatch):
    monkeypatch.setenv("PRFAAS_PURE_PYTHON", "1")
    assert host.facts()["native"] == "none"
