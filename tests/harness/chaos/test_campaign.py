"""The fault campaign: seeds that must hold, replays that must agree, bugs that must be noticed."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from harness.accounts import PrefillPool
from harness.chaos import faults
from harness.chaos.campaign import run_plan, run_seed
from harness.chaos.many import find_planted, run_range
from harness.chaos.planted import PLANTED, _instead, planted
from harness.chaos.shrink import shrink

#: Of the 10,000 of `make nightly`: as many as the default suite has time for.
SEEDS = 200


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_no_seed_breaks_an_invariant(first):
    tally = run_range(first, first + 25)
    assert tally.broken == {}
    assert tally.seeds == 25
    # Faults cost attempts, rarely requests: a campaign in which all fail checks nothing.
    assert tally.succeeded > 8 * tally.failed
    assert tally.checks > 800


def test_a_seed_replays_exactly():
    one, other = run_seed(20), run_seed(20)
    assert one.plan == other.plan
    assert one.story == other.story
    assert len(one.story) > 20


def test_every_kind_of_fault_is_drawn():
    drawn = {type(fault) for seed in range(200) for fault in faults.draw(seed).faults}
    kinds = {faults.Crash, faults.Slow, faults.Pause, faults.Pressure, faults.Outage, faults.Flap}
    kinds |= {faults.Collapse, faults.Loss, faults.Noise, faults.DirectoryNoise, faults.Cancel}
    kinds |= {faults.Convert, faults.CrashInConversion, faults.RouterRestart, faults.Burst}
    assert drawn == kinds


def test_peace_is_checked_too():
    plans = [faults.draw(seed) for seed in range(100)]
    quiet = [plan for plan in plans if not plan.faults]
    assert quiet
    outcome = run_plan(quiet[0])
    assert outcome.failed == 0 and outcome.violations == []


def test_at_least_twelve_bugs_can_be_planted():
    assert len(PLANTED) >= 12


@pytest.mark.parametrize(
    ("name", "noticed_by"),
    [
        ("tenant salt dropped", "wrong cache"),
        ("hit depth off by one", None),
        ("retry counted twice", "attempts are counted"),
        ("lost acknowledgement ignored", "progress"),
        ("directory trusted blindly", "wrong cache"),
        ("instance lost in its conversion used", "routing"),
        ("failed prefill stays in the queue's account", "accounts return to zero"),
        ("decode settled twice", "accounts return to zero"),
    ],
)
def test_a_planted_bug_is_noticed(name, noticed_by):
    found = find_planted(name, 100)
    assert found is not None
    seed, violation = found
    assert noticed_by in (None, violation.name)
    # And it was the bug: without it the seed holds.
    assert run_seed(seed).violations == []


def test_a_plant_takes_what_the_code_that_it_replaces_does():
    """Else the call fails, and a campaign notices that whatever the bug is."""
    with pytest.raises(TypeError, match="does not take what settle does"):
        _instead(PrefillPool, "settle", lambda original, pool, key, now_s, error_s: None)


def test_shrinking_keeps_the_breach_and_drops_what_has_no_part_in_it():
    with planted("lost acknowledgement ignored"):
        outcome = run_seed(12)
        small = shrink(outcome)
    assert small.broke(outcome.violations[0].name)
    assert len(small.plan.faults) == 1
    assert len(outcome.plan.faults) >= len(small.plan.faults)


def test_a_plan_without_its_fault_holds():
    with planted("lost acknowledgement ignored"):
        plan = replace(faults.draw(12), faults=())
        assert run_plan(plan).violations == []


def test_a_planted_bug_leaves_nothing_behind():
    """What the control plane remembers of a tenant was computed with the bug."""
    first = find_planted("directory trusted blindly", 1)
    assert first is not None
    find_planted("tenant salt dropped", 1)
    assert find_planted("directory trusted blindly", 1) == first
