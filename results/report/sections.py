"""The sections of a report in reading order: title, chart and reading of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from results.report import charts, errors, readings
from results.report.charts import Chart
from results.report.data import RunData


@dataclass(frozen=True, slots=True)
class Section:
    """`key` names the PNG and anchors the section in the page."""

    key: str
    title: str
    chart: Chart
    reading: Callable[[RunData], str]


SECTIONS = (
    Section("capacity", "Capacity against the model", charts.capacity, readings.capacity),
    Section(
        "ttft", "Time to first token at one offered rate",
        charts.ttft_distribution, readings.ttft_distribution,
    ),
    Section("split", "Where the time to first token goes", charts.ttft_split, readings.ttft_split),
    Section(
        "load", "Time to first token over load", charts.ttft_over_load, readings.ttft_over_load
    ),
    Section("egress", "Traffic on the link", charts.egress, readings.egress),
    Section(
        "utilisation", "Utilisation of prefill instances at one offered rate",
        charts.utilisation, readings.utilisation
    ),
    Section("queues", "Requests assigned for prefill", charts.queued, readings.queued),
    Section("decode", "Requests assigned to decode", charts.decoding, readings.decoding),
    Section("threshold", "Routing threshold", charts.threshold, readings.threshold),
    Section("roles", "Roles of instances", charts.roles, readings.roles),
    Section("fig5", "Threshold and capacity (Fig 5)", charts.figure_5, readings.figure_5),
    Section("fidelity", "Model and measurement", errors.against_model, readings.fidelity),
    Section("cost", "Cost", charts.cost, readings.cost),
)  # fmt: skip
