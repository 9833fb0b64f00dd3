"""Decides what each step computes: continuous batching with chunked prefill, by memory.

Torch-free and synchronous. The owner calls `schedule`, runs the step, and calls `complete`; between
the two it may add and cancel sequences. Memory is only taken and given here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.cache.keys import block_keys
from engine.cache.pool import HybridPool, NeverFits, PoolFull
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch` sequences hold memory at a time. A step computes at most `step_tokens`
    (decode tokens first, then prompts in order of arrival, cut at block boundaries); with
    `whole_prompts` it computes one prompt to its end, whatever its length, and the others wait.
    `phases`: see `Scheduler.schedule`.
    """

    max_batch: int = 32
    step_tokens: int = 2048
    whole_prompts: bool = False
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


class Scheduler:
    """Sequences wait, run (hold memory) and end; see `Limits`."""

    def __init__(self, pool: HybridPool, limits: Limits) -> None:
        if limits.step_tokens < pool.block_tokens:
            raise ValueError(
                f"step_tokens = {limits.step_tokens} is less than a page of {pool.block_tokens}"
            )
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
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
        self.waiting.append(sequence)

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
        for sequence in self.running:
            if not sequence.decoding:
                budget -= self._add_chunk(sequence, budget, items)
        # After a preemption nothing is admitted: what it freed is for those that go on.
        while self.preemptions == preemptions and len(self.running) < limits.max_batch:
            if limits.whole_prompts and self._prefilling(items):
                break
            next_up = self._next_waiting(budget)
            if next_up is None:
                break
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

    # -- memory

    @property
    def starved(self) -> bool:
        """A sequence that has begun waits for memory: give none to newcomers."""
        return bool(self.waiting) and self.waiting[0].preemptions > 0

    def _next_waiting(self, budget: int) -> Sequence | None:
        """The first in line that can be admitted. Those that hold memory (their cache arrived)
        pass others that find none: they are the ones that will free it.
        """
        blocked = budget < self.pool.block_tokens
        for sequence in self.waiting:
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
        assert lease is not None
        start, end = sequence.computed, len(sequence.tokens)
        stop = end if self.limits.whole_prompts else min(end, start + budget)
        if stop < end:
            stop -= stop % self.pool.block_tokens
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
        self.waiting.appendleft(sequence)

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
