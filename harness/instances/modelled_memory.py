"""Cache memory of a modelled decode instance: grants in order of asking, nothing ever overbooked.

A request's memory is granted for its full length (prompt and output), so a batch never has to be
preempted for memory and waiting for a grant cannot deadlock: whoever holds memory needs no more.
"""

from __future__ import annotations

from collections import deque


class Reservation:
    """Memory for one request, from the moment it is asked for until it is freed."""

    __slots__ = ("asked", "granted", "n_bytes")

    def __init__(self, n_bytes: float) -> None:
        self.n_bytes = n_bytes
        self.asked = False
        self.granted = False

    def on_grant(self) -> None:
        """It is granted after a wait."""


class MemoryLedger:
    """Grants up to `capacity_bytes` (infinite when None), first come first served."""

    __slots__ = ("_waiting", "capacity_bytes", "peak_bytes", "used_bytes")

    def __init__(self, capacity_bytes: float | None) -> None:
        self.capacity_bytes = float("inf") if capacity_bytes is None else capacity_bytes
        self.used_bytes = 0.0
        self.peak_bytes = 0.0
        self._waiting: deque[Reservation] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, reservation: Reservation) -> bool:
        """Whether it is granted at once; else its `on_grant` is called when it is."""
        reservation.asked = True
        if self._waiting or self.used_bytes + reservation.n_bytes > self.capacity_bytes:
            self._waiting.append(reservation)
            return False
        self._grant(reservation)
        return True

    def free(self, reservation: Reservation) -> None:
        """Give back what was granted, or stop waiting for it. Idempotent."""
        if reservation.granted:
            reservation.granted = False
            self.used_bytes -= reservation.n_bytes
        elif reservation.asked:
            self._waiting.remove(reservation)
        reservation.asked = False
        waiting = self._waiting
        while waiting and self.used_bytes + waiting[0].n_bytes <= self.capacity_bytes:
            head = waiting.popleft()
            self._grant(head)
            head.on_grant()

    def reset(self) -> None:
        """All memory is lost with the instance; nobody is told."""
        for reservation in self._waiting:
            reservation.asked = False
        self._waiting.clear()
        self.used_bytes = 0.0

    def _grant(self, reservation: Reservation) -> None:
        reservation.granted = True
        self.used_bytes = used_bytes = self.used_bytes + reservation.n_bytes
        if used_bytes > self.peak_bytes:
            self.peak_bytes = used_bytes
