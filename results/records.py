"""The measured life of one request, filled in as the request moves, written once when it ends.

All `_s` fields are seconds of the run's loop clock since the start of the measured phase (virtual
in `simulate`, monotonic in `emulate` and `live`). What the figures made from them mean is defined
in `results.metrics`, and only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a request ended; each offered request ends in exactly one of these."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNSENT = "unsent"


#: (first token's time_s, step_s, count): `count` tokens at time_s, time_s + step_s, ...
TokenRun = tuple[float, float, int]


@dataclass(slots=True)
class RequestRecord:
    """One row of requests.parquet. Times are None until the event has happened."""

    id: int
    scheduled_s: float
    input_tokens: int
    output_tokens: int
    session: str = ""
    tenant: str = ""
    slo_class: str = ""
    sent_s: float | None = None
    status: Status | None = None
    failure: str = ""
    attempts: int = 0
    prefill_cluster: str = ""
    prefill_instance: str = ""
    decode_instance: str = ""
    cached_tokens: int = 0
    wire_bytes: int = 0
    prefill_started_s: float | None = None
    prefill_finished_s: float | None = None
    delivered_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    tokens_received: int = 0
    ended_s: float | None = None
    verified: bool | None = None
    token_runs: Sequence[TokenRun] = ()
    token_ids: list[int] | None = None
