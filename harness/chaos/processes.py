"""What a process and its descendants hold, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """`rss_bytes` and `descriptors` of the process itself; how many `processes` are below it."""

    rss_bytes: int
    descriptors: int
    processes: int


def held_by(pid: int) -> Held:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Held(pages * _PAGE_BYTES, descriptors, len(descendants(pid)))


def descendants(pid: int) -> list[int]:
    """Processes below `pid` that have not ended, parents before their children."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name may hold spaces and brackets; what follows its last bracket does not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]
