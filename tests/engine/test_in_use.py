"""What a process has in use rises with what it keeps, wherever that lies, and falls again."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.in_use import in_use_bytes, kept_bytes

MIB = 2**20

pytestmark = pytest.mark.skipif(in_use_bytes() is None, reason="no mallinfo2 in the C library")


def used() -> int:
    found = in_use_bytes()
    assert found is not None and kept_bytes() is not None
    return found


def test_large_buffers_count_while_they_are_kept():
    before = used()
    kept = [bytearray(MIB) for _ in range(32)]
    assert used() - before == pytest.approx(32 * MIB, rel=0.05)
    kept.clear()
    assert used() - before == pytest.approx(0, abs=MIB)


def test_small_objects_count_while_they_are_kept():
    before = used()
    kept = [(number, number) for number in range(100_000, 300_000)]
    grown = used() - before
    assert 10 * MIB < grown < 60 * MIB  # 20 MiB of tuples and integers, and a list of pointers
    kept.clear()
    assert used() - before < 2 * MIB


@pytest.mark.parametrize("arguments", [("--passes", "3"), ("--passes", "4", "--trim", "-1")])
def test_the_benchmark_of_memory_refuses_what_it_cannot_divide_into_quarters(arguments):
    pytest.importorskip("torch")
    benchmark = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--passes needs 4 or more" in done.stderr
