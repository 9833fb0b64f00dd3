"""The flags of `prfaas load`, under the names that users of vLLM's and AIPerf's clients know."""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from typing import Any

from pydantic import ValidationError

from harness.errors import BadInput
from harness.load.search import Search
from harness.load.spec import LoadSpec
from harness.targets.base import Api, Kind, TargetSpec
from workloads.spec import parse_arrivals, parse_workload
from workloads.traces.rows import MOST_TOKENS

_APIS = {
    "completions": Api.COMPLETIONS,
    "openai": Api.COMPLETIONS,
    "vllm": Api.COMPLETIONS,
    "chat": Api.CHAT,
    "openai-chat": Api.CHAT,
}
_SLO_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}
_WORKLOADS = ("fixed", "lognormal", "sessions", "documents", "drift")

#: A prompt is drawn from two ids or more.
_LEAST_VOCAB = 2


def add_load_options(parser: argparse.ArgumentParser) -> None:
    _target(parser.add_argument_group("target"))
    _workload(parser.add_argument_group("workload"))
    _schedule(parser.add_argument_group("schedule"))
    _judgement(parser.add_argument_group("judgement"))


def _target(group: Any) -> None:
    group.add_argument(
        "--target", choices=[each.value for each in Kind], default="openai", help="what it is"
    )
    group.add_argument(
        "--base-url", "--url", action="append", default=[], metavar="URL",
        help="server (default: http://127.0.0.1:8000); repeat to take several in turn",
    )  # fmt: skip
    group.add_argument("--prefill-url", action="append", default=[], metavar="URL")
    group.add_argument("--decode-url", action="append", default=[], metavar="URL")
    group.add_argument(
        "--threshold-tokens", type=int, default=0, metavar="N",
        help="pairs: prompts shorter than this stay with the decode server",
    )  # fmt: skip
    group.add_argument(
        "--remote-prefill-url", action="append", default=[], metavar="URL",
        help="pairs: prefill server in the other datacenter",
    )  # fmt: skip
    group.add_argument(
        "--policy", choices=("homogeneous", "naive", "balanced", "prfaas"), default="",
        help="pairs: who prefills (default: prefill servers in turn)",
    )  # fmt: skip
    group.add_argument(
        "--compare", action="store_true", help="pairs: run all four policies, one after the other"
    )
    group.add_argument(
        "--bootstrap-port", type=int, action="append", default=[], metavar="PORT",
        help="of SGLang's prefill servers (default: 8998); repeat to give each its own",
    )  # fmt: skip
    group.add_argument("--model", "-m", default="", help="default: the first the server lists")
    group.add_argument(
        "--backend", "--endpoint-type", choices=sorted(_APIS), default="completions",
        metavar="API", help=f"one of {', '.join(sorted(_APIS))} (default: completions)",
    )  # fmt: skip
    group.add_argument("--endpoint", default="", metavar="PATH", help="instead of the API's own")
    group.add_argument(
        "--stream", "--streaming", action=argparse.BooleanOptionalAction, default=True
    )
    group.add_argument("--ignore-eos", action="store_true", help="answers as long as asked")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument(
        "--extra-body", "--extra-inputs", default="", metavar="JSON", help="members of each body"
    )
    group.add_argument(
        "--header", "-H", action="append", default=[], metavar="NAME: VALUE", help="repeatable"
    )
    group.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME")
    group.add_argument(
        "--max-tokens-field", default="", metavar="NAME",
        help="the body's name for the answer's limit (max_tokens; chat: max_completion_tokens)",
    )  # fmt: skip
    group.add_argument(
        "--prompt-vocab", type=int, default=None, metavar="N",
        help="prompts as token ids below N instead of words (completions only)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections", type=int, default=None, metavar="N", help="default: no limit"
    )
    group.add_argument("--proxy", default="", metavar="URL", help="default: none, whatever is set")
    group.add_argument("--ca-file", default="", metavar="FILE", help="trust this authority")
    group.add_argument("--insecure", action="store_true", help="do not verify certificates")
    group.add_argument("--worker-model", default="tiny", help="in-process: model to load")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=60.0, metavar="S",
        help="wait so long for the server to answer (default: 60)",
    )  # fmt: skip


