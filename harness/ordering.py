"""Which of many keys has the least: cost, count or time left, at O(log n) a question.

`LeastFirst` and `FewestFirst` have twins in C, `_ordering.c`.
"""

from __future__ import annotations

import heapq


class LeastFirst:
    """Keys 0..n-1 with a changing cost each; the cheapest usable one in O(log n).

    An update is one push or replacement. Stale heap entries are dropped when they surface, and all
    at once when they are most of the heap, so it stays O(n) however many updates there were.
    """

    __slots__ = ("_costs", "_current", "_heap", "_limit")

    def __init__(self) -> None:
        self._costs: list[float] = []
        #: The heap entry that counts for each key, by identity; None while it is not usable.
        self._current: list[tuple[float, int] | None] = []
        self._heap: list[tuple[float, int]] = []
        self._limit = 64

    def __len__(self) -> int:
        return len(self._costs)

    def add(self) -> int:
        """Another key, usable and at 0."""
        key = len(self._costs)
        entry = (0.0, key)
        self._costs.append(0.0)
        self._current.append(entry)
        heapq.heappush(self._heap, entry)
        self._limit = 64 + 4 * len(self._costs)
        return key

    def cost(self, key: int) -> float:
        return self._costs[key]

    def usable(self, key: int) -> bool:
        return self._current[key] is not None

    def n_usable(self) -> int:
        return sum(entry is not None for entry in self._current)

    def update(self, key: int, cost: float) -> None:
        self._costs[key] = cost
        heap, current = self._heap, self._current
        before = current[key]
        if before is None:
            return
        entry = current[key] = (cost, key)
        if heap and heap[0] is before:
            heapq.heapreplace(heap, entry)  # usual: work goes to the cheapest
        elif len(heap) < self._limit:
            heapq.heappush(heap, entry)
        else:
            heap[:] = [each for each in current if each is not None]
            heapq.heapify(heap)

    def set_usable(self, key: int, usable: bool) -> None:
        if not usable:
            self._current[key] = None
        elif self._current[key] is None:
            cost = self._costs[key]
            self._current[key] = (cost, key)
            self.update(key, cost)

    def least(self) -> int:
        """The usable key of least (cost, key); -1 when there is none."""
        heap, current = self._heap, self._current
        while heap:
            entry = heap[0]
            key = entry[1]
            if current[key] is entry:
                return key
            heapq.heappop(heap)
        return -1


class FewestFirst:
    """Keys 0..n-1 with a count each; the usable one of least (count, key).

    The keys of each count are the bits of one number, which stays in a processor's caches where a
    heap of thousands of entries does not. A change costs a step for each 30 keys, of about a
    nanosecond.
    """

    __slots__ = ("_counts", "_keys", "_least", "_usable")

    def __init__(self) -> None:
        self._counts: list[int] = []
        #: By count: the usable keys that have it. No usable key has a count below `_least`.
        self._keys: dict[int, int] = {}
        self._least = 0
        self._usable = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self) -> int:
        """Another key, usable and at 0."""
        key = len(self._counts)
        self._counts.append(0)
        self.set_usable(key, True)
        return key

    def count(self, key: int) -> int:
        return self._counts[key]

    def usable(self, key: int) -> bool:
        return bool(self._usable >> key & 1)

    def n_usable(self) -> int:
        return self._usable.bit_count()

    def change(self, key: int, by: int) -> None:
        counts = self._counts
        before = counts[key]
        counts[key] = now = before + by
        bit = 1 << key
        if self._usable & bit:
            keys = self._keys
            keys[before] ^= bit
            keys[now] = keys.get(now, 0) | bit
            if now < self._least:
                self._least = now

    def set_usable(self, key: int, usable: bool) -> None:
        if self.usable(key) != usable:
            bit, count, keys = 1 << key, self._counts[key], self._keys
            self._usable ^= bit
            keys[count] = keys.get(count, 0) ^ bit
            if count < self._least:
                self._least = count

    def least(self) -> int:
        """-1 when no key is usable."""
        if not self._usable:
            return -1
        keys, least = self._keys, self._least
        found = keys.get(least)
        while not found:
            least += 1
            found = keys.get(least)
        self._least = least
        return (found & -found).bit_length() - 1


class Busy:
    """What is left of intervals that end, over `n` keys, at a time that only grows."""

    __slots__ = ("_end", "_heap", "_n", "_sum_s")

    def __init__(self, n: int) -> None:
        self._n = n
        self._end: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._sum_s = 0.0

    def until(self, key: int, end_s: float) -> None:
        """`key` is busy until `end_s`, whatever was said before."""
        self._sum_s += end_s - self._end.get(key, 0.0)
        self._end[key] = end_s
        heapq.heappush(self._heap, (end_s, key))

    def load(self, now_s: float) -> tuple[float, float]:
        """(mean time left, share of the keys that are busy)."""
        heap, end = self._heap, self._end
        while heap and heap[0][0] <= now_s:
            end_s, key = heapq.heappop(heap)
            if end.get(key) == end_s:
                self._sum_s -= end.pop(key)
        if not end:
            self._sum_s = 0.0
            return 0.0, 0.0
        return max(0.0, self._sum_s - now_s * len(end)) / self._n, len(end) / self._n
