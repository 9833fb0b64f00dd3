from __future__ import annotations

from dataclasses import dataclass

import pytest

from harness.accounts import DecodePool, PrefillPool
from harness.policies.base import NoRoute
from harness.policies.static import Balanced, Homogeneous, Naive, PrfaasStatic
from harness.profiles import load_profile
from harness.view import View
from workloads.request import Request

H200, H20 = load_profile("1t-h200"), load_profile("1t-h20")


@dataclass
class Held:
    """A directory in which each cluster holds a fixed prefix of every prompt."""

    tokens: dict[str, int]

    def hit_tokens(self, cluster: str, request: Request) -> int:
        return min(self.tokens.get(cluster, 0), request.input_tokens - 1)

    def instance_tokens(self, instance: str, request: Request) -> int:
        return self.hit_tokens(instance.partition("-")[0], request)

    def held_tokens(self, cluster: str, request: Request) -> int:
        return self.tokens.get(cluster, 0)

    def instance_held_tokens(self, instance: str, request: Request) -> int:
        return self.held_tokens(instance.partition("-")[0], request)

    def holders(self, cluster: str, request: Request, most: int) -> list[tuple[str, int]]:
        return []


def view_of(n_prfaas: int = 2, n_prefill: int = 2, n_decode: int = 2) -> View:
    prfaas, pd, decode = PrefillPool("prfaas", H200), PrefillPool("pd", H20), DecodePool("pd")
    for i in range(n_prfaas):
        prfaas.add(f"prfaas-{i}")
    for i in range(n_prefill):
        pd.add(f"pd-{i}")
    for i in range(n_decode):
        decode.add(f"pd-d{i}")
    return View(0.0, {"prfaas": prfaas, "pd": pd}, {"pd": decode}, {})


def request_of(tokens: int, number: int = 0) -> Request:
    return Request(number, 0.0, tokens, 1024, (1,), tokens)


def test_threshold_is_strict_and_work_is_predicted_from_the_clusters_profile():
    policy, view = PrfaasStatic(19_400), view_of()
    local = policy.route(request_of(19_400), view)
    remote = policy.route(request_of(19_401), view)
    assert (local.prefill_cluster, remote.prefill_cluster) == ("pd", "prfaas")
    assert local.predicted_work_s == H20.prefill_s(19_400)
    assert remote.predicted_work_s == H200.prefill_s(19_401)
    assert local.decode_cluster == remote.decode_cluster == "pd"
    assert dict(remote.alternatives) == {"prfaas": pytest.approx(H200.prefill_s(19_401))}
    view.explains = True
    explained = policy.route(request_of(19_401), view)
    assert explained.prefill_key == remote.prefill_key
    assert dict(explained.alternatives) == {
        "prfaas": pytest.approx(H200.prefill_s(19_401)),
        "pd": pytest.approx(H20.prefill_s(19_401)),
    }


def test_only_the_incremental_length_counts():
    policy, view = PrfaasStatic(19_400), view_of()
    view.directory = Held({"pd": 5_000, "prfaas": 2_048})
    inside = policy.route(request_of(24_400), view)
    assert (inside.prefill_cluster, inside.cached_tokens) == ("pd", 5_000)
    assert inside.predicted_work_s == H20.prefill_s(24_400, 5_000)
    outside = policy.route(request_of(24_401), view)
    # Work depends on the cache at the prefill cluster, wire bytes on that at the decode cluster.
    assert (outside.prefill_cluster, outside.cached_tokens, outside.held_tokens) == (
        "prfaas",
        2_048,
        5_000,
    )


def test_a_whole_prompt_hit_still_computes_the_last_token():
    view = view_of()
    view.directory = Held({"pd": 1_000})
    assert Homogeneous().route(request_of(1_000), view).cached_tokens == 999


def test_least_wait_within_a_cluster_and_least_active_for_decode():
    view = view_of()
    view.prefill["prfaas"].assign(0, 0.0, 5.0)
    view.decode["pd"].assign(0, 1)
    decision = Naive().route(request_of(1_000), view)
    assert (decision.prefill_cluster, decision.prefill_key, decision.decode_key) == ("prfaas", 1, 1)


def test_balanced_takes_the_least_wait_whatever_the_length():
    view = view_of()
    for key in (0, 1):
        view.prefill["prfaas"].assign(key, 0.0, 3.0)
        view.prefill["pd"].assign(key, 0.0, 2.0)
    policy = Balanced()
    assert {
        policy.route(request_of(tokens), view).prefill_cluster for tokens in (128, 131_072)
    } == {"pd"}


def test_idle_balanced_shares_by_capacity():
    view, policy = view_of(4, 3, 5), Balanced()
    clusters = [policy.route(request_of(20_000, i), view).prefill_cluster for i in range(10_000)]
    # 4 / T_H200 and 3 / T_H20 at the mean length: 2.470 and 0.703 req/s
    assert clusters.count("prfaas") / 10_000 == pytest.approx(2.470 / 3.174, abs=0.002)


def test_balanced_sustains_the_models_capacity():
    """Work-conserving assignment of the paper's lengths: 3.067 req/s at 4/3 prefill instances."""
    import numpy as np

    from workloads.lengths import TruncatedLogNormal

    lengths = TruncatedLogNormal().sample(np.random.default_rng(5), 40_000, stratified=True)
    view, policy = view_of(4, 3, 5), Balanced()
    rate = 6.0
    for number, tokens in enumerate(lengths.tolist()):
        view.now_s = number / rate
        decision = policy.route(request_of(tokens, number), view)
        pool = view.prefill[decision.prefill_cluster]
        pool.assign(decision.prefill_key, view.now_s, decision.predicted_work_s)
    ends = [
        pool.wait_s(key, 0.0) for pool in view.prefill.values() for key in range(len(pool.names))
    ]
    assert lengths.size / max(ends) == pytest.approx(3.067, rel=0.01)


def test_the_other_side_serves_when_one_is_gone():
    view = view_of(1, 1, 1)
    view.prefill["prfaas"].set_usable(0, False)
    for policy in (PrfaasStatic(100), Balanced()):
        decision = policy.route(request_of(5_000), view)
        assert decision.prefill_cluster == "pd"
        assert "usable" in decision.reason
    view.prefill["pd"].set_usable(0, False)
    for policy in (PrfaasStatic(100), Balanced(), Naive(), Homogeneous()):
        with pytest.raises(NoRoute, match="no usable prefill instance"):
            policy.route(request_of(5_000), view)


def test_no_decode_instance_is_no_route():
    view = view_of()
    for key in (0, 1):
        view.decode["pd"].set_usable(key, False)
    with pytest.raises(NoRoute, match="no usable decode instance in pd"):
        Homogeneous().route(request_of(5_000), view)


def test_a_cluster_without_a_pool_is_no_route():
    view = View(0.0, {}, {}, {})
    with pytest.raises(NoRoute):
        Naive().route(request_of(5_000), view)
