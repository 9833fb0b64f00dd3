"""How long prompts take: what pacing waits for, and what queue disciplines order by."""

from __future__ import annotations

from dataclasses import dataclass

from engine.pacing import Pacing
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PacedTime:
    """Of the modelled device. A whole prompt costs T(l) - T(c) + T(0); of one cut in chunks, the
    fixed T(0) is paid with the first."""

    pacing: Pacing

    def left_s(self, sequence: Sequence) -> float:
        """Seconds of prefill that a prompt still needs."""
        return self.chunk_s(sequence, sequence.computed, len(sequence.tokens))

    def chunk_s(self, sequence: Sequence, start: int, stop: int) -> float:
        """Seconds of positions start..stop of a prompt (engine tokens)."""
        scale = (sequence.system_tokens or sequence.prompt_tokens) / sequence.prompt_tokens
        lease = sequence.lease
        first = lease is None or start == lease.reused_tokens
        cached = start * scale
        if sequence.system_tokens and not sequence.preemptions:
            # The control plane judges caches per cluster: what another instance of it holds counts.
            named = float(sequence.cached_tokens)
            cached = named if first else max(cached, named)
        duration_s = self.pacing.prefill_s(stop * scale, min(cached, stop * scale))
        return duration_s if first else duration_s - self.pacing.prefill(0.0)


@dataclass(slots=True)
class MeasuredTime:
    """Of this engine itself, by all tokens that it computed so far in steps with prompts. Before
    the first a token counts as 0.1 ms: any speed orders prompts that came together by length."""

    tokens: int = 0
    computed_s: float = 0.0

    def learn(self, tokens: int, computed_s: float) -> None:
        self.tokens += tokens
        self.computed_s += computed_s

    def left_s(self, sequence: Sequence) -> float:
        """Seconds of prefill that a prompt still needs."""
        token_s = self.computed_s / self.tokens if self.tokens else 1e-4
        scale = sequence.prompt_tokens / (sequence.system_tokens or sequence.prompt_tokens)
        cached = max(sequence.computed, sequence.cached_tokens * scale)
        return max(0.0, len(sequence.tokens) - cached) * token_s
