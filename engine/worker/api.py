"""The control API over HTTP (docs/worker.md). Errors are {"error": kind, "message": text}."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from engine.worker import figures
from engine.worker.errors import BadRequest, WorkerError
from engine.worker.messages import parse_decode, parse_key, parse_prefill, parse_prefix
from engine.worker.metrics import registry_of
from engine.worker.openai import add_openai_routes
from engine.worker.options import ROLES
from engine.worker.worker import Worker

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: A prompt of a million token ids and its punctuation.
MAX_BODY_BYTES = 16 << 20


def make_app(worker: Worker) -> web.Application:
    """All routes. Run with `handler_cancellation=True`: a client that leaves cancels its work."""
    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
    registry = registry_of(worker)

    async def health(_: web.Request) -> web.Response:
        return web.json_response(figures.health(worker))

    async def stats(_: web.Request) -> web.Response:
        return web.json_response(figures.stats(worker))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    async def prefill(request: web.Request) -> web.Response:
        parsed = parse_prefill(await body_of(request), worker.engine.model.config.vocab)
        return web.json_response(asdict(await worker.prefill(parsed)))

    async def prefix(request: web.Request) -> web.Response:
        engine = worker.engine
        parsed = parse_prefix(
            await body_of(request), engine.model.config.vocab, engine.layout.page_tokens
        )
        return web.json_response(asdict(await worker.send_prefix(parsed)))

    async def decode(request: web.Request) -> web.StreamResponse:
        parsed = parse_decode(await body_of(request))
        response: web.StreamResponse | None = None
        sequence = worker.take(parsed)
        tokens = worker.stream(parsed.key, sequence)
        last: dict[str, Any]
        try:
            async for token in tokens:
                if response is None:
                    response = web.StreamResponse()
                    response.content_type = "application/x-ndjson"
                    await response.prepare(request)
                    line = {"admitted_s": token.t_s, "token": token.id}
                else:
                    line = {"token": token.id, "t_s": token.t_s}
                await response.write(json.dumps(line).encode() + b"\n")
            last = {
                "done": True,
                "finish": sequence.finish,
                "overruns": sequence.overruns,
                "worst_overrun": sequence.worst_overrun,
                "preemptions": sequence.preemptions,
            }
        except WorkerError as error:
            if response is None:
                raise
            last = {"error": error.kind, "message": str(error)}
        finally:
            await tokens.aclose()
        assert response is not None
        await response.write(json.dumps(last).encode() + b"\n")
        await response.write_eof()
        return response

    async def abandon(request: web.Request) -> web.Response:
        worker.abandon(parse_key(await body_of(request)))
        return web.json_response({})

    async def drain(_: web.Request) -> web.Response:
        await worker.drain()
        return web.json_response({"state": worker.state})

    async def convert(request: web.Request) -> web.Response:
        body = await body_of(request)
        role = body.get("role") if isinstance(body, dict) else None
        if role not in ROLES:
            raise BadRequest(f"role: {role!r}; one of {', '.join(ROLES)} would do")
        await worker.convert(role)
        return web.json_response({"role": worker.role, "state": worker.state})

    async def samples(_: web.Request) -> web.Response:
        return web.json_response(worker.courier.plane.link_samples())

    async def cache_events(_: web.Request) -> web.Response:
        return web.json_response(worker.events.take(worker.pool))

    async def audit(_: web.Request) -> web.Response:
        return web.json_response(worker.courier.plane.audit_rows())

    app.add_routes(
        [
            web.get("/health", health),
            web.get("/stats", stats),
            web.get("/metrics", metrics),
            web.get("/link-samples", samples),
            web.get("/audit", audit),
            web.get("/cache-events", cache_events),
            web.post("/prefill", prefill),
            web.post("/prefix", prefix),
            web.post("/decode", decode),
            web.post("/abandon", abandon),
            web.post("/drain", drain),
            web.post("/convert", convert),
        ]
    )
    add_openai_routes(app, worker)
    return app


async def body_of(request: web.Request) -> Any:
    """The JSON body. Raises BadRequest."""
    try:
        return await request.json()
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except WorkerError as error:
        return web.json_response({"error": error.kind, "message": str(error)}, status=error.status)
    except (web.HTTPException, ConnectionResetError):
        raise
    except Exception as error:
        log.exception("%s %s", request.method, request.path)
        return web.json_response(
            {"error": "internal", "message": f"{type(error).__name__}: {error}"}, status=500
        )
