"""Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.request import Request
from workloads.traces.rows import Place, block_ids_field, json_rows, number_field, tokens_field

BLOCK_TOKENS = 512


def read(path: str) -> Iterator[tuple[Place, Request]]:
    """Rows in file order; arrival_s is the stamp itself in seconds."""
    for number, (place, row) in enumerate(json_rows(path)):
        input_tokens = tokens_field(place, row, "input_length")
        ids: tuple[int, ...] = ()
        if "hash_ids" in row:
            ids = block_ids_field(place, row, "hash_ids", input_tokens, BLOCK_TOKENS)
        yield (
            place,
            Request(
                number,
                number_field(place, row, "timestamp") / 1000,
                input_tokens,
                tokens_field(place, row, "output_length"),
                ids,
                BLOCK_TOKENS if ids else 0,
            ),
        )
