"""Server-sent events without I/O: bytes in, payloads out, whatever the boundaries of the reads.

Follows the WHATWG event stream format, with one exception: an event that the end of the stream cuts
off before its empty line counts (servers end with `data: [DONE]` and no newline). Payloads stay
bytes, so a character cut by a read is never decoded in halves.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class SseParser:
    """One stream. `feed` gives the payloads (their `data` lines joined by newlines) of the events
    that are whole by now; `finish` what the end of the stream left open.
    """

    __slots__ = ("_after_cr", "_begun", "_between", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._after_cr = False
        self._begun = False
        #: Begun, and nothing is left of the reads before.
        self._between = False

    def feed(self, data: bytes) -> list[bytes]:
        if (
            self._between
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and b"\r" not in data
        ):
            # One whole event of one line, as most reads of a stream are.
            return [data[6:-2]]
        if self._after_cr and data:
            # The line ended at the CR already; its LF is not another line's end.
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data[-1:] == b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._tail:
            data = self._tail + data
        if not self._begun:
            if _BOM.startswith(data[:3]) and len(data) < 3:
                self._tail = data
                return []
            self._begun = True
            data = data.removeprefix(_BOM)
        blocks = data.split(b"\n\n")
        self._tail = blocks.pop()
        self._between = not self._tail and not self._after_cr
        payloads = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                payloads.append(block[6:])
            else:
                payload = _payload(block)
                if payload is not None:
                    payloads.append(payload)
        return payloads

    def finish(self) -> list[bytes]:
        tail, self._tail = self._tail, b""
        payload = _payload(tail)
        return [] if payload is None else [payload]


def _payload(block: bytes) -> bytes | None:
    """The data of one event; None when it has no data line (a comment, an id, a retry time)."""
    lines = []
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        if name == b"data":
            lines.append(value[1:] if colon and value[:1] == b" " else value)
    return b"\n".join(lines) if lines else None