def _workload(group: Any) -> None:
    group.add_argument("--trace", metavar="FILE", help="requests of a trace (docs/workloads.md)")
    group.add_argument("--trace-format", default="auto", metavar="NAME")
    group.add_argument("--workload", choices=_WORKLOADS, default="fixed", help="made requests")
    group.add_argument(
        "--input-len", "--random-input-len", "--isl", type=int, default=None, metavar="TOKENS",
        help="fixed prompt length (default: 1024)",
    )  # fmt: skip
    group.add_argument(
        "--output-len", "--random-output-len", "--osl", type=int, default=None, metavar="TOKENS",
        help="answer length of made requests (default: 128)",
    )  # fmt: skip
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a field of the workload"
    )
    group.add_argument("--seed", "--random-seed", type=int, default=0)


def _schedule(group: Any) -> None:
    group.add_argument(
        "--request-rate", type=float, default=None, metavar="RPS",
        help="requests a second; inf: as fast as the cap lets them (default: a trace's own times, "
        "else inf)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0,
        help="shape of gamma gaps; 1 (default): Poisson, inf: constant",
    )  # fmt: skip
    group.add_argument(
        "--arrival", action="append", default=[], metavar="KEY=VALUE",
        help="a field of the arrivals: process, slow_down, dequantise_s, offset_s, shape, ...",
    )  # fmt: skip
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), default=None)
    group.add_argument("--ramp-up-start-rps", type=float, default=None)
    group.add_argument("--ramp-up-end-rps", type=float, default=None)
    group.add_argument("--ramp-up-duration", type=float, default=None, metavar="S")
    group.add_argument("--max-concurrency", "--concurrency", type=int, default=None, metavar="N")
    group.add_argument(
        "--num-prompts", "--request-count", type=int, default=None, metavar="N",
        help="default: 1000 where nothing else ends the run",
    )  # fmt: skip
    group.add_argument("--duration", "--benchmark-duration", type=float, default=None, metavar="S")
    group.add_argument(
        "--num-warmups", "--warmup-request-count", type=int, default=0, metavar="N",
        help="requests before the run, in no figure",
    )  # fmt: skip
    group.add_argument(
        "--sessions", choices=("open", "closed"), default="open",
        help="closed: a turn is sent a think time after its predecessor's end",
    )  # fmt: skip
    group.add_argument(
        "--think-time", type=float, default=None, metavar="S", help="default: the workload's"
    )
    group.add_argument("--timeout", type=float, default=6 * 3600.0, metavar="S", help="a request's")
    group.add_argument(
        "--drain", type=float, default=600.0, metavar="S", help="wait so long after the last send"
    )
    group.add_argument("--repeats", type=int, default=1, help="runs, for confidence intervals")
    group.add_argument("--processes", type=int, default=1, help="client processes (default: 1)")


def _judgement(group: Any) -> None:
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:2000 tpot:25 e2e:60000"
    )
    group.add_argument(
        "--min-goodput", type=float, default=None, metavar="SHARE", help="exit code 6 below it"
    )
    group.add_argument(
        "--search", action="store_true", help="find the highest rate at the SLO, by bisection"
    )
    group.add_argument("--search-share", type=float, default=0.95, help="of requests at the SLO")
    group.add_argument("--search-precision", type=float, default=0.05)
    group.add_argument("--search-max-trials", type=int, default=20)


def load_spec(options: argparse.Namespace) -> LoadSpec:
    """The run that the flags mean. Raises BadInput, InputError."""
    trace = options.trace is not None
    rate = options.request_rate
    if rate is not None and math.isinf(rate):
        rate = None
    arrivals = _arrivals(options, trace)
    if options.ramp_up_strategy and rate is None:
        rate = options.ramp_up_end_rps
    if arrivals["process"] == "trace" and options.request_rate is not None:
        arrivals["process"] = "poisson"
    unbounded = not trace and options.duration is None
    count = _at_least("--num-prompts", options.num_prompts, 1)
    if count is None and unbounded:
        count = 1000
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
    if not spec.timed and not spec.closed and spec.num_requests is None:
        raise BadInput("--request-rate: without one, needs --num-prompts or --max-concurrency")
    if not spec.timed and spec.sessions == "closed":
        raise BadInput("--sessions closed: needs --request-rate, or a trace's own times")
    paired = spec.target.kind in (Kind.VLLM_PAIR, Kind.SGLANG_PAIR)
    prefill = spec.target.prefill_urls + spec.target.remote_prefill_urls
    if (options.policy or options.compare) and not paired:
        raise BadInput("--policy, --compare: need --target vllm-pair or sglang-pair")
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
        "api": _APIS[options.backend],
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
