"""What is read from /proc, and a short soak on real processes."""

import os
import subprocess
import sys

import pytest

from harness.chaos.processes import descendants, held_by


def test_children_and_grandchildren_are_found_and_gone_when_they_end():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    before = descendants(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        found = []
        while len(found) < 2:
            found = [pid for pid in descendants(os.getpid()) if pid not in before]
        assert found[0] == child.pid
        assert held_by(os.getpid()).processes >= 2
    finally:
        child.communicate(b"\n")
    assert [pid for pid in descendants(os.getpid()) if pid not in before] == []


def test_an_open_file_is_a_descriptor(tmp_path):
    before = held_by(os.getpid())
    with (tmp_path / "file").open("w"):
        assert held_by(os.getpid()).descriptors == before.descriptors + 1
    assert held_by(os.getpid()).descriptors == before.descriptors
    assert before.rss_bytes > 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_soak_loses_nothing():
    pytest.importorskip("torch")
    from harness.chaos.emulate import soak

    report = soak(0.5, seed=1)
    assert report.violations == []
    assert report.counts.offered > 20
    assert report.counts.failed == report.cancelled
    assert sum(report.faults.values()) >= 3
    assert report.verified > 0
