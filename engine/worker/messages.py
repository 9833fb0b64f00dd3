"""Bodies of the control API: parsed strictly, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.sequence import Sampling
from engine.worker.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Key:
    """One attempt at one request. A later attempt never meets the cache of an earlier one."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Destination:
    """The data plane of the decode instance, as its /health says."""

    host: str
    port: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """`prompt` are engine tokens; `system_tokens`, `cached_tokens`, `held_tokens` and
    `block_tokens` are lengths in the modelled system (0 without one). `waited_s` is how long ago
    the request arrived where it came in first. Without a destination, decode happens here.
    """

    key: Key
    prompt: list[int]
    system_tokens: int
    cached_tokens: int
    held_tokens: int
    block_tokens: int
    tenant: str
    sampling: Sampling
    destination: Destination | None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """Send the first `pages` whole pages of `prompt` (engine tokens), and the state at their end,
    from the prefix cache here to that of `destination`, which is thought to hold `held_pages`.
    """

    key: Key
    prompt: list[int]
    pages: int
    held_pages: int
    tenant: str
    destination: Destination


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """`max_tokens` counts the first token, which prefill sampled."""

    key: Key
    max_tokens: int
    ignore_eos: bool
    sampling: Sampling


def parse_prefill(body: Any, vocab: int) -> PrefillRequest:
    """Raises BadRequest."""
    fields = _object(body)
    destination = None
    if fields.get("destination") is not None:
        destination = _destination(fields)
    return PrefillRequest(
        key=parse_key(fields),
        prompt=token_ids(fields.get("prompt"), vocab),
        system_tokens=_whole(fields, "system_tokens", 0, 0),
        cached_tokens=_whole(fields, "cached_tokens", 0, 0),
        held_tokens=_whole(fields, "held_tokens", 0, 0),
        block_tokens=_whole(fields, "block_tokens", 0, 0),
        tenant=_text(fields, "tenant", ""),
        sampling=parse_sampling(fields),
        destination=destination,
        waited_s=_seconds(fields, "waited_s"),
    )


def parse_prefix(body: Any, vocab: int, page_tokens: int) -> PrefixRequest:
    """Raises BadRequest."""
    fields = _object(body)
    prompt = token_ids(fields.get("prompt"), vocab)
    pages, held_pages = _whole(fields, "pages", 1), _whole(fields, "held_pages", 0, 0)
    if pages > len(prompt) // page_tokens or held_pages > pages:
        raise BadRequest(
            f"pages: {pages}, of them held {held_pages}; the prompt has "
            f"{len(prompt) // page_tokens} whole pages of {page_tokens} tokens"
        )
    return PrefixRequest(
        key=parse_key(fields),
        prompt=prompt,
        pages=pages,
        held_pages=held_pages,
        tenant=_text(fields, "tenant", ""),
        destination=_destination(fields),
    )


def parse_decode(body: Any) -> DecodeRequest:
    """Raises BadRequest."""
    fields = _object(body)
    return DecodeRequest(
        key=parse_key(fields),
        max_tokens=_whole(fields, "max_tokens", 1),
        ignore_eos=fields.get("ignore_eos", False) is True,
        sampling=parse_sampling(fields),
    )


def parse_key(body: Any) -> Key:
    """Raises BadRequest. An integer request id is taken as its decimal text."""
    fields = _object(body)
    request_id = fields.get("request_id")
    if isinstance(request_id, int) and not isinstance(request_id, bool):
        request_id = str(request_id)
    if not isinstance(request_id, str) or not 0 < len(request_id) <= 200:
        raise BadRequest(f"request_id: {request_id!r}; a string of 1 to 200 characters would do")
    return Key(request_id, _whole(fields, "attempt", 0, 1))


def parse_sampling(fields: Mapping[str, Any], default_temperature: float = 0.0) -> Sampling:
    """Raises BadRequest."""
    temperature = fields.get("temperature")
    if temperature is None:
        temperature = default_temperature
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise BadRequest(f"temperature: {temperature!r} is not a number")
    if not 0 <= temperature <= 100 or math.isnan(temperature):
        raise BadRequest(f"temperature: {temperature}; 0 to 100 would do")
    return Sampling(float(temperature), _whole(fields, "seed", 0, 0))


def token_ids(value: Any, vocab: int) -> list[int]:
    """A prompt as token ids. Raises BadRequest."""
    if not isinstance(value, list) or not value:
        raise BadRequest("prompt: a non-empty list of token ids would do")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab:
            raise BadRequest(f"prompt: {token!r} is not a token id below {vocab}")
    return value


def _destination(fields: Mapping[str, Any]) -> Destination:
    place = _object(fields.get("destination"), "destination")
    return Destination(
        _text(place, "host"), _whole(place, "port", 1), _whole(place, "incarnation", 0)
    )


def _object(value: Any, where: str = "body") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _text(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, str):
        raise BadRequest(f"{name}: {value!r} is not a string")
    return value


def _whole(fields: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = fields.get(name, default)
    if value is None and default is not None:
        value = default
    if type(value) is not int or value < least:
        raise BadRequest(f"{name}: {value!r}; a whole number >= {least} would do")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise BadRequest(f"{name}: {value!r}; seconds >= 0 would do")
    return float(value)
