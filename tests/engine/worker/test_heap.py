"""The staging heap: no overlap, no loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.worker.heap import ALIGN_BYTES, Heap


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_ranges_never_overlap_and_all_comes_back(steps):
    heap = Heap(16 * ALIGN_BYTES)
    held: list[tuple[int, int]] = []
    for take, number in steps:
        if take or not held:
            offset = heap.take(number)
            if offset is not None:
                for other, size in held:
                    assert offset + max(number, 1) <= other or other + max(size, 1) <= offset
                assert offset % ALIGN_BYTES == 0
                assert offset + number <= heap.size_bytes
                held.append((offset, number))
        else:
            heap.give(held.pop(number % len(held))[0])
    for offset, _ in held:
        heap.give(offset)
    assert heap.taken_bytes == 0
    assert heap.take(heap.size_bytes) == 0
