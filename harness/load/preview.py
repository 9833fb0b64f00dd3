"""What a run would send, from the beginning of its schedule, without sending it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from harness.load.flight import Flight
from harness.load.spec import LoadSpec, measured_phase, phase_requests
from harness.targets.base import Kind
from harness.targets.body import PATHS, BodyBuilder
from harness.targets.factory import make_target
from harness.targets.secrets import clean_text
from workloads.spec import notes

#: Requests that are generated for the preview.
_LOOKED_AT = 10_000
_SHOWN_BYTES = 120


def check_target(spec: LoadSpec) -> None:
    """Build the target as a client does, without a connection. Raises BadInput."""

    async def build() -> None:
        await make_target(spec.target).close()

    asyncio.run(build())


def preview(spec: LoadSpec) -> Iterator[str]:
    """Raises InputError where the workload cannot be made."""
    phase = measured_phase(spec, "load", 0)
    requests = list(islice(phase_requests(spec, phase), _LOOKED_AT))
    if not requests:
        yield "nothing would be sent"
        return
    more = " at least" if len(requests) == _LOOKED_AT else ""
    inputs = sum(each.input_tokens for each in requests) / len(requests)
    outputs = sum(each.output_tokens for each in requests) / len(requests)
    if phase.closed:
        when = f"closed loop of {spec.max_concurrency}"
    else:
        when = f"over {requests[-1].arrival_s:,.1f} s"
    yield f"would send{more} {len(requests):,} requests, {when}"
    yield f"tokens a request: {inputs:,.1f} in, {outputs:,.1f} out on average"
    target = spec.target
    if target.kind is Kind.IN_PROCESS:
        yield f"to a worker in this process, of model {target.worker_model}"
        yield from notes(spec.workload, spec.arrivals)
        return
    urls = target.base_urls
    if target.kind in (Kind.VLLM_PAIR, Kind.SGLANG_PAIR):
        urls = target.prefill_urls + target.remote_prefill_urls + target.decode_urls
    path = target.endpoint or PATHS[target.api]
    yield f"to {', '.join(map(clean_text, urls))} {path}"
    body = BodyBuilder(target, target.model).build(
        Flight(requests[0], "load", 0.0, 0.0, phase.seed), stream=target.stream
    )
    if len(body) > 2 * _SHOWN_BYTES:
        yield f"first body ({len(body):,} bytes): {body[:_SHOWN_BYTES].decode()} ..."
        yield f"... {body[-_SHOWN_BYTES:].decode()}"
    else:
        yield f"first body ({len(body):,} bytes): {body.decode()}"
    yield from notes(spec.workload, spec.arrivals)
