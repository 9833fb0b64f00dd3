"""One request under way: what the client saw of it, and when. Written to Parquet when it ends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from results.records import Status
from workloads.request import Request


@dataclass(slots=True)
class Flight:
    """`seed` is that of the phase's prompts. Times are seconds of the loop's clock (not yet of the
    phase); None until it has happened.

    `due_s` is when the schedule and the concurrency cap allowed the send: what lies between it and
    `sent_s` is the client's own lateness. `pool_wait_s` is what the request then waited for a
    connection. `chunk_s` is when each chunk that carried tokens arrived, `chunk_tokens` how many
    tokens it carried where the server said so.
    """

    request: Request
    phase: str
    origin_s: float
    scheduled_s: float
    seed: int = 0
    due_s: float | None = None
    sent_s: float | None = None
    pool_wait_s: float | None = None
    first_byte_s: float | None = None
    first_answer_s: float | None = None
    ended_s: float | None = None
    status: Status | None = None
    failure: str = ""
    attempts: int = 0
    new_connection: bool = False
    http_status: int = 0
    finish_reason: str = ""
    prompt_tokens: int | None = None
    server_tokens: int | None = None
    cached_tokens: int = 0
    received_bytes: int = 0
    prefill_cluster: str = ""
    prefill_instance: str = ""
    decode_instance: str = ""
    prefill_started_s: float | None = None
    prefill_finished_s: float | None = None
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] | None = None
    cancel: Any = None

    @property
    def client_tokens(self) -> int:
        """Tokens as the client counts them: ids where the server sent them, else chunks."""
        return len(self.chunk_s) if self.chunk_tokens is None else sum(self.chunk_tokens)

    @property
    def tokens_received(self) -> int:
        """The server's count where it gave one: chunks and words of text are not tokens."""
        return self.client_tokens if self.server_tokens is None else self.server_tokens

    def fail(self, reason: str) -> None:
        """The first reason stays: what follows a failure is its consequence."""
        self.failure = self.failure or reason
        self.status = Status.FAILED
