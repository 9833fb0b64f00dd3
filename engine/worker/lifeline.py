"""Ties a process to its parent, so that a killed owner leaves no orphan."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """SIGTERM when the parent ends. `parent` is its pid where known: one that has ended before this
    call would send no signal, so then the process exits here.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != expected:
        os._exit(1)
