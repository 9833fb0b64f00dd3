"""ShareGPT-style multi-turn JSON: an array or lines of {"id", "conversations": [{"from", "value"}]}

Each answer of the assistant becomes one request whose prompt is everything before it. What the
files do not hold is estimated: BYTES_PER_TOKEN bytes of UTF-8 count as one token (no tokenizer is
run), prefix blocks are BLOCK_TOKENS such tokens of the text itself, and times are invented:
conversation k starts at k seconds and its turns follow TURN_S apart. Use an arrival process for
anything that depends on time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from workloads.request import Request
from workloads.traces.chain import chained
from workloads.traces.rows import DAMAGED, Place, open_text

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 16
TURN_S = 30.0
ASSISTANT = frozenset({"gpt", "assistant", "chatgpt", "bard", "bing", "model"})
_BLOCK_BYTES = BYTES_PER_TOKEN * BLOCK_TOKENS
_READ_CHARS = 1 << 20
_MAX_ITEM_CHARS = 64 << 20


def read(path: str) -> Iterator[tuple[Place, Request]]:
    """Requests conversation by conversation (readers.in_order merges them by time)."""
    number = 0
    for index, (place, item) in enumerate(_items(path)):
        session = str(item.get("id", index)) if isinstance(item, dict) else ""
        prompt = bytearray()
        turn = 0
        for speaker, text in _messages(place, item):
            data = f"{text}\n".encode("utf-8", "replace")
            if speaker in ASSISTANT and prompt and text:
                yield place, _request(number, index + turn * TURN_S, bytes(prompt), data, session)
                number += 1
                turn += 1
            prompt += f"{speaker}: ".encode() + data


def _request(number: int, arrival_s: float, prompt: bytes, answer: bytes, session: str) -> Request:
    blocks = (prompt[start : start + _BLOCK_BYTES] for start in range(0, len(prompt), _BLOCK_BYTES))
    return Request(
        number,
        arrival_s,
        -(-len(prompt) // BYTES_PER_TOKEN),
        -(-len(answer) // BYTES_PER_TOKEN),
        chained(blocks),
        BLOCK_TOKENS,
        session=session,
    )


def _messages(place: Place, item: Any) -> Iterator[tuple[str, str]]:
    conversation = None
    if isinstance(item, dict):
        conversation = item.get("conversations", item.get("messages"))
    if not isinstance(conversation, list):
        raise place.error('needs an object with a list "conversations" or "messages"')
    for message in conversation:
        if not isinstance(message, dict):
            raise place.error(f"found the message {message!r:.60}, needs an object")
        speaker = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise place.error(
                'a message needs text in "from" and "value" (or "role" and "content"); '
                f"found {sorted(message)}"
            )
        yield speaker, text


def _items(path: str) -> Iterator[tuple[Place, Any]]:
    """The elements of a JSON array, or of a sequence of JSON values, one at a time."""
    decode = json.JSONDecoder().raw_decode
    with open_text(path) as text:
        buffer, start, line = "", 0, 1
        ended = False
        while True:
            while start < len(buffer) and buffer[start] in " \t\r\n,[]":
                line += buffer[start] == "\n"
                start += 1
            place = Place(path, line)
            item: Any = None
            stop = start
            if start < len(buffer):
                try:
                    item, stop = decode(buffer, start)
                except ValueError as error:
                    if ended or len(buffer) - start > _MAX_ITEM_CHARS:
                        raise place.error(f"is not JSON ({error})") from None
            # A value at the very end of what was read may go on, so it waits for more text.
            if stop > start and (stop < len(buffer) or ended):
                yield place, item
                line += buffer.count("\n", start, stop)
                start = stop
            elif ended:
                return
            else:
                try:
                    more = text.read(_READ_CHARS)
                except DAMAGED as error:
                    raise place.error(f"cannot be read further: {error}") from None
                ended = not more
                buffer, start = buffer[start:] + more, 0
