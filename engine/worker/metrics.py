"""A worker's figures for Prometheus, read from `figures.stats` when scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.worker.figures import stats as stats_of
from engine.worker.worker import Worker


class WorkerCollector(Collector):
    """One sample of each figure a scrape; nothing is kept twice."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        stats = stats_of(self._worker)
        requests, overruns = stats["requests"], stats["overruns"]
        yield _gauge("waiting", "Requests that wait for memory or batch.", stats["waiting"])
        yield _gauge("running", "Requests that hold memory and run.", stats["running"])
        yield _gauge(
            "arrivals", "Caches that are arriving or wait to be decoded.", stats["arrivals"]
        )
        yield _counter("steps", "Engine steps.", stats["steps"])
        yield _counter("busy_seconds", "Seconds spent computing.", stats["busy_s"])
        yield _counter("tokens", "Tokens decoded.", requests["tokens"])
        yield _counter("preemptions", "Requests that lost their memory.", stats["preemptions"])
        yield _counter("overruns", "Steps that took longer than modelled.", overruns["count"])
        yield _counter("sent_bytes", "Bytes of caches sent.", stats["sent_bytes"])
        yield _counter("received_caches", "Caches received whole.", stats["received_caches"])
        ended = CounterMetricFamily(
            "prfaas_worker_requests", "Requests by how they ended.", labels=["outcome"]
        )
        for outcome in ("prefills", "decodes", "failed", "cancelled"):
            ended.add_metric([outcome], requests[outcome])
        yield ended
        if stats["memory"]["in_use_bytes"] is not None:
            yield _gauge("in_use_bytes", "Memory in use.", stats["memory"]["in_use_bytes"])
        yield from _cache(stats["cache"])


def _cache(groups: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "prfaas_worker_cache_entries", "Pages and states by use.", labels=["group", "use"]
    )
    for group, figures in groups.items():
        for use in ("free", "owned", "cached", "pinned"):
            blocks.add_metric([group, use], figures[use])
    yield blocks
    for name, text in (
        ("lookup_tokens", "Prompt tokens looked up."),
        ("hit_tokens", "Prompt tokens found."),
        ("stored", "Entries that became shared."),
        ("evicted", "Entries that were evicted."),
    ):
        counter = CounterMetricFamily(f"prfaas_worker_cache_{name}", text, labels=["group"])
        for group, figures in groups.items():
            counter.add_metric([group], figures[name])
        yield counter


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"prfaas_worker_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"prfaas_worker_{name}", text, value=value)


def registry_of(worker: Worker) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(worker))
    return registry
