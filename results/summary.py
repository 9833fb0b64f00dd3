"""The model of summary.json: what a run found, per configuration and phase, with its predictions.

A figure is a `Measured`: the value of this run (`raw`, in the run's own seconds and bytes), the
same in the units of the modelled system (`paper`), and what the throughput model says (`predicted`,
in paper units). The scale factors that lead from raw to paper are in `RunSummary.scale`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


class SummaryError(ValueError):
    """summary.json is missing, malformed, or of a newer version than this code reads."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors from this run's units to paper units; all 1 in `simulate` and `live`.

    time: modelled seconds per run second. tokens: modelled output tokens per recorded output token
    (input lengths are recorded in modelled tokens already). bytes: modelled bytes per byte that
    crossed the link.
    """

    time: float = 1.0
    tokens: float = 1.0
    bytes: float = 1.0

    def seconds(self, raw_s: float | None) -> float | None:
        return None if raw_s is None else raw_s * self.time

    def per_second(self, raw: float | None) -> float | None:
        return None if raw is None else raw / self.time

    def gbps(self, raw_gbps: float | None) -> float | None:
        return None if raw_gbps is None else raw_gbps * self.bytes / self.time


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure. `low`..`high` is its 95 % interval in paper units, over repeats, where there are
    at least two; `n` is the number of samples behind it.
    """

    raw: float | None = None
    paper: float | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0

    @property
    def error(self) -> float | None:
        """paper / predicted - 1; None when either is missing or the prediction is 0."""
        if self.paper is None or not self.predicted:
            return None
        return self.paper / self.predicted - 1.0


