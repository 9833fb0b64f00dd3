"""The published figures of arXiv:2604.15039 beside what this planner computes for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from harness.experiment import load_experiment
from harness.planner.experiment import deployment_of
from harness.planner.link import IDEAL_LINK
from harness.planner.model import Capacity, Deployment, Reading, Shape, Split, capacity
from harness.planner.search import search
from harness.planner.ttft import unloaded_ttft
from harness.profiles import load_profile

MODELS = (
    "kimi-linear-48b",
    "mimo-v2-flash",
    "qwen3.5-397b",
    "ring-2.5-1t",
    "minimax-m2.5",
    "qwen3-235b",
)
GPUS_PER_INSTANCE = 8
#: (model, tokens, published Tbit/s of 512 H200)
EGRESS_512_H200 = (
    ("minimax-m2.5", 32_000, 3.84),
    ("qwen3-235b", 32_000, 2.13),
    ("ring-2.5-1t", 32_000, 0.166),
    ("ring-2.5-1t", 130_000, 0.093),
)
THROUGHPUT_LIMIT = 0.01
TTFT_LIMIT = 0.04
SIZE_LIMIT_MIB = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One published cell. `limit` is what this project promises of `difference`, in its unit:
    a share of the paper's value, or the cell's own unit when `absolute`; None promises nothing."""

    table: str
    cell: str
    unit: str
    paper: float
    ours: float
    limit: float | None = None
    absolute: bool = False
    note: str = ""

    @property
    def difference(self) -> float:
        return self.ours - self.paper if self.absolute else self.ours / self.paper - 1

    @property
    def verdict(self) -> Literal["ok", "off", ""]:
        if self.limit is None:
            return ""
        return "ok" if abs(self.difference) <= self.limit else "off"


def reproduce() -> tuple[Row, ...]:
    """Every published figure that the model covers, in the order of the paper."""
    deployment = deployment_of(load_experiment("paper"))
    return (
        *_table_3(),
        *_egress_512(),
        *_table_5(),
        *_table_6(deployment),
    )


def _kilo(tokens: float) -> str:
    return {1024: "1K", 8192: "8K", 32_000: "32K", 130_000: "128K"}[int(tokens)]


def _table_3() -> Iterator[Row]:
    for model in MODELS:
        profile = load_profile(f"{model}-h200")
        for tokens, gbps in profile.published["phi_gbps"]:
            yield Row(
                "Table 3",
                f"Phi_kv {model} {_kilo(tokens)}",
                "Gbit/s",
                gbps,
                profile.phi_gbps(tokens),
                THROUGHPUT_LIMIT,
                note="its T_prefill is derived from this cell",
            )


def _egress_512() -> Iterator[Row]:
    instances = 512 // GPUS_PER_INSTANCE
    for model, tokens, tbps in EGRESS_512_H200:
        phi_gbps = load_profile(f"{model}-h200").phi_gbps(tokens)
        yield Row(
            "512 H200",
            f"egress {model} {_kilo(tokens)}",
            "Tbit/s",
            tbps,
            instances * phi_gbps / 1000,
            THROUGHPUT_LIMIT,
            note="Eq 2",
        )


def _table_5() -> Iterator[Row]:
    profile = load_profile("1t-h200")
    for tokens, mib in profile.published["cache_mib"]:
        size_mib = profile.kv_bytes(tokens) / 2**20
        yield Row(
            "Table 5", f"S_kv {_kilo(tokens)}", "MiB", mib, size_mib, SIZE_LIMIT_MIB, absolute=True
        )
    for tokens, seconds in profile.prefill_points:
        yield Row(
            "Table 5",
            f"T_prefill {_kilo(tokens)}",
            "s",
            seconds,
            profile.prefill_s(tokens),
            note="one quadratic through all four points",
        )
    for tokens, gbps in profile.published["phi_gbps"]:
        yield Row("Table 5", f"Phi_kv {_kilo(tokens)}", "Gbit/s", gbps, profile.phi_gbps(tokens))


def _table_6(deployment: Deployment) -> Iterator[Row]:
    reading = Reading.PUBLISHED
    best, _ = search(deployment, 4, 8, reading)
    homogeneous = capacity(deployment, Shape.HOMOGENEOUS, Split(0, 9, 3), None, reading)
    naive = capacity(deployment, Shape.NAIVE, Split(4, 0, 8), None, reading)
    assert best.threshold_tokens is not None

    def throughput(cell: str, paper: float, ours: float | None, note: str = "") -> Row:
        assert ours is not None
        return Row("Table 6", cell, "req/s", paper, ours, THROUGHPUT_LIMIT, note=note)

    yield Row("Table 6", "threshold t", "tokens", 19_400, best.threshold_tokens, 0.0)
    yield Row("Table 6", "PrfaaS N_p", "instances", 3, best.split.n_prefill, 0.0)
    yield Row("Table 6", "PrfaaS N_d", "instances", 5, best.split.n_decode, 0.0)
    yield from _ttft_rows(deployment, "PrfaaS", best, 2.22, 3.51)
    yield from _ttft_rows(deployment, "homogeneous", homogeneous, 4.44, 9.73)
    yield from _ttft_rows(deployment, "naive", naive, 1.74, 3.51)
    yield throughput("PrfaaS Theta_prfaas", 1.61, best.prfaas_per_s)
    yield throughput("PrfaaS Theta_pd_p", 1.64, best.prefill_per_s)
    yield throughput("PrfaaS Theta_pd_d", 3.91, best.decode_per_s)
    yield throughput("homogeneous Theta_pd_p", 2.11, homogeneous.prefill_per_s, "fitted to it")
    yield throughput("homogeneous Theta_pd_d", 2.35, homogeneous.decode_per_s)
    yield throughput("naive Theta_prfaas", 2.45, naive.prfaas_per_s)
    yield throughput("naive Theta_pd_d", 6.25, naive.decode_per_s)
    yield throughput("PrfaaS Lambda_max", 3.24, best.requests_per_s)
    yield throughput("homogeneous Lambda_max", 2.11, homogeneous.requests_per_s)
    yield throughput("naive Lambda_max", 2.45, naive.requests_per_s)
    ratio, base = 1 / homogeneous.requests_per_s, "to homogeneous"
    yield Row("Table 6", "PrfaaS ratio", "", 1.54, best.requests_per_s * ratio, 0.01, note=base)
    yield Row("Table 6", "naive ratio", "", 1.16, naive.requests_per_s * ratio, 0.01, note=base)
    yield Row("Text", "offloaded requests", "%", 49.6, 100 * best.offloaded_share, 0.01)
    yield Row(
        "Text",
        "mean egress",
        "Gbit/s",
        13,
        best.egress_gbps,
        note="p Lambda_max S_kv(l_long); the paper rounds to whole Gbit/s",
    )


def _ttft_rows(
    deployment: Deployment, name: str, result: Capacity, mean_s: float, p90_s: float
) -> Iterable[Row]:
    ours = unloaded_ttft(result.stages, deployment.lengths, IDEAL_LINK)
    note = "no queue, no link"
    yield Row("Table 6", f"{name} TTFT mean", "s", mean_s, ours.mean_s, TTFT_LIMIT, note=note)
    yield Row("Table 6", f"{name} TTFT P90", "s", p90_s, ours.p90_s, TTFT_LIMIT, note=note)
