"""Flags that have no effect beside others, or without them: refused, not silently passed over."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from harness.errors import BadInput
from harness.load.flags import APIS, add_load_options
from harness.targets.base import Api, Kind
from harness.targets.body import LIMITS

_PAIRS = frozenset((Kind.VLLM_PAIR, Kind.SGLANG_PAIR))
_OVER_HTTP = frozenset(Kind) - {Kind.IN_PROCESS}

#: Flag -> the targets that it is of; other flags are of all.
_OF_TARGETS: dict[str, frozenset[Kind]] = {
    "base_url": _OVER_HTTP - _PAIRS,
    "prefill_url": _PAIRS | {Kind.LLM_D},
    "decode_url": _PAIRS,
    "remote_prefill_url": _PAIRS,
    "policy": _PAIRS,
    "compare": _PAIRS,
    "bootstrap_port": frozenset((Kind.SGLANG_PAIR,)),
    "threshold_tokens": _PAIRS | {Kind.LLM_D},
    "worker_model": frozenset((Kind.IN_PROCESS,)),
} | dict.fromkeys(
    (
        *("model", "backend", "endpoint", "stream", "temperature", "extra_body", "header"),
        *("api_key_env", "max_tokens_field", "prompt_vocab", "max_connections", "proxy"),
        *("ca_file", "insecure"),
    ),
    _OVER_HTTP,
)
#: Flag -> the one without which it has no effect.
_NEEDS = {
    "search_share": "search",
    "search_precision": "search",
    "search_max_trials": "search",
    "ramp_up_start_rps": "ramp_up_strategy",
    "ramp_up_end_rps": "ramp_up_strategy",
    "ramp_up_duration": "ramp_up_strategy",
    "think_time": "sessions",
    "trace_format": "trace",
}
#: Flag, another, and why not both.
_EXCLUDE = (
    ("compare", "policy", "a comparison runs all policies"),
    ("compare", "search", "search each policy in a run of its own, with --policy"),
    ("search", "repeats", "a search repeats a rate until it is decided"),
    ("search", "min_goodput", "a search judges each rate by --search-share"),
    ("trace", "workload", "the requests are the trace's"),
    ("ramp_up_strategy", "request_rate", "a ramp has rates of its own"),
    ("insecure", "ca_file", "no certificate would be verified"),
)


def check_together(options: argparse.Namespace) -> None:
    """Raises BadInput for the first flag that would have no effect.

    A flag counts as given where its value is not the default.
    """
    for problem in _problems(options):
        raise BadInput(problem)


def _problems(options: argparse.Namespace) -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_load_options(parser)
    defaults = parser.parse_args([])

    def given(name: str) -> bool:
        if name == "request_rate" and options.request_rate == math.inf:
            return False
        return bool(getattr(options, name) != getattr(defaults, name))

    kind = Kind(options.target)
    for name, kinds in _OF_TARGETS.items():
        if given(name) and kind not in kinds:
            needed = " or ".join(each.value for each in Kind if each in kinds)
            yield f"{_flag(name)}: not of --target {kind.value}; needs --target {needed}"
    for name, other in _NEEDS.items():
        if given(name) and not given(other):
            closed = " closed" if other == "sessions" else ""
            yield f"{_flag(name)}: has no effect without {_flag(other)}{closed}"
    for name, other, why in _EXCLUDE:
        if given(name) and given(other):
            yield f"{_flag(name)}, {_flag(other)}: give one of them; {why}"
    if options.threshold_tokens and options.policy not in ("", "prfaas"):
        yield f"--threshold-tokens: policy {options.policy} has no threshold; prfaas has"
    if options.sessions == "closed" and not options.trace and options.workload != "sessions":
        yield "--sessions closed: needs --workload sessions, or a --trace with sessions"
    if not options.stream and any(goal.startswith("tpot") for goal in options.goodput):
        yield "--goodput tpot: an answer in one piece has no TPOT; leave --no-stream out"
    set_keys = {pair.partition("=")[0] for pair in options.arrival}
    if options.ramp_up_strategy and "shape" in set_keys:
        yield "--ramp-up-strategy, --arrival shape: give one of them; both shape the rate"
    if given("burstiness") and set_keys & {"process", "burstiness"}:
        yield "--burstiness, --arrival process or burstiness: give one of them"
    if "process=trace" in options.arrival and options.request_rate is not None:
        yield "--arrival process=trace: keeps the trace's own times; leave --request-rate out"
    yield from _repeated("--goodput", (goal.partition(":")[0] for goal in options.goodput))
    names = (line.replace("=", ":", 1).partition(":")[0] for line in options.header)
    yield from _repeated("--header", (name.strip().lower() for name in names))


def check_body(options: argparse.Namespace, extra: dict[str, object]) -> None:
    """Raises BadInput for members of --extra-body that the client writes from other flags."""
    api = APIS[options.backend]
    flags = {
        "model": "--model",
        "stream": "--stream",
        "messages" if api is Api.CHAT else "prompt": "the workload",
        options.max_tokens_field or LIMITS[api]: "--output-len or the workload",
    }
    for name, flag in flags.items():
        if name in extra:
            raise BadInput(f"--extra-body: {name!r} comes from {flag}, and would be there twice")


def _repeated(flag: str, names: Iterator[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        if name in seen:
            yield f"{flag}: {name!r} is there twice; only the last would have an effect"
        seen.add(name)


def _flag(name: str) -> str:
    return "--no-stream" if name == "stream" else f"--{name.replace('_', '-')}"
