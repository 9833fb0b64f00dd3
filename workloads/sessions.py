"""Multi-turn sessions as chains of prefix blocks that grow turn by turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.draws import CHUNK, BlockIds, endless
from workloads.kinds import SessionsWorkload
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session, `after_s` seconds after the session's start."""

    after_s: float
    input_tokens: int
    output_tokens: int


class SessionDraws:
    """What sessions are made of, drawn from two streams: lengths (and turns), and pauses."""

    def __init__(
        self, workload: SessionsWorkload, lengths: np.random.Generator, pauses: np.random.Generator
    ) -> None:
        counts, firsts, laters, answers = lengths.spawn(4)
        self._workload = workload
        self._counts = _chunked(lambda: counts.geometric(1 / workload.mean_turns, CHUNK))
        self._firsts = endless(workload.first_message, firsts, workload.stratified)
        self._laters = endless(workload.later_message, laters)
        self._answers = endless(workload.output_tokens, answers)
        self._thinks = _chunked(lambda: pauses.exponential(workload.think_s, CHUNK))

    def session(self) -> list[Turn]:
        """The turns of one session. Every prompt holds all earlier messages and answers."""
        workload = self._workload
        turns: list[Turn] = []
        context, after_s = workload.system_tokens + next(self._firsts), 0.0
        for _ in range(min(int(next(self._counts)), workload.max_turns)):
            if context > workload.max_input_tokens and turns:
                break
            answer = next(self._answers)
            turns.append(Turn(after_s, min(context, workload.max_input_tokens), answer))
            context += answer + next(self._laters)
            after_s += workload.response_s + next(self._thinks)
        return turns


def _chunked(draw: Callable[[], NDArray[Any]]) -> Iterator[float]:
    while True:
        yield from draw().tolist()


def mean_session_turns(workload: SessionsWorkload, sessions: int = 4096) -> float:
    """Mean turns of a session, measured on a fixed sample (the caps shorten sessions)."""
    draws = SessionDraws(workload, *np.random.default_rng(0).spawn(2))
    return sum(len(draws.session()) for _ in range(sessions)) / sessions


def session_requests(
    workload: SessionsWorkload,
    starts_s: Iterator[float],
    lengths: np.random.Generator,
    pauses: np.random.Generator,
) -> Iterator[Request]:
    """All turns of all sessions in arrival order (`starts_s` ascending). Ids are not final.

    A full block keeps its id in every later turn. The last, partial block of a prompt has an id of
    its own, because its content is not that of the full block which later takes its place.
    """
    draws = SessionDraws(workload, lengths, pauses)
    ids = BlockIds()
    size = workload.block_tokens
    system = ids.take(workload.system_tokens // size)
    waiting: list[tuple[float, int, int]] = []
    live: dict[int, tuple[list[Turn], tuple[int, ...]]] = {}
    started = 0
    next_start = next(starts_s, None)
    while waiting or next_start is not None:
        if next_start is not None and (not waiting or next_start <= waiting[0][0]):
            turns = draws.session()
            live[started] = (turns, system)
            heapq.heappush(waiting, (next_start, started, 0))
            started += 1
            next_start = next(starts_s, None)
            continue
        arrival_s, session, index = heapq.heappop(waiting)
        turns, chain = live[session]
        turn = turns[index]
        full = turn.input_tokens // size
        chain += ids.take(full - len(chain))
        partial = ids.take(1) if turn.input_tokens % size else ()
        yield Request(
            0,
            arrival_s,
            turn.input_tokens,
            turn.output_tokens,
            chain + partial,
            size,
            session=f"s{session}",
        )
        if index + 1 == len(turns):
            del live[session]
        else:
            live[session] = (turns, chain)
            start_s = arrival_s - turn.after_s
            heapq.heappush(waiting, (start_s + turns[index + 1].after_s, session, index + 1))
