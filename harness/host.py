"""What this host is: recorded with every result, so that figures are compared like with like."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path


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
    """Processor, cores, kernel and Python, as words."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
