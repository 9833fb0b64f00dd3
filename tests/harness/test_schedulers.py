"""The threshold follows the link without flapping; roles follow the traffic and never run out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from harness import clock
from harness.experiment import load_experiment
from harness.fleets.modelled import build_fleet, fluid_links
from harness.planner.experiment import deployment_of
from harness.policies.parameters import build
from harness.policies.prfaas import Controls
from harness.ports import LinkSignals, PrefillJob, Role
from harness.scale import UNSCALED, Scale
from harness.schedulers.long_term import LongTerm, LongTermRules
from harness.schedulers.roles import Roles
from harness.schedulers.short_term import ShortTerm, ShortTermRules
from harness.schedulers.traffic import Traffic, TrafficWindow
from harness.schedulers.trend import as_of
from harness.topology import PD, PRFAAS, build_view, instance_specs
from harness.view import View
from workloads.lengths import FloatArray, TruncatedLogNormal
from workloads.request import Request

PAPER = load_experiment("paper")
DEPLOYMENT = deployment_of(PAPER)
LENGTHS = tuple(TruncatedLogNormal().sample(np.random.default_rng(1), 4096, True).tolist())
EGRESS = (PRFAAS, PD)


def traffic(rate: float = 3.0, lengths: tuple[int, ...] = LENGTHS) -> Traffic:
    return Traffic(rate, lengths, 1024.0)


def view_of(n_prefill: int, n_decode: int, signals: LinkSignals) -> View:
    full = PAPER.configurations[-1]
    configuration = full.model_copy(update={"n_prefill": n_prefill, "n_decode": n_decode})
    profiles = {PRFAAS: DEPLOYMENT.remote, PD: DEPLOYMENT.local}
    return build_view(instance_specs(PAPER, configuration), profiles, {EGRESS: signals})


def short_term(
    signals: LinkSignals, controls: Controls, rules: ShortTermRules = ShortTermRules()
) -> ShortTerm:
    view = view_of(3, 5, signals)
    return ShortTerm(rules, controls, view, EGRESS, DEPLOYMENT, lambda now_s: None, UNSCALED)


def test_near_saturation_the_threshold_rises_and_falls_back_with_hysteresis() -> None:
    signals, controls = LinkSignals(1.0, 8e9, 0.95), Controls(20_000)
    scheduler = short_term(signals, controls)
    for second in range(5):
        scheduler.look(second)
    assert controls.scarce
    assert controls.in_force_tokens == pytest.approx(20_000 * 1.1**5)
    risen = controls.in_force_tokens
    signals.utilisation = 0.85  # between the levels: nothing moves
    for second in range(5, 50):
        scheduler.look(second)
    assert controls.scarce and controls.in_force_tokens == risen
    signals.utilisation = 0.5
    for second in range(50, 100):
        scheduler.look(second)
    assert (controls.scarce, controls.congestion) == (False, 1.0)


@pytest.mark.parametrize("signs", [{"rtt_s": 0.3, "min_rtt_s": 0.01}, {"loss": 0.05}])
def test_queueing_delay_and_retransmits_count_as_saturation(signs: dict[str, float]) -> None:
    controls = Controls(20_000)
    short_term(LinkSignals(1.0, 8e9, 0.1, **signs), controls).look(0.0)
    assert controls.scarce and controls.in_force_tokens == pytest.approx(22_000)


def test_a_backlog_alone_makes_it_scarce_and_the_rise_is_bounded() -> None:
    signals, controls = LinkSignals(1.0, 8e9, 0.1, backlog_bytes=3e9), Controls(20_000)
    scheduler = short_term(signals, controls)
    for second in range(100):
        scheduler.look(second)
    assert controls.congestion == 4.0


@pytest.mark.parametrize("start", [5_000.0, 60_000.0])
def test_the_search_finds_the_planned_threshold_from_what_is_seen(start: float) -> None:
    signals, controls, said = LinkSignals(1.0, 95.6e9, 0.1), Controls(start), []
    scheduler = ShortTerm(
        ShortTermRules(), controls, view_of(3, 5, signals), EGRESS, DEPLOYMENT,
        lambda now_s: traffic(), UNSCALED, said.append,
    )  # fmt: skip
    scheduler.look(60.0)
    assert controls.threshold_tokens == pytest.approx(19_600, abs=400)
    assert said == [f"t {start:.0f} -> {controls.threshold_tokens:.0f}"]
    # At 8 Gbps (7.65 of payload) the planner's own threshold is 25,300; 5 % are kept in reserve.
    signals.rate_bps = 7.65e9
    scheduler.look(61.0)
    assert 25_300 < controls.threshold_tokens < 27_500


def test_bandwidth_is_converted_to_the_modelled_systems() -> None:
    """Emulated: eight times as fast, a thousandth of the bytes."""
    signals = LinkSignals(1.0, rate_bps=100e9 * 8 / 1000)
    view = view_of(3, 5, signals)
    view.byte_scale = 1000.0
    scheduler = ShortTerm(
        ShortTermRules(), Controls(1.0), view, EGRESS, DEPLOYMENT,
        lambda now_s: None, Scale(8.0, 64, 1000.0),
    )  # fmt: skip
    assert scheduler.bandwidth_gbps() == pytest.approx(100.0)


def test_the_window_forgets_and_knows_its_rate() -> None:
    window = TrafficWindow(10.0)
    assert window.traffic(0.0) is None
    for i in range(41):
        window.note(i * 0.5, i, 100)
    seen = window.traffic(20.0)
    assert seen is not None
    assert seen.incremental_tokens == tuple(range(20, 41))
    assert seen.request_rate == pytest.approx(2.1)


STEADY = TruncatedLogNormal(9.0, 0.5, 1, 1_000_000)


def a_window_of(factor: Callable[[float], float]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(times, lengths, what the lengths would be without `factor` of time) of 2,400 s at 4/s."""
    times = np.arange(0.0, 2400.0, 0.25)
    plain = STEADY.sample(np.random.default_rng(1), len(times), True).astype(float)
    return times, plain * [factor(time) for time in times.tolist()], plain


