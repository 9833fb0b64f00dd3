"""What a process has in use rises with what it keeps, wherever that lies, and falls again."""

import ctypes
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.in_use import BLOCK_BYTES, _small_blocks, in_use_bytes, kept_bytes

MIB = 2**20

pytestmark = pytest.mark.skipif(in_use_bytes() is None, reason="no mallinfo2 in the C library")


@pytest.fixture(autouse=True)
def only_what_a_test_frees() -> Iterator[None]:
    """Garbage of earlier tests in this process would be collected at any moment."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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
    # A tuple of two and an integer, in steps of 16 bytes, and a pointer to the tuple.
    assert grown == pytest.approx(200_000 * (64 + 32 + 8), rel=0.05)
    kept.clear()
    assert used() - before < 2 * MIB


def test_an_interpreter_that_does_not_tell_is_asked_for_the_number_of_its_blocks(monkeypatch):
    monkeypatch.setattr(ctypes, "pythonapi", object())
    by_number = _small_blocks()
    assert by_number() == pytest.approx(sys.getallocatedblocks() * BLOCK_BYTES, rel=0.01)


@pytest.mark.parametrize("arguments", [("--passes", "3"), ("--passes", "4", "--trim", "-1")])
def test_the_benchmark_of_memory_refuses_what_it_cannot_divide_into_quarters(arguments):
    pytest.importorskip("torch")
    benchmark = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--passes needs 4 or more" in done.stderr
