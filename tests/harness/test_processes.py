"""A pool of processes leaves none behind, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import Incomplete
from harness.processes import process_pool

#: Far beyond the tests' time limit: a pool that waits for its work fails the test.
LONG_S = 3600.0

OWNER = """
import os, time
from harness.processes import process_pool

if __name__ == "__main__":
    with process_pool(2) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 3600).result()
"""


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_what_is_under_way_is_cut_off_when_the_caller_is_interrupted():
    with pytest.raises(KeyboardInterrupt), process_pool(2) as pool:
        child = pool.submit(os.getpid).result()
        pool.submit(time.sleep, LONG_S)
        pool.submit(time.sleep, LONG_S)
        raise KeyboardInterrupt
    assert ended(child)


def test_a_process_that_is_killed_is_said():
    with pytest.raises(Incomplete, match="was killed"), process_pool(1) as pool:
        child = pool.submit(os.getpid).result()
        under_way = pool.submit(time.sleep, LONG_S)
        os.kill(child, signal.SIGKILL)
        under_way.result()


def test_processes_end_with_an_owner_that_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    while not ended(child):
        time.sleep(0.01)
