"""What the stub answers, and how fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StubOptions:
    """First token after `ttft_s` and then one chunk each `itl_s`, however many requests there are.
    With `itl_s` 0 every chunk leaves in a pass of the loop of its own, so that none are joined.
    `service` bounds the requests served at once (0: no bound); the others queue. `refuse_share` of
    the requests are answered 503 at once, evenly.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_chunk: int = 1
    service: int = 0
    refuse_share: float = 0.0
    model: str = "stub"
    api_key: str = ""
