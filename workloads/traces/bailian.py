"""Qwen-Bailian JSONL: chat_id, parent_chat_id, timestamp (s), input_length, output_length, turn,
type, hash_ids (blocks of 16 tokens).

Its ids are hashes of single blocks, so they are chained here. A file may give the last, partial
block an id or leave it out. The session is the first chat of the chain of parents, the tenant the
type.
"""

from __future__ import annotations

from collections.abc import Iterator

from workloads.request import Request
from workloads.traces.chain import chained
from workloads.traces.rows import Place, block_ids_field, json_rows, number_field, tokens_field

BLOCK_TOKENS = 16
#: Chats whose session is remembered; a turn whose parent is older starts a session of its own.
REMEMBERED_CHATS = 1_000_000


def read(path: str) -> Iterator[tuple[Place, Request]]:
    """Rows in file order; arrival_s is the stamp itself."""
    roots: dict[object, object] = {}
    for number, (place, row) in enumerate(json_rows(path)):
        input_tokens = tokens_field(place, row, "input_length")
        raw = block_ids_field(
            place, row, "hash_ids", input_tokens, BLOCK_TOKENS, partial_optional=True
        )
        ids = chained(str(block).encode() + b"," for block in raw)
        chat = _chat(place, row, "chat_id")
        parent = _chat(place, row, "parent_chat_id")
        root = roots[chat] = chat if parent == -1 else roots.get(parent, parent)
        if len(roots) > REMEMBERED_CHATS:
            del roots[next(iter(roots))]
        yield (
            place,
            Request(
                number,
                number_field(place, row, "timestamp"),
                input_tokens,
                tokens_field(place, row, "output_length"),
                ids,
                BLOCK_TOKENS if ids else 0,
                session=str(root),
                tenant=str(row.get("type", "")),
            ),
        )


def _chat(place: Place, row: dict[str, object], name: str) -> int | str:
    value = row.get(name, -1)
    if not isinstance(value, int | str):
        raise place.error(f"{name}: found {value!r}, needs a number or a name")
    return value
