"""Pools of processes that end with their caller: on a failure, on Ctrl-C, and when it is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from engine.worker.lifeline import die_with_parent
from harness.errors import Incomplete


@contextmanager
def process_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `jobs` processes. What is under way when the block is left by an exception is cut
    off, not waited for. Raises Incomplete when a process of the pool dies.
    """
    others = set(multiprocessing.active_children())
    # Spawned: a forked child would inherit the locks of threads that it does not have.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _tie_to_owner, (os.getpid(),))
    try:
        yield pool
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise Incomplete(
                "a process of the pool was killed (out of memory?); fewer --jobs may do"
            ) from error
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tie_to_owner(owner: int) -> None:
    """In a process of the pool, which waits on a pipe that its siblings hold open, too, and so
    would not notice that its owner was killed. Ctrl-C reaches the whole process group; only the
    owner speaks of it.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    die_with_parent(owner)
