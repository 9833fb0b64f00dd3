"""The run that the flags of `prfaas load` mean."""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from typing import Any

from pydantic import ValidationError

from harness.errors import BadInput
from harness.load.flags import APIS
from harness.load.search import Search
from harness.load.spec import LoadSpec
from harness.load.together import check_body, check_together
from harness.targets.base import Api, Kind, TargetSpec
from workloads.spec import ArrivalSpec, parse_arrivals, parse_workload
from workloads.traces.rows import MOST_TOKENS

_SLO_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}

#: A prompt is drawn from two ids or more.
_LEAST_VOCAB = 2


def load_spec(options: argparse.Namespace) -> LoadSpec:
    """The run that the flags mean. Raises BadInput, InputError."""
    check_together(options)
    trace = options.trace is not None
    rate = options.request_rate
    if rate is not None and math.isinf(rate):
        rate = None
    arrivals = _arrivals(options, trace)
    if options.ramp_up_strategy and rate is None:
        rate = options.ramp_up_end_rps
    if arrivals["process"] == "trace" and (options.request_rate is not None or rate is not None):
        arrivals["process"] = "poisson"
    unbounded = not trace and options.duration is None
    count = _at_least("--num-prompts", options.num_prompts, 1)
    if count is None and unbounded:
        count = 1000
    _at_least("--seed", options.seed, 0)
    if options.endpoint and not options.endpoint.startswith("/"):
        raise BadInput(f"--endpoint {options.endpoint!r}: needs a path that begins with /")
    if options.min_goodput is not None and not 0 <= options.min_goodput <= 1:
        raise BadInput(f"--min-goodput {options.min_goodput:g}: needs a share of 0 to 1")
    made = {
        "target": _target_spec(options),
        "workload": parse_workload(_workload_table(options)),
        "arrivals": parse_arrivals(arrivals),
        "request_rate": rate,
        "num_requests": count,
        "duration_s": options.duration,
        "max_concurrency": options.max_concurrency,
        "num_warmups": options.num_warmups,
        "sessions": options.sessions,
        "think_s": options.think_time,
        "slo": _slo(options.goodput),
        "timeout_s": options.timeout,
        "drain_s": options.drain,
        "repeats": options.repeats,
        "processes": options.processes,
        "seed": options.seed,
        "name": options.name,
    }
    spec = _validated(LoadSpec, made)
    _check(options, spec)
    return spec


def _at_least(flag: str, value: int | None, least: int, most: int | None = None) -> int | None:
    if value is not None and (value < least or (most is not None and value > most)):
        end = f", at most {most}" if most is not None else ""
        raise BadInput(f"{flag} {value}: needs at least {least}{end}")
    return value


def search_of(options: argparse.Namespace, spec: LoadSpec) -> Search | None:
    """The search that the flags ask for. Raises BadInput."""
    if not options.search:
        return None
    if spec.request_rate is None:
        raise BadInput("--search: needs --request-rate to start from")
    if spec.slo.limits() == type(spec.slo.limits())():
        raise BadInput("--search: needs --goodput, for example --goodput ttft:2000 tpot:50")
    if not 0 < options.search_share < 1:
        raise BadInput(f"--search-share {options.search_share:g}: needs a share between 0 and 1")
    if not options.search_precision > 0:
        raise BadInput(f"--search-precision {options.search_precision:g}: needs more than 0")
    _at_least("--search-max-trials", options.search_max_trials, 1)
    return Search(
        spec.request_rate,
        share=options.search_share,
        precision=options.search_precision,
        max_trials=options.search_max_trials,
    )


def _check(options: argparse.Namespace, spec: LoadSpec) -> None:
    if spec.max_concurrency is not None and spec.max_concurrency < spec.processes:
        raise BadInput(
            f"--max-concurrency {spec.max_concurrency}: needs at least one for each of the "
            f"{spec.processes} --processes"
        )
    connections = spec.target.max_connections
    if connections is not None and connections < spec.processes:
        raise BadInput(
            f"--max-connections {connections}: needs at least one for each of the "
            f"{spec.processes} --processes"
        )
    if not spec.timed and not spec.closed and spec.num_requests is None:
        raise BadInput("--request-rate: without one, needs --num-prompts or --max-concurrency")
    if not spec.timed and spec.arrivals != ArrivalSpec():
        raise BadInput(
            "--burstiness, --arrival: have no effect on requests without times; need "
            "--request-rate, or a trace's own times (--arrival process=trace)"
        )
    if not spec.timed and spec.sessions == "closed":
        raise BadInput("--sessions closed: needs --request-rate, or a trace's own times")
    paired = spec.target.kind in (Kind.VLLM_PAIR, Kind.SGLANG_PAIR)
    prefill = spec.target.prefill_urls + spec.target.remote_prefill_urls
    if options.policy == "homogeneous" and not spec.target.prefill_urls:
        raise BadInput("--policy homogeneous: needs --prefill-url (local)")
    if options.policy == "naive" and not spec.target.remote_prefill_urls:
        raise BadInput("--policy naive: needs --remote-prefill-url")
    if options.compare and not (spec.target.prefill_urls and spec.target.remote_prefill_urls):
        raise BadInput("--compare: needs --prefill-url (local) and --remote-prefill-url")
    if paired and not (prefill and spec.target.decode_urls):
        raise BadInput(f"--target {spec.target.kind.value}: needs --prefill-url and --decode-url")
    ports = spec.target.bootstrap_ports
    if spec.target.kind is Kind.SGLANG_PAIR and len(ports) not in (1, len(prefill)):
        raise BadInput(
            f"--bootstrap-port: found {len(ports)} for {len(prefill)} prefill servers; give one "
            "for all, or one for each (those of --prefill-url first)"
        )
    if spec.target.prompt_vocab and spec.target.api is Api.CHAT:
        raise BadInput("--prompt-vocab: chat has no token ids; use --backend completions")


