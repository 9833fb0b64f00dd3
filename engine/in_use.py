"""What this process has in use of its memory, as its allocators count it.

A process keeps more than it uses: what was freed stays with the C library's arenas until the next
allocation takes it, and how much stays wanders with the sizes that came and went. Growth of what is
in use is a leak; growth of what is held may be that.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable

#: Mean size of the interpreter's small blocks where it says no more than their number: that of a
#: worker (613,555 blocks of 55,886,400 bytes). A leak of smaller ones counts for more than it is.
BLOCK_BYTES = 91

_TOLD = re.compile(rb"# bytes in allocated blocks *= *([0-9,]+)")


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


def _small_blocks() -> Callable[[], int]:
    """Bytes of the interpreter's small objects (up to 512 bytes), which lie in arenas that the C
    library does not know.

    The interpreter tells them in the report that `sys._debugmallocstats` prints; here it writes it
    to memory. One that does not is asked for their number.
    """

    def by_number() -> int:
        return sys.getallocatedblocks() * BLOCK_BYTES

    try:
        write = ctypes.pythonapi._PyObject_DebugMallocStats
        library = ctypes.CDLL(None)
        opened, closed, freed = library.open_memstream, library.fclose, library.free
    except (OSError, AttributeError):
        return by_number
    write.argtypes = closed.argtypes = freed.argtypes = (ctypes.c_void_p,)
    opened.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    opened.restype = ctypes.c_void_p

    def as_told() -> int:
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = opened(ctypes.byref(text), ctypes.byref(size))
        if not stream:
            return by_number()
        write(stream)
        closed(stream)
        try:
            found = _TOLD.search(ctypes.string_at(text, size.value))
        finally:
            freed(text)
        return by_number() if found is None else int(found[1].replace(b",", b""))

    return as_told


_SMALL = _small_blocks()


def in_use_bytes() -> int | None:
    """Handed out and not given back, by the C library and by the interpreter; None where the former
    does not say. Memory that was mapped otherwise (a shared arena, libraries' code) is not in it.
    Takes 20 us in a small process, 40 in a worker."""
    if _ASK is None:
        return None
    heap = _ASK()
    return int(heap.uordblks + heap.hblkhd) + _SMALL()


def kept_bytes() -> int | None:
    """Freed, and kept by the C library; None where it does not say."""
    return None if _ASK is None else int(_ASK().fordblks)
