"""Multi-turn sessions as chains of prefix blocks that grow turn by turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workloads.kinds import SessionsWorkload, distribution_of
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session, `after_s` seconds after the session's start."""

    after_s: float
    input_tokens: int
    output_tokens: int


@dataclass(slots=True)
class BlockIds:
    """Hands out ids that no block had before, so that an id names one place in one chain."""

    next_id: int = 0

    def take(self, count: int) -> tuple[int, ...]:
        first = self.next_id
        self.next_id = first + count
        return tuple(range(first, first + count))


def session_turns(
    workload: SessionsWorkload, lengths: np.random.Generator, pauses: np.random.Generator
) -> list[Turn]:
    """The turns of one session. Every prompt holds all earlier messages and answers."""
    count = min(int(lengths.geometric(1 / workload.mean_turns)), workload.max_turns)
    later = distribution_of(workload.later_message).sample(lengths, count)
    messages = [int(distribution_of(workload.first_message).sample(lengths, 1)[0])]
    messages += later[1:].tolist()
    answers = distribution_of(workload.output_tokens).sample(lengths, count).tolist()
    thinks = pauses.exponential(workload.think_s, count).tolist()
    turns: list[Turn] = []
    context, after_s = workload.system_tokens, 0.0
    for message, answer, think_s in zip(messages, answers, thinks, strict=True):
        context += message
        if context > workload.max_input_tokens and turns:
            break
        turns.append(Turn(after_s, min(context, workload.max_input_tokens), answer))
        context += answer
        after_s += workload.response_s + think_s
    return turns


def mean_session_turns(workload: SessionsWorkload, sessions: int = 2000) -> float:
    """Mean turns of a session, measured on a fixed sample (the caps shorten sessions)."""
    lengths, pauses = (np.random.default_rng(s) for s in np.random.SeedSequence(0).spawn(2))
    return sum(len(session_turns(workload, lengths, pauses)) for _ in range(sessions)) / sessions


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
    ids = BlockIds()
    size = workload.block_tokens
    system = ids.take(workload.system_tokens // size)
    waiting: list[tuple[float, int, int]] = []
    live: dict[int, tuple[list[Turn], tuple[int, ...]]] = {}
    started = 0
    next_start = next(starts_s, None)
    while waiting or next_start is not None:
        if next_start is not None and (not waiting or next_start <= waiting[0][0]):
            turns = session_turns(workload, lengths, pauses)
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
