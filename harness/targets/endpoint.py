"""One HTTP endpoint: its connections, its request heads, and small calls beside the load."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import orjson

from harness.errors import BadInput, NotReady
from harness.load.alarm import Due
from harness.load.answer import refusal_text
from harness.load.http1 import host_header, request_head
from harness.load.pool import Exchange, Origin, Pool
from harness.targets.base import TargetSpec


class Endpoint:
    """The server at `url`. Paths are joined to the URL's own, of which a last /v1 may be part."""

    def __init__(self, spec: TargetSpec, url: str, due: Due | None = None) -> None:
        parts = urlsplit(url)
        try:
            sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            sound = False
        if not sound:
            raise BadInput(f"URL {url!r}: needs http://HOST:PORT or https://HOST[:PORT]")
        if parts.username or parts.password:
            raise BadInput("URL with a user or password in it: give keys through the environment")
        self.url = url
        self.name = parts.netloc
        self._parts = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        proxy = None
        if spec.proxy:
            through = urlsplit(spec.proxy)
            if through.scheme != "http" or not through.hostname:
                raise BadInput(f"--proxy {spec.proxy!r}: needs http://HOST:PORT")
            proxy = (through.hostname, through.port or 8080)
        tls = _tls(spec) if parts.scheme == "https" else None
        # Plain HTTP through a proxy names the whole URL; a tunnel does not.
        self._prefix = f"http://{host_header(parts)}" if proxy and tls is None else ""
        self.pool = Pool(Origin.of(parts, tls, proxy), spec.max_connections, due)
        self._headers = {"Accept": "*/*", "User-Agent": "prfaas-bench"} | spec.headers
        key = os.environ.get(spec.api_key_env, "")
        if key and not any(name.lower() == "authorization" for name in self._headers):
            self._headers["Authorization"] = f"Bearer {key}"

    @property
    def host(self) -> str:
        """As in URLs: an IPv6 address stands in brackets."""
        host = self._parts.hostname or ""
        return f"[{host}]" if ":" in host else host

    def heads(self, path: str, method: str = "POST") -> Callable[[bytes, str], bytes]:
        """A function from (body, X-Request-Id and further header lines) to a whole message."""
        headers = self._headers | {"Content-Type": "application/json"}
        target = self._prefix + self._root + path
        try:
            before, after = request_head(target, host_header(self._parts), headers, method)
        except ValueError as error:
            raise BadInput(f"--header: {error}") from None

        def message(body: bytes, lines: str = "") -> bytes:
            extra = f"\r\n{lines}".encode("latin-1") if lines else b""
            return b"%b%d%b%b%b" % (before, len(body), extra, after, body)

        return message

    async def call(
        self,
        path: str,
        body: bytes = b"",
        *,
        method: str = "POST",
        lines: str = "",
        on_start: Callable[[float], None] = lambda now: None,
    ) -> tuple[int, bytes]:
        """(status, body) of one small request; `on_start` is told each time that it has got a
        connection (loop's clock). Raises ConnectionError.
        """
        call = _Call(asyncio.get_running_loop().create_future(), on_start)
        self.pool.submit(self.heads(path, method)(body, lines), call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def probe(self, timeout_s: float = 10.0) -> str:
        """The first model of /v1/models, or "" where there is no such list. Raises NotReady."""
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self.call("/v1/models", method="GET")
        except (OSError, TimeoutError) as error:
            raise NotReady(
                f"{self.url}: {error or f'no answer in {timeout_s:g} s'}; "
                "is the server up, and the port right?"
            ) from None
        if status in (401, 403):
            raise NotReady(f"{self.url}: {refusal_text(status, body)}; set the key's variable")
        if status >= 500:
            raise NotReady(f"{self.url}: {refusal_text(status, body)}")
        return _first_model(body) if status == 200 else ""

    def close(self) -> None:
        self.pool.close()


class _Call(Exchange):
    """A request whose whole answer is awaited."""

    def __init__(
        self, answer: asyncio.Future[tuple[int, bytes]], on_start: Callable[[float], None]
    ) -> None:
        self.answer = answer
        self._on_start = on_start
        self._pieces: list[bytes] = []
        self._abort: Callable[[str], None] | None = None

    def cancel(self) -> None:
        if self._abort is not None:
            self._abort("cancelled")

    def started(self, now: float, fresh: bool, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._on_start(now)
        if self.answer.done():
            abort("cancelled")

    def body(self, status: int, headers: dict[bytes, bytes], data: bytes, now: float) -> None:
        self._pieces.append(data)

    def ended(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        self._abort = None
        if not self.answer.done():
            self.answer.set_result((status, b"".join(self._pieces)))

    def failed(self, reason: str, now: float) -> None:
        self._abort = None
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(reason))


def _tls(spec: TargetSpec) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=spec.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"--ca-file {spec.ca_file}: {error}") from None
    if not spec.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _first_model(body: bytes) -> str:
    try:
        listed: Any = orjson.loads(body)
        return str(listed["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""
