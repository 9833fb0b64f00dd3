"""Modules in C are used only where they are of the source that lies beside them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from results.native import require


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for a module in C: made of the source `int f;`."""
    (tmp_path / "_made_in_c.c").write_text("int f;")
    digest = "821b8a29fe72fed0037246c2b30c6301ed4bfbdc1f02d4f5d0cdfec5f3c68ca5"
    (tmp_path / "_made_in_c.py").write_text(f'SOURCE_SHA256 = "{digest}"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PRFAAS_PURE_PYTHON", raising=False)
    monkeypatch.delitem(sys.modules, "_made_in_c", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def test_a_module_of_the_source_beside_it_is_used(module: Path) -> None:
    assert require("_made_in_c").__name__ == "_made_in_c"


def test_a_module_of_another_source_is_not_used(module: Path) -> None:
    (module / "_made_in_c.c").write_text("long f;")
    with (
        pytest.warns(RuntimeWarning, match="_made_in_c was built from another .*make install"),
        pytest.raises(ImportError),
    ):
        require("_made_in_c")


def test_a_module_of_before_there_were_digests_is_not_used(module: Path) -> None:
    (module / "_made_in_c.py").write_text("")
    with pytest.warns(RuntimeWarning, match="make install"), pytest.raises(ImportError):
        require("_made_in_c")


def test_a_module_without_its_source_is_used(module: Path) -> None:
    (module / "_made_in_c.c").unlink()
    assert require("_made_in_c").__name__ == "_made_in_c"


def test_a_module_that_is_refused_or_not_there_is_not_used(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError):
        require("_not_made_in_c")
    monkeypatch.setenv("PRFAAS_PURE_PYTHON", "1")
    with pytest.raises(ImportError, match="PRFAAS_PURE_PYTHON"):
        require("_made_in_c")
