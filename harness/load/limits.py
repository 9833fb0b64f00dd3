"""The process limits that many connections need."""

from __future__ import annotations

import resource

#: Files a client holds besides its connections, with room.
_OTHER_FILES = 128


def raise_open_files() -> int:
    """Raise the soft limit on open files to the hard one. Returns what is allowed now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def shortage(connections: int, allowed: int) -> str:
    """Why so many connections cannot be held under a limit of `allowed` files; "" when they can."""
    if connections + _OTHER_FILES <= allowed:
        return ""
    return (
        f"{connections} connections need {connections + _OTHER_FILES} open files, and this "
        f"process may have {allowed}: raise the hard limit (ulimit -Hn), lower the concurrency, "
        "or spread it over more --processes"
    )
