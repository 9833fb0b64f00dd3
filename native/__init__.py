"""Modules in C, each of which has a twin in Python that does the same."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType


def require(name: str) -> ModuleType:
    """The module in C of this full name. Raises ImportError where its twin is to be used instead:
    it is not built, PRFAAS_PURE_PYTHON=1 refuses it, or it was built from another source than the
    one that lies beside its twin, of which a warning tells. That may be a module of another
    checkout, which an editable installation offers to one that has none built.
    """
    if os.environ.get("PRFAAS_PURE_PYTHON") == "1":
        raise ImportError("PRFAAS_PURE_PYTHON=1 asks for Python")
    module = importlib.import_module(name)
    package, _, file = name.rpartition(".")
    source = Path(sys.modules[package].__path__[0]) / f"{file}.c"
    try:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError:
        return module  # installed without it
    if getattr(module, "SOURCE_SHA256", "") != digest:
        stale = (
            f"{name} was built from another source than {source}: its slower twin in Python is"
            " used; `make install` builds it again"
        )
        warnings.warn(stale, RuntimeWarning, stacklevel=2)
        raise ImportError(stale)
    return module
