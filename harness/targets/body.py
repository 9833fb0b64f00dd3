"""Request bodies of the OpenAI APIs, put together from bytes made once and a prompt made now."""

from __future__ import annotations

import json
from typing import Any

from harness.load.flight import Flight
from harness.load.words import prompt_ids, prompt_text
from harness.targets.base import Api, TargetSpec

PATHS = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}
#: The member that bounds the answer, as each API names it.
LIMITS = {Api.COMPLETIONS: "max_tokens", Api.CHAT: "max_completion_tokens"}


class BodyBuilder:
    """Bodies for `spec`. `model` is the name sent; "" leaves it out."""

    def __init__(self, spec: TargetSpec, model: str) -> None:
        self._vocab = spec.prompt_vocab if spec.api is Api.COMPLETIONS else 0
        named = f'"model":{json.dumps(model)},' if model else ""
        if spec.api is Api.CHAT:
            self._before = f'{{{named}"messages":[{{"role":"user","content":'.encode()
            self._after = b"}]"
        else:
            self._before = f'{{{named}"prompt":'.encode()
            self._after = b""
        field = spec.max_tokens_field or LIMITS[spec.api]
        self._limit = f',"{field}":%d'.encode()
        fixed: dict[str, Any] = {}
        if spec.temperature is not None:
            fixed["temperature"] = spec.temperature
        if spec.ignore_eos:
            fixed["ignore_eos"] = True
        fixed.update(spec.extra_body)
        self._fixed = _members(fixed)
        self._streamed = _members({"stream": True, "stream_options": {"include_usage": True}})
        self._whole = _members({"stream": False})

    def build(
        self,
        flight: Flight,
        *,
        stream: bool,
        max_tokens: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """The body for `flight`, with the members of `extra` beside the usual ones."""
        request = flight.request
        limit = request.output_tokens if max_tokens is None else max_tokens
        return b"".join(
            (
                self._before,
                self.prompt(flight),
                self._after,
                self._limit % limit,
                self._streamed if stream else self._whole,
                self._fixed,
                _members({"user": request.tenant}) if request.tenant else b"",
                _members(extra) if extra else b"",
                b"}",
            )
        )

    def prompt(self, flight: Flight) -> bytes:
        """The prompt as JSON: a string of words, or an array of ids."""
        if self._vocab:
            return prompt_ids(flight.request, self._vocab, flight.seed)
        return b'"%b"' % prompt_text(flight.request, flight.seed)


def _members(values: dict[str, Any]) -> bytes:
    """`,"key":value` for each: what follows other members of an object."""
    pairs = (f",{json.dumps(key)}:{json.dumps(each)}" for key, each in values.items())
    return "".join(pairs).encode()