NONE = Measured()


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and nearest-rank percentiles of one latency over the requests that succeeded (s)."""

    mean: Measured = NONE
    p50: Measured = NONE
    p90: Measured = NONE
    p99: Measured = NONE


@dataclass(frozen=True, slots=True)
class Counts:
    """offered = succeeded + failed + unsent. The rest are parts of these.

    short: succeeded with fewer tokens than asked. truncated: failed because the stream broke off.
    retried: took more than one attempt. one_chunk: succeeded, but TPOT does not apply.
    """

    offered: int = 0
    succeeded: int = 0
    failed: int = 0
    unsent: int = 0
    short: int = 0
    truncated: int = 0
    retried: int = 0
    one_chunk: int = 0
    offloaded: int = 0
    verified: int = 0
    mismatched: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """Mean seconds (paper units) of the four parts of TTFT; they add up to its mean."""

    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_admission_s: float | None = None


@dataclass(frozen=True, slots=True)
class Egress:
    """Use of the inter-cluster link in the measured window, as counted on the link.

    mean_gbps and peak_gbps are rates; mean_share and peak_share their share (0..1) of the link's
    rate. `peak_window_s` is the averaging window of the peak, in run seconds.
    """

    mean_gbps: Measured = NONE
    peak_gbps: Measured = NONE
    mean_share: Measured = NONE
    peak_share: Measured = NONE
    peak_window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """A steady window in run seconds. Before it is warm-up, after it drain."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase ("capacity", "latency", "load-0.8", ...) of one configuration.

    Rates are requests/s. `window` is None when no steady window was found; then `throughput` is
    empty, and only whole-run figures are given. `goodput` is a share (0..1) of the offered
    requests. `lateness_p99_s` is how late the load generator sent, in run seconds.
    """

    name: str
    counts: Counts = field(default_factory=Counts)
    offered_rate: Measured = NONE
    admitted_rate: Measured = NONE
    achieved_rate: Measured = NONE
    throughput: Measured = NONE
    goodput: Measured = NONE
    ttft: Latency = field(default_factory=Latency)
    tpot: Latency = field(default_factory=Latency)
    e2e: Latency = field(default_factory=Latency)
    ttft_split: Split = field(default_factory=Split)
    egress: Egress = field(default_factory=Egress)
    offloaded_share: Measured = NONE
    window: Window | None = None
    duration_s: float | None = None
    lateness_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConfigurationSummary:
    """One column of the comparison table.

    Instance counts are None where a configuration has no such stage. `capacity` is the throughput
    (requests/s) of the phase named `capacity_phase`; `capacity_ratio` is to homogeneous
    (dimensionless: raw = paper). `zero_queue_ttft` is the TTFT without any queueing (mean and P90).
    `slo_rate` is the highest offered rate at which the SLO holds. `bottleneck` names the stage of
    Eq 6 that binds. `stalled_s`: seconds that the measuring process stood still (it, not its
    workers). `cost` maps named cost figures (with units in the name) to values.
    """

    name: str
    n_prfaas: int | None = None
    n_p: int | None = None
    n_d: int | None = None
    threshold_tokens: float | None = None
    capacity: Measured = NONE
    capacity_ratio: Measured = NONE
    zero_queue_ttft: Latency = field(default_factory=Latency)
    slo_rate: Measured = NONE
    bottleneck: str = ""
    phases: tuple[PhaseSummary, ...] = ()
    pacing_overruns: int = 0
    paced_steps: int = 0
    stalled_s: float = 0.0
    cost: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def phase(self, name: str) -> PhaseSummary | None:
        return next((phase for phase in self.phases if phase.name == name), None)


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """What stood between the clusters. `backend` says which emulation ran (netem, tbf, relay,
    fluid, ...); rate and round trip are in run units, `paper_rate_gbps` in paper units.
    """

    backend: str = ""
    rate_gbps: float | None = None
    paper_rate_gbps: float | None = None
    rtt_s: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class SloSummary:
    """Limits in paper units; None is no limit. `tokens_per_s` is 1 / TPOT limit."""

    ttft_s: float | None = None
    tokens_per_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """summary.json. `latency_phase` and `load_rate` (paper units, requests/s) say at which common
    offered rate the latency rows of the table were measured. `verdict` is "ok", or why the numbers
    are not to be trusted (client-limited, pacing overruns, mismatched tokens, interrupted).
    """

    name: str
    mode: str
    configurations: tuple[ConfigurationSummary, ...]
    schema_version: int = SCHEMA_VERSION
    scale: Scale = field(default_factory=Scale)
    link: LinkSummary = field(default_factory=LinkSummary)
    slo: SloSummary = field(default_factory=SloSummary)
    latency_phase: str = "latency"
    capacity_phase: str = "capacity"
    load_rate: float | None = None
    seed: int | None = None
    commit: str = ""
    model: str = ""
    workload: str = ""
    host: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    verdict: str = "ok"
    warnings: tuple[str, ...] = ()
    command: str = ""
    duration_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def configuration(self, name: str) -> ConfigurationSummary | None:
        return next((each for each in self.configurations if each.name == name), None)


def to_json(summary: RunSummary) -> str:
    """Indented JSON with keys in declaration order; no key depends on the wall clock."""
    return json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n"


def _pick(cls: type, data: Mapping[str, Any], **made: Any) -> Any:
    """`cls` from those keys of `data` that it knows; keys of newer versions are left out."""
    known = {each.name for each in fields(cls)}
    return cls(**{key: value for key, value in data.items() if key in known} | made)


def _latency(data: Mapping[str, Any]) -> Latency:
    return Latency(**{name: _pick(Measured, value) for name, value in data.items()})


def _measured(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: _pick(Measured, data[name]) for name in names if name in data}


def _phase(data: Mapping[str, Any]) -> PhaseSummary:
    rates = ("offered_rate", "admitted_rate", "achieved_rate", "throughput", "goodput")
    made: dict[str, Any] = _measured(data, *rates, "offloaded_share")
    for name in ("ttft", "tpot", "e2e"):
        if name in data:
            made[name] = _latency(data[name])
    if "counts" in data:
        made["counts"] = _pick(Counts, data["counts"])
    if "ttft_split" in data:
        made["ttft_split"] = _pick(Split, data["ttft_split"])
    if "egress" in data:
        egress = data["egress"]
        parts = _measured(egress, "mean_gbps", "peak_gbps", "mean_share", "peak_share")
        made["egress"] = _pick(Egress, egress, **parts)
    if data.get("window"):
        made["window"] = _pick(Window, data["window"])
    return _pick(PhaseSummary, data, **made)


def _configuration(data: Mapping[str, Any]) -> ConfigurationSummary:
    made: dict[str, Any] = _measured(data, "capacity", "capacity_ratio", "slo_rate")
    if "zero_queue_ttft" in data:
        made["zero_queue_ttft"] = _latency(data["zero_queue_ttft"])
    made["phases"] = tuple(_phase(each) for each in data.get("phases", ()))
    made["notes"] = tuple(data.get("notes", ()))
    return _pick(ConfigurationSummary, data, **made)


def from_json(text: str, where: str = "summary.json") -> RunSummary:
    """The inverse of `to_json`, of this or any older version. Raises SummaryError."""
    try:
        data = json.loads(text)
        version = int(data["schema_version"])
        if version > SCHEMA_VERSION:
            raise SummaryError(
                f"{where}: schema version {version} is newer than the {SCHEMA_VERSION} this "
                "program reads; update it"
            )
        made: dict[str, Any] = {
            "configurations": tuple(_configuration(each) for each in data["configurations"]),
            "warnings": tuple(data.get("warnings", ())),
        }
        for name, cls in (("scale", Scale), ("link", LinkSummary), ("slo", SloSummary)):
            if name in data:
                made[name] = _pick(cls, data[name])
        summary: RunSummary = _pick(RunSummary, data, **made)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise SummaryError(f"{where}: not a run summary ({error!r})") from error
    return summary


def _absent(directory: Path, path: Path, error: OSError) -> str:
    """Why a summary cannot be read, by what is there instead."""
    if not directory.is_dir():
        what = "not a" if directory.exists() else "no such"
        return f"{directory}: {what} directory; name a run's"
    if path.exists():
        return f"{path}: {error.strerror}"
    if (directory / "run.json").exists():
        places = [directory, *sorted(directory.glob("client-*"))]
        held = [str(each) for each in places if (each / "requests.parquet").exists()]
        return f"{directory}: the run ended before its summary was written; " + (
            f"what it recorded can still be read (`prfaas results query {' '.join(held)} ...`)"
            if held
            else "it has recorded nothing"
        )
    return f"{directory}: not a run directory: no run.json and no summary.json in it"


def read(directory: Path) -> RunSummary:
    """The summary of a run directory. Raises SummaryError when there is none."""
    path = directory / "summary.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise SummaryError(_absent(directory, path, error)) from error
    return from_json(text, str(path))
