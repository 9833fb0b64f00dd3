"""What a process has in use rises with what it keeps, wherever that lies, and falls again."""

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