def _target_spec(options: argparse.Namespace) -> TargetSpec:
    body: Any = {}
    if options.extra_body:
        try:
            body = json.loads(options.extra_body)
        except ValueError as error:
            raise BadInput(f"--extra-body: not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadInput("--extra-body: needs a JSON object")
        check_body(options, body)
    headers = {}
    for line in options.header:
        name, mark, value = line.partition(":")
        if not mark:
            name, mark, value = line.partition("=")
        if not mark or not name.strip():
            raise BadInput("--header: needs NAME: VALUE")
        headers[name.strip()] = value.strip()
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise BadInput(f"--temperature {options.temperature:g}: needs a number of at least 0")
    vocab = _at_least("--prompt-vocab", options.prompt_vocab, _LEAST_VOCAB)
    made: dict[str, Any] = {
        "kind": options.target,
        "api": APIS[options.backend],
        "prefill_urls": tuple(options.prefill_url),
        "decode_urls": tuple(options.decode_url),
        "remote_prefill_urls": tuple(options.remote_prefill_url),
        "policy": options.policy,
        "endpoint": options.endpoint,
        "model": options.model,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
        "temperature": options.temperature,
        "prompt_vocab": vocab or 0,
        "max_tokens_field": options.max_tokens_field,
        "extra_body": body,
        "headers": headers,
        "api_key_env": options.api_key_env,
        "max_connections": options.max_connections,
        "bootstrap_ports": tuple(options.bootstrap_port) or (8998,),
        "threshold_tokens": options.threshold_tokens,
        "proxy": options.proxy,
        "ca_file": options.ca_file,
        "verify_tls": not options.insecure,
        "worker_model": options.worker_model,
    }
    if options.base_url:
        made["base_urls"] = tuple(options.base_url)
    target: TargetSpec = _validated(TargetSpec, made)
    return target


def _workload_table(options: argparse.Namespace) -> dict[str, Any]:
    fields = _settings("--set", options.set)
    if options.trace is not None:
        if options.input_len is not None or options.output_len is not None:
            raise BadInput("--input-len, --output-len: a trace has lengths of its own")
        return {"kind": "trace", "path": options.trace, "format": options.trace_format, **fields}
    kind = options.workload
    table: dict[str, Any] = {"kind": kind}
    if kind == "fixed":
        prompt = _at_least("--input-len", options.input_len, 1, MOST_TOKENS)
        table["input_tokens"] = 1024 if prompt is None else prompt
    elif options.input_len is not None:
        raise BadInput(f"--input-len: the {kind} workload draws its lengths; use --set")
    answer = _at_least("--output-len", options.output_len, 1, MOST_TOKENS)
    table["output_tokens"] = 128 if answer is None else answer
    return table | fields


def _arrivals(options: argparse.Namespace, trace: bool) -> dict[str, Any]:
    table: dict[str, Any] = {"process": "trace" if trace else "poisson"}
    if math.isinf(options.burstiness):
        table["process"] = "constant"
    elif options.burstiness != 1.0:
        table |= {"process": "gamma", "burstiness": options.burstiness}
    if options.ramp_up_strategy:
        start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
        if start is None or end is None:
            raise BadInput("--ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps")
        if not 0 <= start < math.inf or not 0 < end < math.inf:
            raise BadInput("--ramp-up-start-rps, --ramp-up-end-rps: need rates, the end above 0")
        over_s = options.ramp_up_duration
        if over_s is None:
            over_s = options.duration
        if over_s is None:
            # As long as the requests take at the mean of the two rates.
            count = 1000 if options.num_prompts is None else options.num_prompts
            over_s = count / ((start + end) / 2)
        rate = options.request_rate
        whole = end if rate is None or math.isinf(rate) else rate
        table["shape"] = {
            "kind": options.ramp_up_strategy,
            "from_factor": start / whole,
            "to_factor": end / whole,
            "over_s": over_s,
        }
    return table | _settings("--arrival", options.arrival)


def _slo(goals: list[str]) -> dict[str, float]:
    limits = {}
    for goal in goals:
        name, mark, value = goal.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = 0.0
        if not mark or name not in _SLO_NAMES or not limit_ms > 0:
            raise BadInput(
                f"--goodput {goal!r}: needs NAME:MILLISECONDS with a name of ttft, tpot, e2e"
            )
        limits[_SLO_NAMES[name]] = limit_ms / 1e3
    return limits


def _settings(flag: str, pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs as a table; a value that TOML does not know is text."""
    table: dict[str, Any] = {}
    for pair in pairs:
        key, mark, value = pair.partition("=")
        if not mark or not key:
            raise BadInput(f"{flag}: found {pair!r}, needs KEY=VALUE")
        try:
            table[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            table[key] = value
    return table


def _validated(model: Any, data: dict[str, Any]) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{name}: {first['msg']}; found {first['input']!r}"[:300]) from None
