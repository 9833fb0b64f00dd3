"""Counters of a link, and the mapped file in which an emulator process publishes them."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from harness.links.wire import Wire

_LAYOUT = struct.Struct("=8Q")


@dataclass(frozen=True, slots=True)
class Counters:
    """What one direction carried since it came up, counted on the link itself.

    `sent_bytes` are whole frames that left onto the link (the relay, which sees payload only, adds
    the headers that full-size segments would have had). `backlog_bytes` wait for the rate now.
    """

    sent_bytes: int = 0
    sent_packets: int = 0
    dropped_packets: int = 0
    backlog_bytes: int = 0


class CountersFile:
    """Eight uint64, four a direction in the order of `Counters`, forward first.

    Each value is written whole, so a reader never sees half of one.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def write(self, wires: tuple[Wire, Wire]) -> None:
        values: list[int] = []
        for wire in wires:
            values += (wire.sent_bytes, wire.sent_packets)
            values += (wire.dropped_packets, wire.backlog_bytes)
        _LAYOUT.pack_into(self._map, 0, *values)

    def read(self) -> tuple[Counters, Counters]:
        values = _LAYOUT.unpack_from(self._map)
        return Counters(*values[:4]), Counters(*values[4:])

    def close(self) -> None:
        self._map.close()
