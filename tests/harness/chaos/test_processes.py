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
    # In a process that does nothing else: other tests' threads are in this one.
    script = """
import sys
input()
file = open(sys.argv[1], "w")
print("open", flush=True)
input()
file.close()
print("closed", flush=True)
input()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        found = []
        for word in ("open\n", "closed\n"):
            print(file=child.stdin, flush=True)
            assert child.stdout.readline() == word
            found.append(held_by(child.pid))
        assert found[0].descriptors == found[1].descriptors + 1
        assert found[0].rss_bytes > 1 << 20
    finally:
        child.communicate("\n")


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
