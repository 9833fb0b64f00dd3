"""prfaas trace: look into traces, and make new ones."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from harness.cli.numbers import finite, whole
from harness.errors import BadInput
from workloads.describe import MAX_BLOCKS, Description, Spread, describe
from workloads.request import Request
from workloads.retime import dequantised, slowed, window
from workloads.scaling import TokenScale
from workloads.spec import generate, notes, parse_arrivals, parse_workload
from workloads.traces import parquet_form, sharegpt
from workloads.traces.readers import FORMATS, detect, open_trace
from workloads.traces.writers import SUFFIXES, save

_EPILOG = f"""\
formats: {", ".join(FORMATS)}; plain, gzip and zstd.
Both are told by content, whatever a file is called.
What is written ends in {", ".join(SUFFIXES)} (Mooncake's).

examples:
  prfaas trace describe conversation.jsonl
      counts, lengths, rates, burstiness, prefix reuse, share above the threshold
  prfaas trace describe conversation.jsonl --threshold 8000 --json
  prfaas trace convert AzureLLMInferenceTrace_conv.csv azure.parquet
  prfaas trace convert conversation.jsonl smooth.parquet --dequantise 3
      Mooncake stamps are multiples of 3 s: spread them, and record that
  prfaas trace slice azure.parquet ten-minutes.parquet --start 600 --end 1200
  prfaas trace scale azure.parquet half-rate.parquet --slow-down 2
  prfaas trace scale conversation.jsonl small.parquet --token-scale 64
  prfaas trace synthesize day.parquet --kind drift --rate 2 --duration 86400
  prfaas trace synthesize chat.parquet --kind sessions --rate 2 --count 5000 \\
      --set mean_turns=8 --set first_message.mu=9.2 --arrival process=gamma --arrival burstiness=0.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str, inputs: bool = True) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary)
        if inputs:
            sub.add_argument("input", help="trace to read")
            sub.add_argument("--format", default="auto", help="format of the input (default: auto)")
        if name != "describe":
            sub.add_argument("output", help=f"trace to write ({', '.join(SUFFIXES)})")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    sub = action("describe", "say what is in a trace")
    sub.add_argument(
        "--threshold",
        type=whole(0),
        default=19_400,
        metavar="TOKENS",
        help="count requests with more uncached tokens than this (default: 19400)",
    )
    sub = action("convert", "write a trace in another form")
    sub.add_argument(
        "--dequantise",
        type=finite(0),
        default=0.0,
        metavar="S",
        help="stamps are multiples of S seconds: spread them at random, and record that",
    )
    sub.add_argument("--seed", type=whole(0), default=0, help="seed of --dequantise (default: 0)")
    sub = action("slice", "cut a piece out of a trace")
    sub.add_argument("--start", type=finite(0), default=0.0, metavar="S", help="from this time, s")
    sub.add_argument("--end", type=finite(0), default=None, metavar="S", help="before this time, s")
    sub.add_argument("--count", type=whole(1), default=None, help="at most so many requests")
    sub.add_argument(
        "--max-input",
        type=whole(1),
        default=None,
        metavar="TOKENS",
        help="leave out longer prompts",
    )
    sub = action("scale", "stretch a trace in time, or shrink its tokens")
    sub.add_argument(
        "--slow-down",
        type=finite(1e-9),
        default=1.0,
        metavar="F",
        help="multiply times by F (2: half rate)",
    )
    sub.add_argument(
        "--offset", type=finite(0), default=0.0, metavar="S", help="then add S seconds"
    )
    sub.add_argument(
        "--token-scale",
        type=whole(1),
        default=1,
        metavar="N",
        help="one for N tokens and blocks",
    )
    sub = action("synthesize", "make a trace from a workload description", inputs=False)
    sub.add_argument(
        "--kind",
        default="lognormal",
        help="lognormal, fixed, trace, sessions, documents or drift (default: lognormal)",
    )
    sub.add_argument("--rate", type=finite(1e-9), default=None, help="requests/s")
    sub.add_argument("--duration", type=finite(1e-9), default=None, metavar="S", help="length, s")
    sub.add_argument("--count", type=whole(1), default=None, help="number of requests")
    sub.add_argument("--seed", type=whole(0), default=0, help="same seed, same trace (default: 0)")
    for flag, what in (("--set", "workload"), ("--arrival", "arrivals")):
        sub.add_argument(
            flag,
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"a setting of the {what} (docs/workloads.md lists them), value as in TOML",
        )


def run(options: argparse.Namespace) -> int:
    """Returns 0; bad input raises an error with exit code 2."""
    if options.action == "describe":
        description = describe(open_trace(options.input, options.format), options.threshold)
        remarks = _remarks(options)
        if options.json:
            print(json.dumps({**description.as_dict(), "notes": remarks}, indent=2))
        else:
            print("\n".join([options.input, *_table(description), *remarks]))
        return 0
    made, remarks = _make(options)
    count = save(options.output, made, remarks)
    if options.json:
        print(json.dumps({"output": options.output, "requests": count, "notes": remarks}))
    else:
        print("\n".join([f"{options.output}: {count} requests", *remarks]))
    return 0


