"""Earliest finish, prices, operators' rules and the moving threshold; parameters are checked."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from harness.accounts import DecodePool, PrefillPool
from harness.errors import BadInput
from harness.policies.base import NoRoute
from harness.policies.catalog import _CATALOG, make_policy, policy_names
from harness.policies.operators import LeastLoaded, UncachedThreshold
from harness.policies.parameters import parameters_of
from harness.policies.prfaas import Controls, Prfaas
from harness.policies.priced import Eft, Priced
from harness.ports import LinkSignals
from harness.profiles import load_profile
from harness.scale import Scale
from harness.view import View
from workloads.lengths import TruncatedLogNormal
from workloads.request import Request

H200, H20 = load_profile("1t-h200"), load_profile("1t-h20")
STATIC_T = 19_400


def view_of(n_prfaas: int = 4, n_prefill: int = 3, signals: LinkSignals | None = None) -> View:
    prfaas, pd, decode = PrefillPool("prfaas", H200), PrefillPool("pd", H20), DecodePool("pd")
    for i in range(n_prfaas):
        prfaas.add(f"prfaas-{i}")
    for i in range(n_prefill):
        pd.add(f"pd-{i}")
    decode.add("pd-9")
    links = {("prfaas", "pd"): signals or LinkSignals()}
    return View(0.0, {"prfaas": prfaas, "pd": pd}, {"pd": decode}, links)


def request_of(tokens: int, number: int = 0) -> Request:
    return Request(number, 0.0, tokens, 1024)


def busy(view: View, cluster: str, seconds: float) -> None:
    pool = view.prefill[cluster]
    for key in range(len(pool.names)):
        pool.assign(key, 0.0, seconds)


def test_an_idle_system_offloads_what_is_faster_there() -> None:
    for policy in (Eft(), Priced()):
        assert policy.route(request_of(30_000), view_of()).prefill_cluster == "prfaas"
        assert policy.route(request_of(128), view_of()).prefill_cluster == "prfaas"


def test_sooner_is_not_worth_a_busy_pools_time() -> None:
    view = view_of()
    for key in range(3):
        view.prefill["prfaas"].assign(key, 0.0, 1.0)
    assert Eft().route(request_of(128), view).prefill_cluster == "prfaas"
    assert Priced().route(request_of(128), view).prefill_cluster == "pd"
    assert Priced().route(request_of(30_000), view).prefill_cluster == "prfaas"


def test_when_both_are_busy_comparative_advantage_decides() -> None:
    view = view_of()
    busy(view, "prfaas", 44.0)
    busy(view, "pd", 20.0)
    short, long = request_of(2_000), request_of(100_000)
    assert Eft().route(long, view).prefill_cluster == "pd"
    assert Priced().route(short, view).prefill_cluster == "pd"
    assert Priced().route(long, view).prefill_cluster == "prfaas"


def test_a_pools_load_follows_assignments_and_settling() -> None:
    view = view_of()
    pool = view.prefill["prfaas"]
    assert pool.load(0.0) == (0.0, 0.0)
    pool.assign(0, 0.0, 8.0)
    pool.assign(1, 0.0, 4.0)
    assert pool.load(0.0) == (3.0, 0.5)
    assert pool.load(2.0) == (2.0, 0.5)
    pool.settle(0, 3.0, 8.0, 8.0)
    assert pool.load(3.0) == (0.25, 0.25)
    pool.set_usable(3, False)
    assert pool.load(3.0) == pytest.approx((1 / 3, 1 / 3))
    assert pool.load(5.0) == (0.0, 0.0)


def test_a_scarce_link_raises_the_price_of_bytes() -> None:
    signals = LinkSignals(sampled_s=1.0, rate_bps=8e9)
    view = view_of(signals=signals)
    request = request_of(25_000)
    decision = Priced().route(request, view)
    assert decision.prefill_cluster == "prfaas"
    assert decision.predicted_bytes == H200.kv_bytes(25_000)
    path = view.path("prfaas", "pd")
    assert path is not None
    path.outstanding_bytes = 10e9  # ten seconds of link
    assert Priced().route(request, view).prefill_cluster == "pd"
    signals.rate_bps = 100e9
    assert Priced().route(request, view).prefill_cluster == "prfaas"
    signals.rate_bps = 0.0
    assert Priced().route(request, view).prefill_cluster == "pd"


def test_least_loaded_keeps_its_transfer_budget() -> None:
    signals = LinkSignals(sampled_s=1.0, rate_bps=8e9, min_rtt_s=0.0)
    view = view_of(signals=signals)
    request = request_of(60_000)  # 1.16 s at 8 Gbps
    assert LeastLoaded(transfer_budget_s=2.0).route(request, view).prefill_cluster == "prfaas"
    late = LeastLoaded(transfer_budget_s=1.0).route(request, view)
    assert (late.prefill_cluster, late.reason) == ("pd", "transfer over budget")
    busy(view, "prfaas", 1.0)
    assert LeastLoaded().route(request_of(1_000), view).prefill_cluster == "pd"


def test_uncached_threshold_looks_at_nothing_else() -> None:
    view = view_of()
    busy(view, "prfaas", 1e6)
    policy = UncachedThreshold(uncached_tokens=512)
    assert policy.route(request_of(513), view).prefill_cluster == "prfaas"
    assert policy.route(request_of(512), view).prefill_cluster == "pd"


def test_prfaas_reads_its_controls_and_queues_decide_within_the_band() -> None:
    controls = Controls(STATIC_T)
    plain = Prfaas(controls, band=1.0)
    view = view_of()
    assert plain.route(request_of(19_401), view).prefill_cluster == "prfaas"
    controls.congestion = 2.0
    decision = plain.route(request_of(19_401), view)
    assert (decision.prefill_cluster, decision.threshold_tokens) == ("pd", 38_800.0)
    controls.congestion = 1.0
    banded = Prfaas(controls, band=3.0)
    busy(view, "prfaas", 30.0)
    near, far = banded.route(request_of(20_000), view), banded.route(request_of(60_000), view)
    assert (near.prefill_cluster, far.prefill_cluster) == ("pd", "prfaas")
    assert near.reason == "near threshold: cheaper local"


@pytest.mark.parametrize("name", ["priced", "eft", "least-loaded", "uncached-threshold", "prfaas"])
def test_either_side_serves_alone(name: str) -> None:
    policy = make_policy(name, STATIC_T, {})
    assert policy.route(request_of(50_000), view_of(n_prfaas=0)).prefill_cluster == "pd"
    assert policy.route(request_of(500), view_of(n_prefill=0)).prefill_cluster == "prfaas"
    with pytest.raises(NoRoute):
        policy.route(request_of(500), view_of(0, 0))


def test_parameters_are_named_typed_bounded_and_converted() -> None:
    assert policy_names() == [
        "balanced", "eft", "homogeneous", "least-loaded", "naive", "prfaas", "prfaas-static",
        "priced", "uncached-threshold",
    ]  # fmt: skip
    scaled = make_policy("priced", 0, {"local_price_per_s": 0.5}, Scale(time_scale=8.0))
    assert isinstance(scaled, Priced)
    assert (scaled.prices.local_price_per_s, scaled.prices.remote_busy_price) == (4.0, 0.9)
    late = make_policy("least-loaded", 0, {"transfer_budget_s": 4}, Scale(time_scale=8.0))
    assert isinstance(late, LeastLoaded) and late.transfer_budget_s == 0.5
    for parameters, message in [
        ({"margin": 1}, "parameter 'margin' is unknown .it has: affine, copies, link_price"),
        ({"link_price_per_s": "1"}, "parameter link_price_per_s: found '1', needs a number"),
        ({"link_price_per_s": -1}, "parameter link_price_per_s: found -1, needs at least 0"),
        ({"copies": 1}, "parameter copies: found 1, needs true or false"),
    ]:
        with pytest.raises(BadInput, match=message):
            make_policy("priced", 0, parameters)
    with pytest.raises(BadInput, match="policy 'best' is unknown"):
        make_policy("best", 0, {})
    for name, (kinds, _) in _CATALOG.items():
        for each in (each for kind in kinds for each in parameters_of(kind)):
            assert each.metadata["about"] and make_policy(name, 1.0, {each.name: each.default})


def fifo(name: str, rate: float, seeds: range, n: int = 30_000) -> tuple[float, float]:
    """Mean and P90 TTFT over seeds: the policy over FIFO pools whose work is as predicted."""
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        lengths = TruncatedLogNormal().sample(rng, n).tolist()
        arrivals = np.cumsum(rng.exponential(1 / rate, n)).tolist()
        policy, view = make_policy(name, STATIC_T, {}), view_of()
        ends: list[tuple[float, str, int]] = []
        ttfts = []
        for number, (tokens, now_s) in enumerate(zip(lengths, arrivals, strict=True)):
            while ends and ends[0][0] <= now_s:
                end_s, cluster, key = heapq.heappop(ends)
                view.prefill[cluster].settle(key, end_s, 0.0, 0.0)
            view.now_s = now_s
            decision = policy.route(request_of(tokens, number), view)
            pool, key = view.prefill[decision.prefill_cluster], decision.prefill_key
            pool.assign(key, now_s, decision.predicted_work_s)
            wait_s = pool.wait_s(key, now_s)
            heapq.heappush(ends, (now_s + wait_s, pool.cluster, key))
            ttfts.append(wait_s + (0.08 if pool.cluster == "prfaas" else 0.0))
        measured = np.array(ttfts[n // 10 :])
        found.append((measured.mean(), np.quantile(measured, 0.9)))
    mean, p90 = np.mean(found, axis=0)
    return float(mean), float(p90)


@pytest.mark.parametrize(("rate", "gain"), [(1.0, 0.0), (2.0, 0.0), (2.8, 0.14), (3.15, 0.20)])
def test_priced_beats_the_static_threshold(rate: float, gain: float) -> None:
    """The paper's workload, instances and split, the same requests for both."""
    static, priced = (fifo(name, rate, range(3, 4)) for name in ("prfaas-static", "priced"))
    assert priced[0] <= (1 - gain) * static[0]
    assert priced[1] <= (1 - gain) * static[1]