def test_drifting_lengths_are_moved_to_now() -> None:
    """They grow e-fold in two hours: a plain mean of the window is 15 % behind."""
    times, seen, plain = a_window_of(lambda time_s: float(np.exp(time_s / 7200)))
    now = as_of(2400.0, times, seen, 600.0, 2.0)
    assert len(now) == len(seen)
    assert now.mean() == pytest.approx(plain.mean() * np.exp(2400 / 7200), rel=0.02)
    assert seen.mean() < 0.87 * plain.mean() * np.exp(2400 / 7200)
    assert as_of(240_000.0, times, seen, 600.0, 2.0).max() <= seen.max()


def test_steady_lengths_stay_as_they_are() -> None:
    times, seen, _ = a_window_of(lambda time_s: 1.0)
    assert as_of(2400.0, times, seen, 600.0, 2.0).tolist() == seen.tolist()


@pytest.mark.parametrize("jump_s", [600.0, 1200.0, 1800.0, 2200.0])
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_after_a_jump_lengths_from_before_it_do_not_count(jump_s: float, factor: float) -> None:
    times, seen, _ = a_window_of(lambda time_s: factor if time_s >= jump_s else 1.0)
    now = as_of(2400.0, times, seen, 600.0, 2.0)
    assert len(now) == pytest.approx(4 * max(600.0, 2400.0 - jump_s), abs=40)
    assert now.tolist() == seen[-len(now) :].tolist()


def test_fewer_cached_prompts_are_no_longer_prompts() -> None:
    """An increment in seven is next to nothing at first, none at the end; prompts stay the same."""
    times, seen, _ = a_window_of(lambda time_s: 1.0)
    cached = np.random.default_rng(2).random(len(times)) < 0.15 * (1.0 - times / 2400.0)
    now = as_of(2400.0, times, np.where(cached, 1.0, seen), 600.0, 2.0)
    assert now.mean() == pytest.approx(seen.mean(), rel=0.05)


