"""What a process and its descendants hold, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Held:
    """Of the process itself: resident memory, the part of it that is not files or shared
    (`heap_bytes`), open descriptors, CPU time used; and how many `processes` are below it. Only the
    process itself can say what its allocators have handed out of the heap (`in_use_bytes`)."""

    rss_bytes: int
    heap_bytes: int
    descriptors: int
    cpu_s: float
    processes: int
    in_use_bytes: int | None = None


def held_by(pid: int) -> Held:
    """Raises FileNotFoundError or ProcessLookupError when it has ended."""
    folder = Path(f"/proc/{pid}")
    sizes = {}
    for line in (folder / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon"):
            sizes[name] = int(value.split()[0]) * 1024
    if not sizes:
        raise ProcessLookupError(f"process {pid} has ended")  # a zombie has no memory
    fields = _fields(folder / "stat")
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return Held(sizes["VmRSS"], sizes["RssAnon"], descriptors, cpu_s, len(descendants(pid)))


def descendants(pid: int) -> list[int]:
    """Processes below `pid` that have not ended, parents before their children."""
    return list(family(pid))


def family(pid: int) -> dict[int, int]:
    """Processes below `pid` that have not ended -> the parent of each, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = _fields(entry / "stat")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, int] = {}
    below = [pid]
    for parent in below:
        for child in children.get(parent, ()):
            found[child] = parent
            below.append(child)
    return found


def command_of(pid: int) -> str:
    """What the process runs, in a word: the module of `python -m`, or the program's name; empty
    when it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name


def _fields(stat: Path) -> list[str]:
    """From the state on: the name before it may hold spaces and brackets, what follows its last
    bracket does not."""
    return stat.read_text().rpartition(")")[2].split()
