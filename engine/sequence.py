"""One request inside the engine: its tokens, its memory, and how far it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.pool import Lease


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; otherwise `seed` and a token's position fix the draw."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; the cache holds the first `computed` of them.

    `max_tokens` bounds what is generated (the first token included, wherever it was sampled).
    With `hand_over` the sequence ends with its first token and keeps its lease for the owner, who
    sends the cache on and releases it. `system_tokens` and `cached_tokens` are the prompt's length
    and prefix hit in the modelled system, which pacing goes by. `arrived_s` (CLOCK_MONOTONIC) is
    when its request arrived wherever it came in first; `rank` is its place among the prompts.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    tenant: str = ""
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    hand_over: bool = False
    system_tokens: int = 0
    cached_tokens: int = 0
    arrived_s: float = 0.0
    prompt_tokens: int = field(init=False)
    computed: int = 0
    #: The next token where it is computed but not due yet (see `Scheduler.schedule`), else -1.
    ahead: int = -1
    lease: Lease | None = None
    keys: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    phase: int = 0
    rank: float = 0.0
    in_step: bool = False
    cancelled: bool = False
    finish: str = ""
    preemptions: int = 0
    overruns: int = 0
    worst_overrun: float = 0.0

    def __post_init__(self) -> None:
        assert self.tokens and self.max_tokens >= 1
        self.prompt_tokens = len(self.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def decoding(self) -> bool:
        """All is computed but the last token at most."""
        return self.generated > 0 and self.computed >= len(self.tokens) - 1

    def arrive(self, lease: Lease, first_token: int) -> None:
        """The cache of the prompt came from elsewhere, with the token sampled there."""
        assert self.computed == 0 and not self.generated
        self.lease = lease
        self.computed = self.prompt_tokens
        self.tokens.append(first_token)

    def drop_memory(self) -> None:
        """Release the lease; what was computed has to be computed (or hit) again."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        self.computed = 0
        self.ahead = -1
        self.boundaries = []
