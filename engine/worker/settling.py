"""Waiting that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
from typing import Any


async def until_done(future: asyncio.Future[Any]) -> None:
    """Wait for `future`, however often this task is cancelled meanwhile; raises nothing.

    For clean-up that others depend on, bounded by what `future` itself is bounded by. The caller is
    about to re-raise the cancellation that brought it here.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
