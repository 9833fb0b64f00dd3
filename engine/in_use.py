"""What this process has in use of its memory, as its allocators count it.

A process keeps more than it uses: what was freed stays with the C library's arenas until the next
allocation takes it, and how much stays wanders with the sizes that came and went. Growth of what is
in use is a leak; growth of what is held may be that.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

#: CPython's small objects (up to 512 bytes) lie in arenas that the C library does not know. Only
#: their number is cheap to ask for; this is their mean size in a worker (`sys._debugmallocstats`:
#: 613,555 blocks of 55,886,400 bytes). A leak of smaller ones counts for more than it is.
BLOCK_BYTES = 91


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 (man 3 mallinfo); all arenas together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _mallinfo() -> Callable[[], _MallInfo] | None:
    """glibc 2.33 and newer have it."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _MallInfo
    return ask


_ASK = _mallinfo()


def in_use_bytes() -> int | None:
    """Handed out and not given back, by the C library and by the interpreter; None where the former
    does not say. Memory that was mapped otherwise (a shared arena, libraries' code) is not in it.
    Takes 2 us in a small process, 26 in a worker."""
    if _ASK is None:
        return None
    heap = _ASK()
    return int(heap.uordblks + heap.hblkhd) + sys.getallocatedblocks() * BLOCK_BYTES


def kept_bytes() -> int | None:
    """Freed, and kept by the C library; None where it does not say."""
    return None if _ASK is None else int(_ASK().fordblks)
