"""Modules in C are used only where they are of the source that lies beside them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from native import require

NAME = "package_with_c._made_in_c"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for a module in C: made of the source `int f;`."""
    package = tmp_path / "package_with_c"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_made_in_c.c").write_text("int f;")
    digest = "821b8a29fe72fed0037246c2b30c6301ed4bfbdc1f02d4f5d0cdfec5f3c68ca5"
    (package / "_made_in_c.py").write_text(f'SOURCE_SHA256 = "{digest}"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PRFAAS_PURE_PYTHON", raising=False)
    for name in ("package_with_c", "package_with_c._made_in_c"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return package


def test_a_module_of_the_source_beside_it_is_used(module: Path) -> None:
    assert require(NAME).__name__ == NAME


def test_a_module_of_another_source_is_not_used(module: Path) -> None:
    (module / "_made_in_c.c").write_text("long f;")
    with (
        pytest.warns(RuntimeWarning, match="_made_in_c was built from another .*make install"),
        pytest.raises(ImportError),
    ):
        require(NAME)


def test_a_module_of_before_there_were_digests_is_not_used(module: Path) -> None:
    (module / "_made_in_c.py").write_text("")
    with pytest.warns(RuntimeWarning, match="make install"), pytest.raises(ImportError):
        require(NAME)


def test_a_module_without_its_source_is_used(module: Path) -> None:
    (module / "_made_in_c.c").unlink()
    assert require(NAME).__name__ == NAME


def test_a_module_that_is_refused_or_not_there_is_not_used(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError):
        require("package_with_c._not_made_in_c")
    monkeypatch.setenv("PRFAAS_PURE_PYTHON", "1")
    with pytest.raises(ImportError, match="PRFAAS_PURE_PYTHON"):
        require(NAME)


def test_a_module_of_another_checkout_is_not_used(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an editable installation offers it to a checkout beside it that has none built."""
    (tmp_path / "package_with_c").rename(tmp_path / "installed")
    module.mkdir()
    (module / "_made_in_c.c").write_text("long f;")
    (module / "__init__.py").write_text(f"__path__.append({str(tmp_path / 'installed')!r})")
    importlib.invalidate_caches()
    with pytest.warns(RuntimeWarning, match="make install"), pytest.raises(ImportError):
        require(NAME)
