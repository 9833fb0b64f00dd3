"""Stub servers in processes of their own, and the helpers of `scripted` on the path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Tests are not a package, so their shared helpers are found by path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def stub_url() -> Iterator[Callable[..., str]]:
    """Starts stub servers in processes of their own; call it with the command's options."""
    started = []

    def start(*options: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.stub", *options], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    yield start
    for process in started:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
