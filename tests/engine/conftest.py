"""Fixtures of the engine's tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore = ["worker"]


@pytest.fixture(scope="session")
def engine() -> Callable[..., Any]:
    """The class `monolith.Engine` (tests are not a package, so it is loaded by path)."""
    pytest.importorskip("torch")
    path = Path(__file__).with_name("monolith.py")
    spec = importlib.util.spec_from_file_location("monolith", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine
