"""The stub's HTTP: a protocol of its own on bytes, so that it costs less than its clients do.

It reads requests with Content-Length bodies only, which is what every OpenAI client sends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import orjson

from harness.stub.options import StubOptions

_JSON = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"
_DEFAULT_TOKENS = 16
_REASONS = {200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found",
            503: b"Service Unavailable"}  # fmt: skip


class Stub:
    """Shared by all connections: what is served, and counts of what was."""

    def __init__(self, options: StubOptions) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.requests = 0
        self.most_at_once = 0
        self._at_once = 0
        self._queue: deque[_Connection] = deque()
        self._refused = 0.0

    def refuses(self) -> bool:
        self._refused += self.options.refuse_share
        if self._refused >= 1.0:
            self._refused -= 1.0
            return True
        return False

    def begin(self, connection: _Connection) -> None:
        self.requests += 1
        if self.options.service and self._at_once >= self.options.service:
            self._queue.append(connection)
        else:
            self._start(connection)

    def end(self) -> None:
        self._at_once -= 1
        while self._queue and self._at_once < (self.options.service or 1):
            self._start(self._queue.popleft())

    def _start(self, connection: _Connection) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.loop.call_later(self.options.ttft_s, connection.answer)


def _chunk(body: bytes) -> bytes:
    event = b"data: %b\n\n" % body
    return b"%x\r\n%b\r\n" % (len(event), event)


class _Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._transport: Any = None
        self._buffer = b""
        self._serving = False
        self._body: dict[str, Any] = {}
        self._chat = False
        self._left = 0
        self._sent = 0
        self._piece = b""
        self._head: dict[str, Any] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._serving:
            self._next()

    def _next(self) -> None:
        """Take the next whole request from the buffer, if there is one."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._buffer[:end].split(b"\r\n")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        length = int(headers.get(b"content-length", b"0"))
        if len(self._buffer) < end + 4 + length:
            if headers.get(b"expect"):
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        body = self._buffer[end + 4 : end + 4 + length]
        self._buffer = self._buffer[end + 4 + length :]
        self._serving = True
        method, path = lines[0].split(b" ")[:2]
        self._route(method, path.partition(b"?")[0], headers, body)

    def _route(self, method: bytes, path: bytes, headers: dict[bytes, bytes], body: bytes) -> None:
        options = self._stub.options
        key = options.api_key.encode()
        if key and headers.get(b"authorization") != b"Bearer " + key:
            self._json(401, {"error": {"message": "wrong key", "type": "invalid_request_error"}})
        elif path == b"/v1/models":
            entry = {"id": options.model, "object": "model", "created": 0, "owned_by": "stub"}
            self._json(200, {"object": "list", "data": [entry]})
        elif path in (b"/health", b"/"):
            self._json(200, {})
        elif method == b"POST" and path in (b"/v1/completions", b"/v1/chat/completions"):
            self._chat = path == b"/v1/chat/completions"
            try:
                self._body = orjson.loads(body)
            except orjson.JSONDecodeError as error:
                self._json(400, {"error": {"message": f"not JSON: {error}"}})
                return
            if self._stub.refuses():
                self._json(503, {"error": {"message": "overloaded", "type": "server_error"}})
            else:
                self._stub.begin(self)
        else:
            self._json(404, {"error": {"message": f"no {path.decode()}"}})

    def _json(self, status: int, value: Any) -> None:
        data = orjson.dumps(value)
        self._transport.write(_JSON % (status, _REASONS[status], len(data), data))
        self._served()

    def _served(self) -> None:
        self._serving = False
        if self._buffer:
            self._stub.loop.call_soon(self._next)

    def answer(self) -> None:
        """The time to the first token has passed."""
        if self._transport is None:
            self._stub.end()
            return
        body, options = self._body, self._stub.options
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS
        self._left, self._sent = int(wanted), 0
        self._head = {
            "id": f"stub-{self._stub.requests}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": 0,
            "model": body.get("model") or options.model,
        }
        if not body.get("stream"):
            self._whole()
            return
        text = " tok" * options.tokens_per_chunk
        self._piece = _chunk(orjson.dumps(self._head | {"choices": [self._choice(text, None)]}))
        first = _STREAM
        if self._chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            role["finish_reason"] = None
            first += _chunk(orjson.dumps(self._head | {"choices": [role]}))
        self._transport.write(first)
        self._step()

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        if self._chat:
            return {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}

    def _step(self) -> None:
        """One chunk; the last one carries the finish reason, usage and the end mark."""
        if self._transport is None:
            self._stub.end()
            return
        size = self._stub.options.tokens_per_chunk
        self._sent += min(size, self._left)
        self._left -= size
        if self._left > 0:
            self._transport.write(self._piece)
            delay_s = self._stub.options.itl_s
            if delay_s:
                self._stub.loop.call_later(delay_s, self._step)
            else:
                self._stub.loop.call_soon(self._step)
            return
        tokens = self._sent % size or size
        last = self._head | {"choices": [self._choice(" tok" * tokens, "length")]}
        pieces = [_chunk(orjson.dumps(last))]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            pieces.append(
                _chunk(orjson.dumps(self._head | {"choices": [], "usage": self._usage()}))
            )
        self._transport.write(b"".join([*pieces, _chunk(b"[DONE]"), _END]))
        self._stub.end()
        self._served()

    def _whole(self) -> None:
        text = " tok" * self._left
        self._sent = self._left
        if self._chat:
            message = {"role": "assistant", "content": text}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "length"}
            self._head["object"] = "chat.completion"
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        self._json(200, self._head | {"choices": [choice], "usage": self._usage()})
        self._stub.end()

    def _usage(self) -> dict[str, int]:
        prompt = self._body.get("prompt", "")
        if self._chat:
            prompt = " ".join(str(each.get("content")) for each in self._body.get("messages", ()))
        count = len(prompt) if isinstance(prompt, list) else prompt.count(" ") + 1
        return {
            "prompt_tokens": count,
            "completion_tokens": self._sent,
            "total_tokens": count + self._sent,
        }


async def serve(options: StubOptions, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
    """A server that is listening on a free port, unless one is given. Raises OSError."""
    stub = Stub(options)
    return await asyncio.get_running_loop().create_server(
        lambda: _Connection(stub), host, port, backlog=4096
    )
