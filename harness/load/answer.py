"""What the chunks of an OpenAI-compatible answer say: tokens, their times, and how it ended.

A token is content, reasoning, a tool call or a refusal; a chunk with only a role or an empty string
carries none. Counts come from the server's `usage` where it sends one.
"""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from harness.load.flight import Flight
from results.records import Status

DONE = b"[DONE]"
_SHOWN_CHARS = 300


def read_event(flight: Flight, payload: bytes, now: float) -> None:
    """Take in one event of a stream, received at `now`. Problems become the flight's failure."""
    if payload == DONE:
        return
    try:
        chunk = orjson.loads(payload)
        choices = chunk.get("choices")
    except (orjson.JSONDecodeError, AttributeError):
        flight.fail(f"not a JSON object in the stream: {payload[:80]!r}")
        return
    if choices:
        for choice in choices:
            _read_choice(flight, choice, choice.get("delta"), now)
    if chunk.get("error"):
        flight.fail(f"error in the stream: {error_text(chunk['error'])}")
    if chunk.get("usage"):
        _read_usage(flight, chunk["usage"])


def read_whole(flight: Flight, body: bytes, now: float) -> None:
    """Take in an answer that came as one JSON document, received whole at `now`."""
    if not body:
        return
    try:
        answer = orjson.loads(body)
        choices = answer.get("choices") or ()
    except (orjson.JSONDecodeError, AttributeError):
        flight.fail(f"not a JSON object: {body[:80]!r}")
        return
    if answer.get("error"):
        flight.fail(f"error: {error_text(answer['error'])}")
        return
    for choice in choices:
        _read_choice(flight, choice, choice.get("message"), now)
    if answer.get("usage"):
        _read_usage(flight, answer["usage"])


def judge(flight: Flight) -> None:
    """How the flight ended, now that nothing more comes."""
    if flight.failure:
        flight.status = Status.FAILED
    elif not flight.finish_reason:
        flight.fail(
            f"truncated: the answer ended after {flight.tokens_received} tokens "
            "without a finish reason"
        )
    else:
        flight.status = Status.SUCCEEDED


def error_text(error: Any) -> str:
    """The message of an error in any of the forms that servers use."""
    if isinstance(error, dict):
        for key in ("message", "detail", "msg", "error"):
            if error.get(key):
                return error_text(error[key])
    return " ".join(str(error).split())[:_SHOWN_CHARS]


def refusal_text(status: int, body: bytes) -> str:
    """Why a request was refused, from an answer that is not 200."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body.decode("utf-8", "replace")
    text = error_text(said) if said else ""
    return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def _read_choice(flight: Flight, choice: dict[str, Any], delta: Any, now: float) -> None:
    if delta is None:
        answer: Any = choice.get("text")
        thought: Any = None
    else:
        answer = delta.get("content") or delta.get("tool_calls") or delta.get("refusal")
        thought = delta.get("reasoning_content") or delta.get("reasoning")
    ids = choice.get("token_ids")
    if answer or thought or ids:
        flight.chunk_s.append(now)
        if ids:
            if flight.chunk_tokens is None:
                flight.chunk_tokens = array("l", [1] * (len(flight.chunk_s) - 1))
            flight.chunk_tokens.append(len(ids))
        elif flight.chunk_tokens is not None:
            flight.chunk_tokens.append(1)
        if flight.first_answer_s is None and (answer or not thought):
            flight.first_answer_s = now
    reason = choice.get("finish_reason")
    if reason:
        flight.finish_reason = str(reason)
        if reason == "error":
            flight.fail("the server ended the answer with finish reason error")


def _read_usage(flight: Flight, usage: dict[str, Any]) -> None:
    # A server that reports usage with every chunk ends with the total.
    tokens = usage.get("completion_tokens")
    if isinstance(tokens, int):
        flight.server_tokens = tokens
    prompt = usage.get("prompt_tokens")
    if isinstance(prompt, int):
        flight.prompt_tokens = prompt
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        flight.cached_tokens = details["cached_tokens"]
