"""What this host is: recorded with every result, so that figures are compared like with like."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from pathlib import Path

from native import require


@functools.cache
def commit() -> str:
    """The checkout's commit, `-dirty` when it has changes; empty outside a checkout."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()


def facts() -> dict[str, str]:
    """Processor, cores, kernel, Python and the modules in C that are in use, as words."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "native": native(),
    }


#: By word, the modules that have a twin in Python.
_NATIVE = {
    "clock": "harness.clock._timeline",
    "batch": "harness.instances._modelled_macro",
    "order": "harness._ordering",
    "rows": "results._request_rows",
    "tls": "engine.transport._tls_records",
}


@functools.cache
def native() -> str:
    """Which modules in C are in use: `clock, batch, order, rows, tls` or `none`.

    Figures of speed with and without them are not alike.
    """
    found = []
    for word, module in _NATIVE.items():
        with contextlib.suppress(ImportError):
            require(module)
            found.append(word)
    return ", ".join(found) or "none"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
