"""BurstGPT CSV: Timestamp (s), Model, Request tokens, Response tokens and, in some, Session ID.

Rows with no response tokens are requests that failed in the traced service; they have no output
length to replay and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from workloads.request import Request
from workloads.traces.rows import Place, csv_rows, number_field, tokens_field

NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens")


def read(path: str) -> Iterator[tuple[Place, Request]]:
    """Rows in file order; arrival_s is the stamp itself; the tenant is the model."""
    for number, (place, row) in enumerate(csv_rows(path, NEEDED)):
        if number_field(place, row, "Response tokens") == 0:
            continue
        session = row.get("Session ID", "")
        yield (
            place,
            Request(
                number,
                number_field(place, row, "Timestamp"),
                tokens_field(place, row, "Request tokens"),
                tokens_field(place, row, "Response tokens"),
                session="" if session.lower() in ("", "nan", "none") else session,
                tenant=row["Model"],
            ),
        )
