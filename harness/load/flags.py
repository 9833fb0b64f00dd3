"""The flags of `prfaas load`, under the names that users of vLLM's and AIPerf's clients know."""

from __future__ import annotations

import argparse
from typing import Any

from harness.targets.base import Api, Kind

#: Names of the two ways to ask, ours and others'.
APIS = {
    "completions": Api.COMPLETIONS,
    "openai": Api.COMPLETIONS,
    "vllm": Api.COMPLETIONS,
    "chat": Api.CHAT,
    "openai-chat": Api.CHAT,
}
_WORKLOADS = ("fixed", "lognormal", "sessions", "documents", "drift")


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
        "--backend", "--endpoint-type", choices=sorted(APIS), default="completions",
        metavar="API", help=f"one of {', '.join(sorted(APIS))} (default: completions)",
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
        "--max-connections",
        type=int,
        default=None,
        metavar="N",
        help="to each server, over all client processes (default: no limit)",
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
