"""OpenAI-compatible servers, one or several taken in turn, with what some front ends add."""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import urlsplit

import orjson

from harness.load.alarm import Due
from harness.load.flight import Flight
from harness.targets.base import Done, Kind, TargetSpec
from harness.targets.body import PATHS, BodyBuilder
from harness.targets.completion import Completion
from harness.targets.endpoint import Endpoint


class OpenAiTarget:
    """`/v1/completions` or `/v1/chat/completions` at each of `spec.base_urls`.

    For Dynamo each answer is asked which worker served it (`nvext`). For llm-d each request names a
    prefill server of `spec.prefill_urls` in turn (`x-prefiller-host-port`); prompts below
    `spec.threshold_tokens` name none and stay with their decode server.
    """

    def __init__(self, spec: TargetSpec, due: Due | None = None) -> None:
        self._spec = spec
        self._endpoints = [Endpoint(spec, url, due) for url in spec.base_urls]
        path = spec.endpoint or PATHS[spec.api]
        self._messages = [each.heads(path) for each in self._endpoints]
        self._turn = itertools.cycle(range(len(self._endpoints)))
        self._prefillers = itertools.cycle(spec.prefill_urls) if spec.prefill_urls else None
        self._bodies = BodyBuilder(spec, spec.model)
        self._extra: dict[str, Any] | None = None
        if spec.kind is Kind.DYNAMO:
            self._extra = {"nvext": {"extra_fields": ["worker_id", "timing"]}}

    async def probe(self) -> str:
        models = [await each.probe() for each in self._endpoints]
        if not self._spec.model and models[0]:
            self._bodies = BodyBuilder(self._spec, models[0])
        return self._spec.model or models[0]

    def send(self, flight: Flight, done: Done) -> None:
        at = next(self._turn)
        endpoint = self._endpoints[at]
        request = flight.request
        exchange = Completion(flight, done)
        lines = f"X-Request-Id: {flight.phase}-{request.id}"
        if self._spec.kind is Kind.DYNAMO:
            exchange.observe = note_dynamo
        elif self._prefillers is not None and request.input_tokens >= self._spec.threshold_tokens:
            flight.prefill_instance = urlsplit(next(self._prefillers)).netloc
            lines += f"\r\nx-prefiller-host-port: {flight.prefill_instance}"
        flight.decode_instance = endpoint.name
        body = self._bodies.build(flight, stream=self._spec.stream, extra=self._extra)
        endpoint.pool.submit(self._messages[at](body, lines), exchange)

    async def close(self) -> None:
        for each in self._endpoints:
            each.close()


def note_dynamo(flight: Flight, payload: bytes) -> None:
    """Which workers served a request, from Dynamo's `nvext` (or `worker_id` beside it)."""
    if b"worker_id" not in payload:
        return
    try:
        chunk = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return
    found = (chunk.get("nvext") or chunk).get("worker_id")
    if isinstance(found, dict):
        for name in ("prefill", "decode"):
            ident = found.get(f"{name}_worker_id")
            if ident is not None:
                setattr(flight, f"{name}_instance", str(ident))
    elif found is not None:
        flight.decode_instance = str(found)
