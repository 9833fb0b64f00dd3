"""HTTP/1.1 responses without I/O: bytes in, body bytes out (RFC 9112).

Only what a client that POSTs and reads one response at a time needs: interim (1xx) responses are
skipped, a body ends by its length, by its last chunk or with the connection. No compression is ever
asked for.
"""

from __future__ import annotations

from urllib.parse import SplitResult

_MAX_HEAD_BYTES = 64 << 10
_MAX_CHUNK_LINE_BYTES = 1 << 10
_SHORT_SIZE_BYTES = 8

_HEAD, _LENGTH, _SIZE, _CHUNK, _TRAILER, _UNTIL_CLOSE, _ENDED = range(7)


class ProtocolError(Exception):
    """The bytes are not an HTTP/1.1 response, or end before it does."""


class ResponseParser:
    """One response. After `feed`, `status` is set once the head is whole and `ended` with the body.

    `keep_alive` says whether the connection can carry another request after this one.
    """

    __slots__ = ("_left", "_state", "_tail", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = True
        self._state = _HEAD
        self._tail = b""
        self._left = 0

    @property
    def ended(self) -> bool:
        return self._state == _ENDED

    @property
    def begun(self) -> bool:
        """Whether any byte of a response has come."""
        return self.status != 0 or bool(self._tail)

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`. Raises ProtocolError."""
        if self._state == _SIZE and not self._tail:
            # One whole chunk, as most reads of a stream are.
            end = data.find(b"\r\n", 0, _SHORT_SIZE_BYTES)
            try:
                stop = end + 2 + int(data[:end], 16)
            except ValueError:
                stop = -1
            if len(data) == stop + 2 > end + 4 and data[stop:] == b"\r\n":
                return data[end + 2 : stop]
        if self._tail:
            data = self._tail + data
            self._tail = b""
        state = self._state
        if state == _HEAD:
            data = self._head(data)
            state = self._state
        if state in (_SIZE, _CHUNK, _TRAILER):
            return self._chunked(data)
        if state == _LENGTH:
            if len(data) >= self._left:
                if len(data) > self._left:
                    self.keep_alive = False
                    data = data[: self._left]
                self._state = _ENDED
            self._left -= len(data)
            return data
        if state == _UNTIL_CLOSE:
            return data
        if state == _ENDED and data:
            # Bytes after the response belong to none: the connection cannot be trusted further.
            self.keep_alive = False
        return b""

    def eof(self) -> None:
        """The connection ended. Raises ProtocolError when the response had not."""
        if self._state == _UNTIL_CLOSE:
            self._state = _ENDED
        if self._state != _ENDED:
            raise ProtocolError(
                "closed before the response began"
                if not self.begun
                else "closed before the response's end"
            )

    def _head(self, data: bytes) -> bytes:
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD_BYTES:
                    raise ProtocolError(f"a response head of more than {_MAX_HEAD_BYTES} bytes")
                self._tail = data
                return b""
            lines = data[:end].split(b"\r\n")
            data = data[end + 4 :]
            parts = lines[0].split(b" ", 2)
            if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
                raise ProtocolError(f"not an HTTP/1.1 response: {lines[0][:60]!r}")
            status = int(parts[1])
            if status < 100 or status >= 200:
                break
        self.status = status
        headers = self.headers
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        connection = headers.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in connection and (
            parts[0] != b"HTTP/1.0" or b"keep-alive" in connection
        )
        length = headers.get(b"content-length")
        if status in (204, 304):
            self._state = _ENDED
        elif b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._state = _SIZE
        elif length is None:
            self._state = _UNTIL_CLOSE
            self.keep_alive = False
        elif not length.isdigit():
            raise ProtocolError(f"Content-Length {length[:40]!r} is not a number")
        else:
            self._left = int(length)
            self._state = _LENGTH if self._left else _ENDED
        return data

    def _chunked(self, data: bytes) -> bytes:
        pieces = []
        at, size = 0, len(data)
        state, left = self._state, self._left
        while at < size:
            if state == _CHUNK:
                # The chunk's own CRLF is counted in `left`.
                stop = at + left
                if stop <= size:
                    if data[stop - 2 : stop] != b"\r\n":
                        raise ProtocolError("a chunk that does not end where its size says")
                    pieces.append(data[at : stop - 2])
                    at, state = stop, _SIZE
                    continue
                body_end = min(size, stop - 2)
                if body_end > at:
                    pieces.append(data[at:body_end])
                    left -= body_end - at
                    at = body_end
                if at < size:
                    # Half of the CRLF: keep it, so that `left` stays 2.
                    self._tail = data[at:]
                break
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > _MAX_CHUNK_LINE_BYTES:
                    raise ProtocolError("a chunk-size line without end")
                self._tail = data[at:]
                break
            line = data[at:end]
            at = end + 2
            if state == _TRAILER:
                if not line:
                    state = _ENDED
                    if at < size:
                        self.keep_alive = False
                    break
                continue
            try:
                length = int(line.partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"not a chunk size: {line[:40]!r}") from None
            if length < 0:
                raise ProtocolError(f"not a chunk size: {line[:40]!r}")
            state, left = (_CHUNK, length + 2) if length else (_TRAILER, 0)
        self._state, self._left = state, left
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def request_head(
    target: str, host: str, headers: dict[str, str], method: str = "POST"
) -> tuple[bytes, bytes]:
    """The head of a request as (before, after) its Content-Length."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if "\r" in line or "\n" in line:
            raise ValueError(f"a header with a line break: {line[:40]!r}")
    return ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1"), b"\r\n\r\n"


def host_header(url: SplitResult) -> str:
    """The Host of `url`: the port only where it is not the scheme's own."""
    host = url.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    default = {"http": 80, "https": 443}.get(url.scheme)
    return host if url.port is None or url.port == default else f"{host}:{url.port}"
