"""What the modules in C do when there is no memory: they say so, and go on when there is again.

One allocation after the other fails, each in a new object, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.errors import ExitCode
from native import require

COMMON = """
import _testcapi

def fail_each(make, most):
    for number in range(most):
        work, go_on = make()
        _testcapi.set_nomemory(number, number + 1)
        try:
            work()
        except MemoryError:
            failed.append(number)
        finally:
            _testcapi.remove_mem_hooks()
        go_on()

failed = []
"""

ORDER = """
from harness._ordering import FewestFirst, LeastFirst

def make():
    orders = LeastFirst(), FewestFirst()

    def work():
        for order in orders:
            for _ in range(20):
                order.add()

    def go_on():
        work()
        for order in orders:
            for key in range(len(order)):
                assert order.least() == key
                order.set_usable(key, False)
            assert order.least() == -1

    return work, go_on

fail_each(make, 8)
"""

BATCH = """
from harness.instances._modelled_macro import MacroBatch

class Loop:
    now_s = 0.0

    def time(self):
        return self.now_s

    def call_at(self, when_s, call):
        return self

    def cancel(self):
        pass

class Times:
    bucket_tokens = 8
    by_batch = []

    def step_s(self, batch, context_tokens):
        return 0.25

class Member:
    output_tokens, input_tokens = 3, 5

    def finish(self, runs):
        finished.append(self)

finished = []

def make():
    loop = Loop()
    batch = MacroBatch(loop, Times(), 9)
    members = [Member() for _ in range(20)]

    def work():
        for member in members:
            batch.add(member)
        for _ in range(8):
            batch.pause()
            loop.now_s += 0.1
            batch.resume()
            loop.now_s += 0.3
            batch()

    def go_on():
        batch.resume()
        while batch.active:
            loop.now_s += 1.0
            batch()
        batch.clear()
        finished.clear()
        work()
        assert finished

    return work, go_on

fail_each(make, 60)
"""

CLOCK = """
import asyncio
from harness.clock.loop import VirtualLoop

def make():
    loop = VirtualLoop()
    came = []

    def work():
        for number in range(70):
            loop.call_at(1.0 + number, came.append, number)
            loop.call_soon(came.append, number)

    def go_on():
        came.clear()
        work()
        loop.run_until_complete(asyncio.sleep(100.0))
        assert len(came) >= 140
        loop.close()

    return work, go_on

fail_each(make, 400)
"""

ROWS = """
from results.records import RequestRecord
from results.request_rows import RequestRows

def make():
    rows = RequestRows(lambda: None)
    rows.begin(8, 1 << 20)
    record = RequestRecord(0, 0.0, 1, 1)
    record.token_runs = [(1.0, 0.5, 2)] * 3000

    def work():
        rows.add(record, "prfaas", "capacity")

    def go_on():
        work()
        work()
        assert rows.rows >= 2
        rows.take()

    return work, go_on

fail_each(make, 12)
"""


@pytest.mark.parametrize(
    ("module", "script"),
    [
        pytest.param("harness._ordering", ORDER, id="order"),
        pytest.param("harness.instances._modelled_macro", BATCH, id="batch"),
        pytest.param("harness.clock._timeline", CLOCK, id="clock"),
        pytest.param("results._request_rows", ROWS, id="rows"),
    ],
)
def test_an_allocation_that_fails_is_an_error_and_no_more(module, script):
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi to fail allocations")
    try:
        require(module)
    except ImportError:
        pytest.skip(f"{module} is not built")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", f"{COMMON}{script}\nprint(len(failed))"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONMALLOC": "default"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


ENDLESS_BURST = """
import asyncio, resource, sys
from itertools import count
from harness import execution
from harness.cli.main import main
from harness.replay import replay
from workloads.request import Request

async def served(request, record, origin_s):
    await asyncio.sleep(1)

async def compare(*_):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    burst = (Request(number, 0.0, 1000, 10) for number in count())
    await replay(burst, served, lambda record: None, origin_s=0.0)

execution.compare = compare
sys.exit(main(["run", "paper", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("pure", ["", "1"])
def test_a_burst_past_all_memory_ends_the_simulation_in_one_line(pure, tmp_path):
    # The interpreter itself would crash, or go on for ever, in the errors that come of it.
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ENDLESS_BURST, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PRFAAS_PURE_PYTHON": pure},
        timeout=300,
        check=False,
    )
    assert done.returncode == ExitCode.INCOMPLETE, done.stderr
    said = "no memory left: ended at once, with what was written so far"
    assert done.stderr.splitlines()[-1] == said
