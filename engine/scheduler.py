"""Decides what each step computes: continuous batching with chunked prefill, by memory.

Torch-free and synchronous. The owner calls `schedule`, runs the step, and calls `complete`; between
the two it may add and cancel sequences. Memory is only taken and given here.
"""

from __future__ import annotations

import math
from bisect import insort_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from engine.cache.keys import block_keys
from engine.cache.pool import HybridPool, NeverFits, PoolFull
from engine.disciplines import FIFO, Discipline, even_chunk
from engine.sequence import Sequence

_BY_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch` sequences hold memory at a time. A step computes at most `step_tokens`
    (decode tokens first, then prompts in the order of the discipline, cut at block boundaries).
    With `one_prompt` it computes one prompt and the others wait: to its end, whatever its length,
    or where the discipline preempts, an even chunk of it. `phases`: see `Scheduler.schedule`.
    """

    max_batch: int = 32
    step_tokens: int = 2048
    one_prompt: bool = False
    phases: int = 1


@dataclass(frozen=True, slots=True)
class Item:
    """Positions start..stop of one sequence. `source_slot` holds its state (-1: its own slot does);
    `checkpoints` are (position, slot) pairs at which a copy of the state is kept.
    """

    sequence: Sequence
    start: int
    stop: int
    source_slot: int = -1
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the step ends with a new token for this sequence."""
        return self.stop == len(self.sequence.tokens)


@dataclass(slots=True)
class Step:
    """`items` are computed; at the end `due` get a token. `admitted` began to hold memory."""

    items: list[Item]
    due: list[Sequence]
    admitted: list[Sequence]


def tokens_left(sequence: Sequence) -> float:
    """A second a token: for orders by length alone."""
    return float(len(sequence.tokens) - sequence.computed)


class Scheduler:
    """Sequences wait, run (hold memory) and end; see `Limits`.

    Prompts, waiting or begun, are computed in the order in which `discipline` ranks them; `left_s`
    says how many seconds of prefill one still needs. One that was preempted for memory goes first
    whatever the discipline, so that it cannot be passed again and again.
    """

    def __init__(
        self,
        pool: HybridPool,
        limits: Limits,
        discipline: Discipline = FIFO,
        left_s: Callable[[Sequence], float] = tokens_left,
    ) -> None:
        if limits.step_tokens < pool.block_tokens:
            raise ValueError(
                f"step_tokens = {limits.step_tokens} is less than a page of {pool.block_tokens}"
            )
        self.pool = pool
        self.limits = limits
        self.discipline = discipline
        self._left_s = left_s
        #: By rank, those of equal rank in order of coming.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises NeverFits when the pool could not hold it even alone."""
        longest = sequence.prompt_tokens + sequence.max_tokens - 1
        size = self.pool.block_tokens
        capacity = self.pool.page_capacity
        if -(-longest // size) > capacity:
            raise NeverFits(
                f"{sequence.prompt_tokens} prompt + {sequence.max_tokens} output tokens do not fit "
                f"in {capacity} pages of {size} tokens"
            )
        sequence.rank = self._rank(sequence)
        insort_right(self.waiting, sequence, key=_BY_RANK)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence at any point; one that a step computes now gives its memory back after."""
        if sequence.finish:
            return
        sequence.cancelled = True
        if not sequence.in_step:
            self._end(sequence, "cancelled")

    def schedule(self, tick: int = 0, computing: bool = False) -> Step:
        """The next step (no items: nothing can run now; none either while one is `computing`).

        With `phases` = k, a sequence admitted at tick t gets a decode token every k ticks from
        there. A token then stands for many steps of the modelled system, and a sequence need not
        wait for a whole one to be admitted. A quarter of its k ticks before a sequence's token is
        due, those of all are computed, each within its own k ticks, so that batches stay whole.
        """
        limits = self.limits
        items: list[Item] = []
        admitted: list[Sequence] = []
        budget = 0 if computing else limits.step_tokens
        preemptions = self.preemptions
        decoding = [sequence for sequence in self.running if sequence.decoding]
        pending = [] if computing else [s for s in decoding if s.ahead < 0]
        if any(self._due_in(sequence, tick) <= limits.phases // 4 for sequence in pending):
            for sequence in pending:
                budget -= self._add_token(sequence, items)
        due = [s for s in decoding if s.lease is not None and not self._due_in(s, tick)]
        begun = self._begun()
        while not (limits.one_prompt and self._prefilling(items)):
            next_up = None
            # After a preemption nothing is admitted: what it freed is for those that go on.
            if self.preemptions == preemptions and len(self.running) < limits.max_batch:
                next_up = self._next_waiting(budget, begun[0].rank if begun else math.inf)
            if next_up is None:
                if not begun:
                    break
                budget -= self._add_chunk(begun.pop(0), budget, items)
                continue
            self.waiting.remove(next_up)
            self.running.append(next_up)
            admitted.append(next_up)
            next_up.phase = (tick - 1) % limits.phases
            if not next_up.decoding:
                budget -= self._add_chunk(next_up, budget, items)
            elif limits.phases == 1:
                budget -= self._add_token(next_up, items)
                due.append(next_up)
        for item in items:
            item.sequence.in_step = True
            if item.samples and not item.sequence.decoding:
                due.append(item.sequence)
        return Step(items, due, admitted)

    def late(self, tick: int) -> bool:
        """Whether a token due when this tick ends is neither computed nor being computed."""
        return any(
            s.decoding and s.ahead < 0 and not s.in_step and not self._due_in(s, tick)
            for s in self.running
        )

    def absorb(self, step: Step, tokens: Iterable[int]) -> None:
        """The step has run and `tokens` were sampled, one for each item that samples, in order."""
        sampled = iter(tokens)
        for item in step.items:
            sequence = item.sequence
            lease = sequence.lease
            assert lease is not None and sequence.computed == item.start
            token = next(sampled) if item.samples else -1
            sequence.in_step = False
            sequence.computed = item.stop
            lease.copied()
            size = self.pool.block_tokens
            if item.stop // size > len(sequence.keys):
                sequence.keys = block_keys(
                    sequence.tokens[: item.stop], size, sequence.tenant, sequence.keys
                )
                lease.keys = sequence.keys
            lease.commit(item.stop)
            sequence.ahead = token
            if sequence.cancelled:
                self._end(sequence, "cancelled")

    def deliver(self, step: Step) -> list[Sequence]:
        """Hand out the tokens that are due.

        Returns the sequences that got one (the last of its `tokens`); `finish` says which ended.
        """
        fed: list[Sequence] = []
        for sequence in step.due:
            token, sequence.ahead = sequence.ahead, -1
            if sequence.finish or token < 0:
                continue
            sequence.tokens.append(token)
            fed.append(sequence)
            if token in sequence.stop_tokens:
                self._end(sequence, "stop")
            elif sequence.generated >= sequence.max_tokens:
                self._end(sequence, "length")
        return fed

    def complete(self, step: Step, tokens: Iterable[int]) -> list[Sequence]:
        """`absorb` and `deliver`, where steps are not ahead of what is due."""
        self.absorb(step, tokens)
        return self.deliver(step)

    def abort(self, step: Step) -> None:
        """The step failed: its sequences end, and what they computed is not shared."""
        for item in step.items:
            item.sequence.in_step = False
            item.sequence.hand_over = False
            self._end(item.sequence, "error")

    def _due_in(self, sequence: Sequence, tick: int) -> int:
        """Ticks before the one at whose end the sequence's next token is due."""
        return (sequence.phase - tick) % self.limits.phases

    # -- order

    def _rank(self, sequence: Sequence) -> float:
        if sequence.preemptions:
            return -math.inf
        left_s = 0.0 if sequence.decoding else self._left_s(sequence)
        return self.discipline.rank(sequence.arrived_s, left_s)

    def _begun(self) -> list[Sequence]:
        """Prompts that hold memory and are not computed yet, best rank first: none stands lower
        than before for what was computed of it."""
        begun = [sequence for sequence in self.running if not sequence.decoding]
        for sequence in begun:
            sequence.rank = min(sequence.rank, self._rank(sequence))
        return sorted(begun, key=_BY_RANK)

    # -- memory

    @property
    def starved(self) -> bool:
        """A sequence that has begun waits for memory: give none to newcomers."""
        return bool(self.waiting) and self.waiting[0].preemptions > 0

    def _next_waiting(self, budget: int, before: float) -> Sequence | None:
        """The first in line, of those ranked below `before`, that can be admitted. Those that hold
        memory (their cache arrived) pass others that find none: they will free it.
        """
        blocked = budget < self.pool.block_tokens
        for sequence in self.waiting:
            if sequence.rank >= before:
                break
            if sequence.lease is not None or (not blocked and self._admit(sequence)):
                return sequence
            blocked = True
        return None

    def _admit(self, sequence: Sequence) -> bool:
        size = self.pool.block_tokens
        known = len(sequence.tokens)
        sequence.keys = block_keys(sequence.tokens, size, sequence.tenant, sequence.keys)
        try:
            lease = self.pool.acquire(sequence.keys, known)
        except PoolFull:
            return False
        sequence.lease = lease
        sequence.computed = lease.reused_tokens
        sequence.boundaries = self.pool.policy.boundaries(
            lease.reused_tokens, lease.hit.kv_tokens, known, size
        )
        return True

    def _add_chunk(self, sequence: Sequence, budget: int, items: list[Item]) -> int:
        """Append the next chunk of a prompt within `budget`; returns its number of tokens."""
        lease = sequence.lease
        if lease is None:  # preempted while this step was made up
            return 0
        start, end, size = sequence.computed, len(sequence.tokens), self.pool.block_tokens
        if not self.limits.one_prompt:
            stop = min(end, start + budget)
        elif not self.discipline.preempts:
            stop = end
        else:
            most = max(size, budget - budget % size)
            stop = min(end, start + math.ceil(even_chunk(end - start, most) / size) * size)
        if stop < end:
            stop -= stop % size
        if stop <= start:
            return 0
        checkpoints = []
        while sequence.boundaries and sequence.boundaries[0] <= stop:
            boundary = sequence.boundaries.pop(0)
            slot = lease.reserve_checkpoint(boundary)
            if slot >= 0:
                checkpoints.append((boundary, slot))
        items.append(Item(sequence, start, stop, lease.copy_from, tuple(checkpoints)))
        return stop - start

    def _add_token(self, sequence: Sequence, items: list[Item]) -> int:
        """Append a decode token, taking memory from the sequence admitted last if need be.

        Returns 1, or 0 when the sequence was preempted itself.
        """
        while sequence.lease is not None:
            lease = sequence.lease
            try:
                lease.extend(sequence.computed + 1)
            except PoolFull:
                chosen = {id(item.sequence) for item in items}
                self._preempt(next(s for s in reversed(self.running) if id(s) not in chosen))
            else:
                items.append(
                    Item(sequence, sequence.computed, sequence.computed + 1, lease.copy_from)
                )
                return 1
        return 0

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue without memory; it is computed again from its tokens."""
        self.running.remove(sequence)
        sequence.drop_memory()
        sequence.preemptions += 1
        self.preemptions += 1
        sequence.rank = self._rank(sequence)
        self.waiting.insert(0, sequence)

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish = reason
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if not (sequence.hand_over and reason in ("stop", "length")):
            sequence.drop_memory()

    @staticmethod
    def _prefilling(items: list[Item]) -> bool:
        return any(not item.sequence.decoding for item in items)
