"""Which request is due next, and when: the workload's own times, or a session's think times."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from workloads.request import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and when it is due, s of the phase."""

    due_s: float
    request: Request


class OpenSchedule:
    """Each request at its own arrival, whatever became of the others."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._next: Turn | None = None

    @property
    def parked(self) -> bool:
        """Whether there are turns that only the end of others will make due."""
        return False

    def peek(self) -> Turn | None:
        if self._next is None:
            request = next(self._requests, None)
            if request is not None:
                self._next = Turn(request.arrival_s, request)
        return self._next

    def pop(self) -> Turn:
        turn = self.peek()
        assert turn is not None
        self._next = None
        return turn

    def ended(self, request: Request, now_s: float) -> None:
        """`request` has ended at `now_s` of the phase."""

    def rest(self) -> Iterator[Turn]:
        """What was never sent."""
        while (turn := self.peek()) is not None:
            self._next = None
            yield turn


class SessionSchedule(OpenSchedule):
    """Sessions as closed loops: a first turn at its arrival, every later one a think time after its
    predecessor's end.

    The think time is the gap between the two arrivals of the workload less `response_s` (its
    allowance for the answer), or `think_s` where given. Requests without a session are turns of
    none. A turn reached before its predecessor has ended is parked. Every session met is remembered
    to the end, at a few hundred bytes.
    """

    def __init__(
        self, requests: Iterator[Request], response_s: float, think_s: float | None = None
    ) -> None:
        super().__init__(requests)
        self._response_s = response_s
        self._think_s = think_s
        self._ready: list[tuple[float, int, Turn]] = []
        self._live: dict[str, _Session] = {}
        self._parked = 0
        self._numbers = 0

    @property
    def parked(self) -> bool:
        return self._parked > 0

    def peek(self) -> Turn | None:
        while True:
            turn = super().peek()
            if self._ready and (turn is None or self._ready[0][0] <= turn.due_s):
                return self._ready[0][2]
            if turn is None or not turn.request.session:
                return turn
            session = self._live.get(turn.request.session)
            if session is None:
                return turn
            self._next = None
            think_s = self._think(session.arrival_s, turn.request.arrival_s)
            session.arrival_s = turn.request.arrival_s
            if session.ended_s is None or session.waiting:
                session.waiting.append((think_s, turn.request))
                self._parked += 1
            else:
                ended_s, session.ended_s = session.ended_s, None
                self._release(Turn(ended_s + think_s, turn.request))

    def pop(self) -> Turn:
        turn = self.peek()
        assert turn is not None
        if self._ready and self._ready[0][2] is turn:
            heapq.heappop(self._ready)
            return turn
        self._next = None
        if turn.request.session:
            self._live[turn.request.session] = _Session(turn.request.arrival_s)
        return turn

    def ended(self, request: Request, now_s: float) -> None:
        session = self._live.get(request.session) if request.session else None
        if session is None:
            return
        if session.waiting:
            think_s, following = session.waiting.popleft()
            self._parked -= 1
            self._release(Turn(now_s + think_s, following))
        else:
            session.ended_s = now_s

    def rest(self) -> Iterator[Turn]:
        while self._ready:
            yield heapq.heappop(self._ready)[2]
        for session in self._live.values():
            while session.waiting:
                request = session.waiting.popleft()[1]
                yield Turn(request.arrival_s, request)
        self._live.clear()
        self._parked = 0
        yield from super().rest()

    def _think(self, earlier_s: float, later_s: float) -> float:
        if self._think_s is not None:
            return self._think_s
        return max(0.0, later_s - earlier_s - self._response_s)

    def _release(self, turn: Turn) -> None:
        self._numbers += 1
        heapq.heappush(self._ready, (turn.due_s, self._numbers, turn))


class _Session:
    """The latest turn seen of a session: its arrival, its end, and the turns waiting for that."""

    __slots__ = ("arrival_s", "ended_s", "waiting")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.ended_s: float | None = None
        self.waiting: deque[tuple[float, Request]] = deque()
