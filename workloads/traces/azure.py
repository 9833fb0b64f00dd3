"""Azure LLM inference traces (2023 and 2024): TIMESTAMP,ContextTokens,GeneratedTokens.

Stamps have up to seven decimals, which a float of seconds since 1970 cannot hold: they are parsed
to whole units of 100 ns and become seconds only after the first row's stamp is taken off. The 2024
files may carry a UTC offset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

from workloads.request import Request
from workloads.traces.rows import Place, csv_rows, tokens_field

UNITS_PER_S = 10_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,7})\d*)?(?:Z|([+-])(\d\d):?(\d\d))?"
)


def parse_stamp(place: Place, text: str) -> int:
    """Units of 100 ns since 1970, UTC unless the stamp has an offset."""
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        whole, fraction, sign, hours, minutes = match.groups()
        zone: timezone = UTC
        if sign:
            offset = timedelta(hours=int(hours), minutes=int(minutes))
            zone = timezone(-offset if sign == "-" else offset)
        second = datetime.fromisoformat(whole).replace(tzinfo=zone)
    except ValueError:
        raise place.error(
            f"TIMESTAMP: found {text[:60]!r}, needs a stamp such as 2023-11-16 18:15:46.6805900"
        ) from None
    since = second - _EPOCH
    return (since.days * 86_400 + since.seconds) * UNITS_PER_S + int((fraction or "").ljust(7, "0"))


def read(path: str) -> Iterator[tuple[Place, Request]]:
    """Rows in file order; arrival_s counts from the first row (negative for an earlier one)."""
    first: int | None = None
    needed = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    for number, (place, row) in enumerate(csv_rows(path, needed)):
        stamp = parse_stamp(place, row["TIMESTAMP"])
        first = stamp if first is None else first
        yield (
            place,
            Request(
                number,
                (stamp - first) / UNITS_PER_S,
                tokens_field(place, row, "ContextTokens"),
                tokens_field(place, row, "GeneratedTokens"),
            ),
        )