def test_lengths_that_come_together_are_alike_by_chance() -> None:
    """Sixty requests at a time about one document: a sixtieth as many independent lengths."""
    times = np.arange(0.0, 2400.0, 0.25)
    moved = 0
    for seed in range(30):
        documents = STEADY.sample(np.random.default_rng(seed), len(times) // 60, True)
        seen = np.repeat(documents, 60).astype(float)
        moved += as_of(2400.0, times, seen, 600.0, 2.0).tolist() != seen.tolist()
    assert moved <= 4  # taken for independent ones they would be moved each time


def test_the_short_window_and_lengths_at_one_time_are_taken_as_they_are() -> None:
    times, seen, _ = a_window_of(lambda time_s: 1.0 + time_s)
    assert as_of(2400.0, times[-2000:], seen[-2000:], 600.0, 2.0).tolist() == seen[-2000:].tolist()
    assert as_of(9.0, np.zeros(9), np.ones(9), 5.0, 2.0).tolist() == []
    assert as_of(9.0, np.zeros(0), np.ones(0), 5.0, 2.0).tolist() == []
    assert as_of(9.0, np.arange(9.0), np.ones(9), 5.0, 2.0).tolist() == [1.0] * 9


def test_a_trend_needs_a_window_longer_than_the_short_one() -> None:
    times, seen, _ = a_window_of(lambda time_s: float(np.exp(time_s / 7200)))
    short, long = TrafficWindow(600.0), TrafficWindow(600.0, 2400.0)
    for time_s, tokens in zip(times.tolist(), np.rint(seen).tolist(), strict=True):
        short.note(time_s, int(tokens), 7)
        long.note(time_s, int(tokens), 7)
    for window, n in ((short, 2400), (long, 9600)):
        traffic = window.traffic(2399.75)
        assert traffic is not None
        assert len(traffic.incremental_tokens) == pytest.approx(n, abs=1)
        assert traffic.request_rate == pytest.approx(4.0, rel=0.01)
        assert traffic.output_tokens == 7


def test_taking_the_last_conversion_back_must_promise_more() -> None:
    async def scenario() -> None:
        rules = {"reversal_s": 0.0, "confirmations": 1, "least_gain": 0.0}
        back = tuple(min(131_072, 2 * tokens) for tokens in LENGTHS)
        for reversal_gain, conversions in ((0.0, 1), (9.0, 0)):
            fleet = Fleet(4, 4, build(LongTermRules, {**rules, "reversal_gain": reversal_gain}))
            assert await fleet.plans(1) == 1 and fleet.roles.counts() == (3, 5)
            fleet.traffic = traffic(3.0, back)
            assert await fleet.long.plan(3600.0) == bool(conversions)

    clock.run(scenario())


RULES = build(LongTermRules, {"conversion_s": 5.0})


class Fleet:
    """A modelled fleet with a long-term scheduler whose traffic is set by hand."""

    def __init__(self, n_prefill: int, n_decode: int, rules: LongTermRules = RULES) -> None:
        configuration = PAPER.configurations[-1].model_copy(
            update={"n_prefill": n_prefill, "n_decode": n_decode}
        )
        profiles = {PRFAAS: DEPLOYMENT.remote, PD: DEPLOYMENT.local}
        specs = instance_specs(PAPER, configuration)
        self.fleet = build_fleet(specs, profiles, fluid_links(PAPER.link))
        self.traffic: Traffic | None = traffic()
        self.said: list[str] = []
        self.roles = Roles(self.fleet.view, self.fleet.instances, PD, rules.conversion_s)
        self.long = LongTerm(
            rules, self.roles, lambda: 4, DEPLOYMENT, lambda now_s: self.traffic,
            UNSCALED, lambda: 100.0, self.said.append,
        )  # fmt: skip

    async def plans(self, n: int) -> int:
        """How many of `n` plans converted an instance."""
        return sum([await self.long.plan(60.0 * i) for i in range(n)])


@pytest.mark.parametrize(("wrong", "conversions"), [((6, 2), 3), ((1, 7), 2), ((3, 5), 0)])
def test_roles_reach_the_planned_split_and_stay(wrong: tuple[int, int], conversions: int) -> None:
    async def scenario() -> None:
        fleet = Fleet(*wrong)
        assert await fleet.plans(16) == conversions
        assert fleet.roles.counts() == (3, 5)
        assert await fleet.plans(10) == 0

    clock.run(scenario())


def test_the_best_split_is_kept_whatever_gain_is_asked_for() -> None:
    async def scenario() -> None:
        eager = build(LongTermRules, {"least_gain": 0.0, "confirmations": 1, "reversal_s": 0.0})
        assert await Fleet(3, 5, eager).plans(6) == 0

    clock.run(scenario())


def test_a_wavering_plan_converts_nothing() -> None:
    async def scenario() -> None:
        fleet = Fleet(3, 5)
        short = tuple(tokens // 8 for tokens in LENGTHS)
        long = tuple(min(131_072, 4 * tokens) for tokens in LENGTHS)
        for i in range(20):
            fleet.traffic = traffic(5.0, short if i % 2 else long)
            assert not await fleet.long.plan(60.0 * i)

    clock.run(scenario())


def test_without_pressure_or_samples_nothing_moves() -> None:
    async def scenario() -> None:
        fleet = Fleet(6, 2)
        fleet.traffic = traffic(0.5)
        assert await fleet.plans(5) == 0
        fleet.traffic = traffic(3.0, LENGTHS[:10])
        assert await fleet.plans(5) == 0
        fleet.traffic = None
        assert await fleet.plans(5) == 0

    clock.run(scenario())


@pytest.mark.parametrize("tokens", [128, 131_072])
def test_never_below_one_instance_a_role(tokens: int) -> None:
    async def scenario() -> None:
        fleet = Fleet(1, 1)
        fleet.traffic = traffic(50.0, (tokens,) * 500)
        assert await fleet.plans(6) == 0
        fleet = Fleet(2, 2)
        fleet.traffic = traffic(50.0, (tokens,) * 500)
        await fleet.plans(12)
        assert min(fleet.roles.counts()) >= 1

    clock.run(scenario())


def test_conversion_drains_costs_its_time_and_moves_between_pools() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        fleet = Fleet(2, 2)
        view, instances = fleet.fleet.view, fleet.fleet.instances
        work = instances["pd-0"].prefill(
            PrefillJob(Request(1, 0.0, 27_000, 1), 1, 0, 0, instances["pd-2"], None, 0.0)
        )
        work_s = DEPLOYMENT.local.prefill_s(27_000)
        assert await fleet.roles.convert("pd-0", Role.DECODE)
        assert loop.time() == pytest.approx(work_s + 5.0)
        assert work.done() and instances["pd-0"].role is Role.DECODE
        assert fleet.roles.counts() == (1, 3)
        assert view.prefill[PD].away == {view.prefill[PD].key_of["pd-0"]}
        assert fleet.roles.least_busy(Role.PREFILL) is None
        assert await fleet.roles.convert("pd-0", Role.PREFILL)
        assert fleet.roles.counts() == (2, 2) and not view.prefill[PD].away

    clock.run(scenario())


def test_an_instance_lost_on_the_way_keeps_out_of_both_pools() -> None:
    async def scenario() -> None:
        fleet = Fleet(2, 2)
        instance = fleet.fleet.instances["pd-0"]
        converting = asyncio.ensure_future(fleet.roles.convert("pd-0", Role.DECODE))
        await asyncio.sleep(0.0)
        instance.crash()
        assert not await converting
        assert fleet.roles.counts() == (1, 2)

    clock.run(scenario())
