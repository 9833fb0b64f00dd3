"""One request's story, from the rows that a run recorded; and a run's scheduling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from harness.errors import BadInput
from results import reader


@dataclass(frozen=True, slots=True)
class Units:
    """Factors from a run's seconds and bytes to those of the modelled system."""

    time: float
    bytes: float

    def s(self, microseconds: float) -> float:
        return microseconds * 1e-6 * self.time


def units_of(run: Path) -> Units:
    summary = _summary(run)
    scale = summary.get("scale", {})
    return Units(float(scale.get("time", 1.0)), float(scale.get("bytes", 1.0)))


def _summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.is_file():
        raise BadInput(f"{run}: has no summary.json; is it a run directory that has ended?")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _rows(run: Path, table: str, request_id: int) -> list[dict[str, Any]]:
    read = reader.read(run, table)
    rows: list[dict[str, Any]] = read.filter(pc.equal(read["id"], request_id)).to_pylist()
    return rows


def stories(run: Path, request_id: int, configuration: str | None = None) -> list[str]:
    """The lines of each (configuration, phase) in which the request occurs. Raises BadInput."""
    if not run.is_dir():
        raise BadInput(f"{run}: no such run directory")
    units = units_of(run)
    requests = [
        row
        for row in _rows(run, "requests", request_id)
        if configuration is None or row["configuration"] == configuration
    ]
    if not requests:
        whose = f" in configuration {configuration}" if configuration else ""
        raise BadInput(f"{run}: no request {request_id}{whose} (ids: `prfaas results query`)")
    decisions = _rows(run, "decisions", request_id)
    lines: list[str] = []
    for row in requests:
        own = [
            decision
            for decision in decisions
            if (decision["configuration"], decision["phase"])
            == (row["configuration"], row["phase"])
        ]
        lines += list(_story(row, own, units))
    return lines


def _story(row: dict[str, Any], decisions: list[dict[str, Any]], units: Units) -> Iterator[str]:
    scheduled_us = row["scheduled_us"]

    def at(name: str) -> str:
        """When, after the scheduled arrival."""
        return f"{units.s(row[name] - scheduled_us):8.3f} s"

    yield (
        f"request {row['id']} of {row['configuration']}, phase {row['phase']}: "
        f"{row['input_tokens']:,} tokens in, {row['output_tokens']:,} out"
        + (f", session {row['session']}" if row["session"] else "")
        + (f", tenant {row['tenant']}" if row["tenant"] else "")
    )
    yield f"   0.000 s  due ({units.s(scheduled_us):.3f} s into the phase)"
    if row["sent_us"] is None:
        yield "            never sent"
        return
    for decision in sorted(decisions, key=lambda each: each["attempt"]):
        yield from _decided(decision, scheduled_us, units)
    if row["prefill_started_us"] is not None:
        yield f"{at('prefill_started_us')}  prefill began at {row['prefill_instance']}"
        yield f"{at('prefill_finished_us')}  prefill done"
        crossed = row["wire_bytes"] * units.bytes
        how = f"{crossed / 2**20:,.1f} MiB crossed the link" if crossed else "inside the cluster"
        yield f"{at('delivered_us')}  cache at {row['decode_instance']}: {how}"
    if row["first_token_us"] is not None:
        yield f"{at('admitted_us')}  admitted to the batch"
        yield f"{at('first_token_us')}  first token"
        yield f"{at('last_token_us')}  last of {row['tokens_received']:,} tokens"
        parts = (
            ("queue", row["prefill_started_us"] - scheduled_us),
            ("prefill", row["prefill_finished_us"] - row["prefill_started_us"]),
            ("transfer", row["delivered_us"] - row["prefill_finished_us"]),
            ("decode admission", row["first_token_us"] - row["delivered_us"]),
        )
        split = " + ".join(f"{name} {units.s(part):.3f}" for name, part in parts)
        yield f"TTFT {units.s(row['first_token_us'] - scheduled_us):.3f} s = {split}"
    else:
        yield f"{row['status']} after {row['attempts']} attempts: {row['failure']}"


def _decided(decision: dict[str, Any], scheduled_us: int, units: Units) -> Iterator[str]:
    when = units.s(decision["time_us"] - scheduled_us)
    again = "" if decision["attempt"] == 1 else f" (attempt {decision['attempt']})"
    yield (
        f"{when:8.3f} s  routed{again} to {decision['prefill_instance']}, decode at "
        f"{decision['decode_instance']}: {decision['reason']}"
    )
    seen = []
    if decision["threshold_tokens"] is not None:
        seen.append(f"threshold {decision['threshold_tokens']:,.0f} tokens")
    if decision["cached_tokens"]:
        seen.append(f"{decision['cached_tokens']:,} tokens cached there")
    if decision["held_tokens"]:
        seen.append(f"{decision['held_tokens']:,} held where it decodes")
    if decision["predicted_wait_us"] is not None:
        seen.append(f"wait {units.s(decision['predicted_wait_us']):.3f} s")
    seen.append(f"work {units.s(decision['predicted_work_us']):.3f} s")
    if decision["link_utilisation"] is not None:
        seen.append(f"link {decision['link_utilisation']:.0%} used")
    if decision["decode_active"] is not None:
        seen.append(f"{decision['decode_active']} in its decode batch")
    yield f"            saw: {', '.join(seen)}"
    for other in decision["alternatives"] or ():
        yield f"            predicted TTFT by {other['cluster']}: {units.s(other['ttft_us']):.3f} s"


def scheduling(run: Path, configuration: str) -> list[tuple[float, str]]:
    """(modelled second, what a scheduler did) of a configuration, in order. Raises BadInput."""
    fleets = _summary(run).get("extra", {}).get("fleets", {})
    if configuration not in fleets:
        raise BadInput(
            f"{run}: no configuration {configuration!r} (there are: {', '.join(fleets)})"
        )
    return [
        (float(time_s), str(what)) for time_s, what in fleets[configuration].get("scheduling", [])
    ]


def reached_after_s(
    run: Path,
    configuration: str,
    phase: str,
    target_per_s: float,
    share: float = 0.97,
    window_s: float = 600.0,
    step_s: float = 10.0,
) -> tuple[float | None, float]:
    """(when, rate): the start of the first window of `window_s` in which requests got their first
    token at `share` of `target_per_s` or faster, and their mean rate from then until the last was
    sent. (None, rate of the last window) if there is none. Modelled seconds since the phase began.
    """
    units = units_of(run)
    read = reader.read(run, "requests")
    rows = read.filter(
        pc.and_(pc.equal(read["configuration"], configuration), pc.equal(read["phase"], phase))
    )
    if not rows.num_rows:
        raise BadInput(f"{run}: no requests of {configuration} in phase {phase}")
    sent_s = units.s(float(pc.max(rows["scheduled_us"]).as_py()))
    served_s = np.sort(rows["first_token_us"].drop_null().to_numpy() * 1e-6 * units.time)
    if sent_s < window_s:
        raise BadInput(f"{run}: {configuration} {phase} is shorter than {window_s:g} s")
    starts_s = np.arange(0.0, sent_s - window_s, step_s)
    served = np.searchsorted(served_s, [starts_s, starts_s + window_s])
    rates = (served[1] - served[0]) / window_s
    enough = np.flatnonzero(rates >= share * target_per_s)
    if not enough.size:
        return None, float(rates[-1])
    when_s = float(starts_s[enough[0]])
    later = np.searchsorted(served_s, sent_s) - served[0][enough[0]]
    return when_s, float(later / (sent_s - when_s))
