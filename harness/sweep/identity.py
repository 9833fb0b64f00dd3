"""What a point's figures depend on, as one name: equal names mean equal figures."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib import resources
from pathlib import Path

from harness.errors import BadInput
from harness.profiles import load_profile
from harness.sweep.study import Point
from workloads.kinds import TraceWorkload

#: The packages whose code and data make the figures. Of the engine a simulation uses the queue
#: disciplines and the prefix checkpoints.
_PACKAGES = ("harness", "workloads", "results", "engine", "native")
_SUFFIXES = (".py", ".c", ".toml")


def identity(point: Point, best: bool) -> str:
    """A digest of the resolved experiment, the sweep's own parameters, the mode, the profiles and
    trace that they name, and this program's code. Not of the point's place in its study. Raises
    BadInput where a profile or the trace cannot be read."""
    experiment = point.experiment
    workload = experiment.workload
    content = {
        "experiment": experiment.model_dump(mode="json"),
        "own": point.own,
        "mode": point.mode,
        "best": best,
        "profiles": [
            repr(load_profile(name))
            for name in (experiment.profiles.prfaas, experiment.profiles.pd)
        ],
        "trace": _file(workload.path) if isinstance(workload, TraceWorkload) else "",
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def _file(path: str) -> str:
    try:
        with Path(path).open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"trace {path}: cannot be read: {error.strerror}") from None


@functools.cache
def _code() -> str:
    """Of the files, not the commit: a changed checkout or an installed package has none."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        folder = Path(str(resources.files(package)))
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
