"""Small servers that speak the hand-over protocols as documented, and refuse what is not so."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from aiohttp import web

_BLOCKS = itertools.count()


def answer(model: str, tokens: int) -> dict[str, Any]:
    return {
        "id": "x",
        "model": model,
        "choices": [{"index": 0, "text": " tok" * tokens, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": tokens},
    }


async def stream(
    request: web.Request, tokens: int, more: dict[str, Any] | None = None
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(tokens):
        finish = "length" if number == tokens - 1 else None
        chunk = {"choices": [{"index": 0, "text": " tok", "finish_reason": finish}], **(more or {})}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    usage = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}}
    await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


def refuse(text: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)


class Server:
    """Runs a handler on a free port and keeps each (headers, body) it was sent."""

    def __init__(self, path: str = "/v1/completions") -> None:
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.url = ""
        self._path = path
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Server:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.post(self._path, self._post), web.get("/v1/models", self._models)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(({k.lower(): v for k, v in request.headers.items()}, body))
        return await self.serve(request, body)

    async def serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, body["max_tokens"])


class VllmPrefill(Server):
    """Keeps the cache of each request under a block id, and says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[int] = set()
        self.kv_connector = True
        self.stops = False

    async def serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = body.get("kv_transfer_params") or {}
        if asked.get("do_remote_decode") is not True or asked.get("do_remote_prefill") is not False:
            return refuse("not a prefill request")
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        if limit != 1 or body["stream"] or "stream_options" in body:
            return refuse("prefill wants one token, not streamed")
        if body.get("min_tokens", 0) > 1:
            return refuse("min_tokens must be less than or equal to max_tokens=1")
        made = answer(body["model"], 1)
        if self.stops:
            made["choices"][0]["finish_reason"] = "stop"
        elif self.kv_connector:
            block = next(_BLOCKS)
            self.kept.add(block)
            made["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "engine-1",
                "remote_block_ids": [block],
                "remote_request_id": f"cmpl-{request.headers['X-Request-Id']}-0",
                "remote_host": "127.0.0.1",
                "remote_port": 20001,
                "tp_size": 1,
            }
        return web.json_response(made)


class VllmDecode(Server):
    """Fetches each cache once, or computes a request that brings none."""

    def __init__(self, prefill: VllmPrefill) -> None:
        super().__init__()
        self._prefill = prefill
        self.alone = 0

    async def serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        brought = body.get("kv_transfer_params")
        if brought is None:
            self.alone += 1
        else:
            if not brought.keys() >= {"remote_engine_id", "remote_request_id", "remote_host"}:
                return refuse("invalid KVTransferParams")
            (block,) = brought["remote_block_ids"]
            if block not in self._prefill.kept or brought["do_remote_prefill"] is not True:
                return refuse("no such cache", 500)
            self._prefill.kept.remove(block)
        return await stream(request, body["max_tokens"])


class SglangHalf(Server):
    """Meets its other half in a room; neither answers before both are there."""

    def __init__(self, rooms: dict[int, asyncio.Event], prefill: bool) -> None:
        super().__init__()
        self._rooms = rooms
        self._prefill = prefill
        self.refuses = False
        self.port = 8998

    async def serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.refuses:
            return refuse("out of memory", 500)
        room, port = body.get("bootstrap_room"), body.get("bootstrap_port")
        if room is None or port != self.port or not body.get("bootstrap_host"):
            return refuse("no bootstrap fields")
        met = self._rooms.setdefault(room, asyncio.Event())
        if self._prefill:
            met.set()
        async with asyncio.timeout(10):
            await met.wait()
        return await stream(request, body["max_tokens"])


class Dynamo(Server):
    async def serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("nvext", {}).get("extra_fields") != ["worker_id", "timing"]:
            return refuse("no nvext")
        worker = {"prefill_worker_id": 7, "decode_worker_id": 9}
        return await stream(request, body["max_tokens"], {"nvext": {"worker_id": worker}})
