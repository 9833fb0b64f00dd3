"""What an experiment sets that a way of running it does not know, so that it is said and not
silently passed over."""

from __future__ import annotations

from typing import Any, Literal

from harness.experiment import CacheSpec, ConfigurationSpec, Experiment
from harness.links.spec import LinkSpec
from workloads.kinds import ArrivalSpec

#: Ways to run an experiment; `ray`: workers on hosts of their own, also `emulate`.
Way = Literal["plan", "simulate", "emulate", "ray"]

_POOLS = ("cache.blocks", "cache.states", "cache.prompt_end", "cache.junction")
_JITTER = ("link.jitter_ms", "link.reverse.jitter_ms")
_OVER_TIME = ("link.schedule", "link.sine")
_SHAPING = (*_JITTER, *_OVER_TIME, "link.loss", "link.reverse", "link.queue_ms", "link.queue_bytes")

#: Way -> (why, fields) of what it does not know. A field is at its default where none is set.
PASSED_OVER: dict[Way, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "plan": (
        ("arrivals are taken as steady", ("arrivals.shape",)),
        ("the link is a rate and an RTT, those of its start", _SHAPING),
        ("a prefix cache has no bound", ("cache.blocks", "cache.states")),
        ("queues are first in, first out", ("configurations.queue",)),
    ),
    "simulate": (("jitter is not modelled", _JITTER),),
    "emulate": (
        (
            "a worker has a pool of its own size and keeps states at prompt ends and junctions",
            _POOLS,
        ),
    ),
    "ray": (("nothing shapes the hosts' own network", _SHAPING),),
}

_DEFAULTS = {
    "arrivals": ArrivalSpec(),
    "link": LinkSpec(),
    "cache": CacheSpec(),
    "configurations": ConfigurationSpec(name="any", policy="any", n_prefill=1, n_decode=1),
}


def passed_over(experiment: Experiment, way: Way) -> list[str]:
    """A line for each reason why something that is set has no effect by this way."""
    said = []
    for why, fields in PASSED_OVER[way]:
        found = [field for field in fields if _is_set(experiment, field)]
        if found:
            said.append(f"{way} passes over {', '.join(found)}: {why}")
    return said


def _is_set(experiment: Experiment, field: str) -> bool:
    table, *names = field.split(".")
    value = getattr(experiment, table)
    tables = value if isinstance(value, tuple) else (value,)
    return any(_at(each, names) != _at(_DEFAULTS[table], names) for each in tables)


def _at(value: Any, names: list[str]) -> Any:
    for name in names:
        value = getattr(value, name)
    return value
