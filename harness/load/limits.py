"""The process limits that many connections need."""

from __future__ import annotations

import resource


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
