"""What a lane sends before bodies: the header of one chunk, or a batch's header and table."""

from __future__ import annotations

from collections.abc import Sequence

from engine.transport.frames import Header, Type, checksum, encode_header, encode_table
from engine.transport.outgoing import ChunkTask


def head_of(
    tasks: Sequence[ChunkTask],
    bodies_bytes: int,
    checksums: Sequence[int],
    source: int,
    target: int,
) -> bytes:
    """Of chunks of one transfer, at least one. bodies_bytes: of all bodies on the wire; checksums:
    xxh3-64 of each body; source, target: incarnations of both ends."""
    first = tasks[0]
    if len(tasks) == 1:
        return encode_header(
            Header(
                Type.DATA,
                bodies_bytes,
                first.attempt,
                source,
                target,
                first.transfer,
                first.region.layer,
                int(first.region.kind),
                first.chunk,
                checksums[0],
            )
        )
    rows = [(task.number, digest) for task, digest in zip(tasks, checksums, strict=True)]
    table = encode_table(rows)
    header = Header(
        Type.BATCH,
        len(table) + bodies_bytes,
        first.attempt,
        source,
        target,
        first.transfer,
        chunk=len(rows),
        checksum=checksum([table]),
    )
    return encode_header(header) + table
