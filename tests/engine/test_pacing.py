"""Pacing: curves, the cached-token rule, the absolute timeline and its overruns."""

from __future__ import annotations

import json
import time

import pytest

from engine.cache.pool import HybridPool
from engine.pacing import (
    Curve,
    InputError,
    Pacing,
    Quadratic,
    Timeline,
    layer_due_s,
    sleep_until,
)
from engine.prefill_time import MeasuredTime, PacedTime
from engine.sequence import Sequence

SPEC = {
    "prefill": {"quadratic_s": [0.383401, 4.254469e-5, 8.793075e-11]},
    "decode": {"step_s": [[1, 0.02], [20, 0.03]], "max_batch": 20, "phases": 4},
}


def test_reads_a_profile():
    pacing = Pacing.from_json(SPEC)
    assert pacing.prefill_s(32_000) == pytest.approx(1.8349, abs=1e-4)
    # T(l) - T(c) + T(0): the fixed part is paid whatever is cached.
    assert pacing.prefill_s(32_000, 32_000) == pytest.approx(0.383401)
    assert pacing.decode_step_s(1) == 0.02
    assert pacing.decode_step_s(10) == pytest.approx(0.02 + 9 / 19 * 0.01)
    assert (pacing.max_batch, pacing.phases) == (20, 4)


def test_curves_go_on_beyond_their_ends():
    curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 3.0)))
    assert [curve(x) for x in (0, 10, 15, 20, 30, 60)] == [0.0, 1.0, 1.5, 2.0, 2.5, 4.0]
    assert Curve(((1.0, 0.5),))(99) == 0.5
    assert Quadratic(1, 2, 3)(2) == 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefil": {}}, "pacing: unknown key 'prefil'"),
        ({"prefill": {}}, "pacing.prefill: needs quadratic_s or points"),
        ({"prefill": {"quadratic_s": [1, 2]}}, "three numbers would do"),
        ({"prefill": {"points": [[5, 1], [5, 2]]}}, "must ascend"),
        ({"decode": {"step_s": 1}}, "pacing.decode: max_batch is missing"),
        ({"decode": {"step_s": "x", "max_batch": 1}}, "'x' is not a number"),
        ({"decode": {"step_s": 1, "max_batch": 0}}, "a whole number >= 1 would do"),
    ],
)
def test_refuses_what_it_does_not_understand(change, message):
    with pytest.raises(InputError, match=message):
        Pacing.from_json({**SPEC, **change})


def test_reads_a_file_and_names_it_in_errors(tmp_path):
    path = tmp_path / "pace.json"
    path.write_text(json.dumps(SPEC))
    assert Pacing.read(path) == Pacing.from_json(SPEC)
    path.write_text("{")
    with pytest.raises(InputError, match=r"pace\.json"):
        Pacing.read(path)


def test_queued_jobs_chain_on_the_modelled_ends():
    line = Timeline()
    assert line.end(line.begin(100.0, queued=False), 1.0) == 101.0
    # The loop woke 3 ms late, but the next job was queued: it starts where the last one ended.
    start = line.begin(101.003, queued=True)
    assert (start, line.end(start, 1.0)) == (101.0, 102.0)
    assert line.begin(105.0, queued=False) == 105.0


def test_late_computing_is_an_overrun_and_does_not_move_the_timeline():
    line = Timeline()
    end = line.end(line.begin(10.0, False), 1.0)
    assert line.judge(end, 1.0, computed_s=11.5) == 1.5
    start = line.begin(11.5, queued=True)
    end = line.end(start, 1.0)
    assert (start, end, line.judge(end, 1.0, computed_s=12.015)) == (11.0, 12.0, 0.0)
    assert (line.overruns.jobs, line.overruns.count, line.overruns.worst) == (2, 1, 1.5)


def test_layers_become_available_evenly():
    assert [layer_due_s(10.0, 2.0, layer, 4) for layer in range(4)] == [10.5, 11.0, 11.5, 12.0]


async def test_sleep_never_wakes_early():
    for delay_s in (0.0004, 0.0011, 0.0026):
        when_s = time.monotonic() + delay_s
        await sleep_until(when_s)
        assert time.monotonic() >= when_s


def test_chunks_cost_what_the_whole_prompt_costs():
    pacing = Pacing.from_json(
        {
            "prefill": {"quadratic_s": [0.5, 1e-3, 1e-6]},
            "decode": {"step_s": 0.01, "max_batch": 4},
        }
    )
    times = PacedTime(pacing)
    for cached in (0, 640, 3000):
        sequence = Sequence("r", [1] * 100, 1, system_tokens=6400, cached_tokens=cached)
        whole_s = times.left_s(sequence)
        assert whole_s == pytest.approx(pacing.prefill_s(6400, cached))
        sequence.lease = HybridPool(16, 4, 10).acquire([], 100)
        sequence.computed = 40
        done_s = times.chunk_s(sequence, 0, 40)
        assert done_s + times.left_s(sequence) == pytest.approx(whole_s)
        assert times.left_s(sequence) == pytest.approx(
            times.chunk_s(sequence, 40, 70) + times.chunk_s(sequence, 70, 100)
        )


def test_without_pacing_work_is_told_by_the_speed_so_far():
    times = MeasuredTime()
    long, short = Sequence("long", [1] * 200, 1), Sequence("short", [1] * 50, 1)
    assert times.left_s(long) > times.left_s(short) > 0.0
    times.learn(100, 2.0)
    times.learn(300, 2.0)
    assert times.left_s(long) == pytest.approx(2.0)
    long.computed = 150
    assert times.left_s(long) == pytest.approx(0.5)
    known = Sequence("known", [1] * 100, 1, system_tokens=6400, cached_tokens=3200)
    assert times.left_s(known) == pytest.approx(0.5)