def _make(options: argparse.Namespace) -> tuple[Iterator[Request], list[str]]:
    """The requests that an action writes, and what a reader of them must know."""
    if options.action == "synthesize":
        return _synthesized(options)
    requests = open_trace(options.input, options.format)
    remarks = _remarks(options)
    if options.action == "convert" and options.dequantise:
        if options.dequantise < 0:
            raise BadInput(f"--dequantise: found {options.dequantise:g}, needs seconds above 0")
        requests = dequantised(requests, options.dequantise, np.random.default_rng(options.seed))
        remarks.append(
            f"stamps were spread at random over the {options.dequantise:g} s that each stands for "
            f"(seed {options.seed}); times inside an interval are not the trace's"
        )
    elif options.action == "slice":
        if options.end is not None and options.end <= options.start:
            raise BadInput(f"--end {options.end:g} is not after --start {options.start:g}")
        requests = window(requests, options.start, options.end)
        longest = options.max_input
        if longest is not None:
            requests = (row for row in requests if row.input_tokens <= longest)
            remarks.append(f"prompts of more than {longest} tokens were left out")
        requests = islice(requests, options.count)
    elif options.action == "scale":
        if not options.slow_down > 0 or not options.offset >= 0:
            raise BadInput("--slow-down needs a number above 0, --offset one of at least 0")
        scale = TokenScale(options.token_scale)
        requests = slowed(requests, options.slow_down, options.offset)
        requests = (scale.request(row) for row in requests)
        if options.slow_down != 1 or options.offset:
            remarks.append(
                f"time is that of the source x {options.slow_down:g} + {options.offset:g} s"
            )
        if options.token_scale != 1:
            remarks.append(f"one token stands for {options.token_scale} of the source")
    return requests, remarks


def _remarks(options: argparse.Namespace) -> list[str]:
    """What the input says, or its format implies, about how it was made."""
    found = detect(options.input) if options.format == "auto" else options.format
    if found == "parquet":
        return parquet_form.notes(options.input)
    if found == "sharegpt":
        return [
            f"token counts are estimated ({sharegpt.BYTES_PER_TOKEN} bytes of UTF-8 a token) and "
            f"times invented (a conversation a second, turns {sharegpt.TURN_S:g} s apart)"
        ]
    return []


def _synthesized(options: argparse.Namespace) -> tuple[Iterator[Request], list[str]]:
    workload = parse_workload({"kind": options.kind, **_settings("--set", options.set)})
    arrivals = parse_arrivals(_settings("--arrival", options.arrival))
    endless = options.kind != "trace"
    if endless and options.count is None and options.duration is None:
        raise BadInput("synthesize: needs --count or --duration, or it would never end")
    requests = generate(
        workload,
        arrivals,
        options.seed,
        request_rate=options.rate,
        duration_s=options.duration,
        count=options.count,
    )
    made = f"synthesized: {workload.model_dump_json()} {arrivals.model_dump_json()}"
    return requests, [
        f"{made} rate {options.rate} seed {options.seed}",
        *notes(workload, arrivals),
    ]


def _settings(flag: str, pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs as a table; a value that TOML does not know is text."""
    lines = []
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise BadInput(f"{flag}: found {pair!r}, needs KEY=VALUE")
        try:
            tomllib.loads(f"x = {value}")
        except tomllib.TOMLDecodeError:
            value = json.dumps(value)
        lines.append(f"{key} = {value}")
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{flag}: {error}") from None


def _table(found: Description) -> list[str]:
    def number(value: float | None, unit: str = "", digits: str = ",.2f") -> str:
        return "-" if value is None else f"{value:{digits}}{unit}"

    def spread(name: str, of: Spread) -> str:
        return (
            f"  {name:<16}mean {of.mean:>10,.1f}  min {of.minimum:>7,}  p50 {of.p50:>7,}  "
            f"p90 {of.p90:>7,}  p99 {of.p99:>7,}  max {of.maximum:>8,}"
        )

    lines = [
        f"  requests        {found.requests:,} over {found.duration_s:,.1f} s",
        f"  rate            {number(found.rate_rps, ' req/s')}, "
        f"busiest minute {number(found.peak_rate_rps, ' req/s')}",
        f"  burstiness      gap CV {number(found.gap_cv)}, counts a minute variance/mean "
        f"{number(found.dispersion)} (Poisson: 1 and 1)",
        spread("input tokens", found.input_tokens),
        spread("output tokens", found.output_tokens),
        spread("uncached tokens", found.uncached_tokens),
        f"  prefix reuse    {found.hit_share:.1%} of input tokens hit in "
        + (
            "an unbounded cache"
            if not found.evicted_blocks
            else f"a cache of {MAX_BLOCKS:,} blocks"
        ),
        f"  above threshold {found.above_threshold:.1%} of requests have more than "
        f"{found.threshold_tokens:,} uncached tokens",
    ]
    if found.quantum_s is not None:
        lines.append(
            f"  stamps          are multiples of {found.quantum_s:g} s "
            f"(`prfaas trace convert --dequantise {found.quantum_s:g}` spreads them)"
        )
    if found.in_sessions:
        lines.append(f"  sessions        {found.in_sessions:,} requests belong to one")
    if found.tenants:
        tenants = ", ".join(f"{name} {count:,}" for name, count in found.tenants.items())
        lines.append(f"  tenants         {tenants}")
    return lines
