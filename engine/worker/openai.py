"""OpenAI-compatible completions, so that any load generator can drive a worker in role `both`.

The engine has no tokenizer: a prompt is a list of token ids. A text prompt is taken word by word; a
word that is a token id stands for it, any other for a token chosen by its hash. Answers are the
token ids as text, one word each.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from engine.sequence import Sequence
from engine.worker.errors import BadRequest, WorkerError
from engine.worker.messages import Key, parse_sampling, token_ids
from engine.worker.worker import Token, Worker

DEFAULT_MAX_TOKENS = 16


def add_openai_routes(app: web.Application, worker: Worker) -> None:
    """/v1/completions and /v1/models."""
    numbers = itertools.count(1)
    model = worker.engine.model.config.name

    async def models(_: web.Request) -> web.Response:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "prfaas-bench"}
        return web.json_response({"object": "list", "data": [entry]})

    async def completions(request: web.Request) -> web.StreamResponse:
        name = f"cmpl-{worker.incarnation:x}-{next(numbers)}"
        try:
            try:
                body = await request.json()
            except ValueError as error:
                raise BadRequest(f"the body is not JSON: {error}") from error
            sequence = parse_completion(body, name, worker)
            head = {
                "id": name,
                "object": "text_completion",
                "created": int(time.time()),
                "model": model,
            }
            tokens = worker.stream(Key(name, 0), sequence)
            if body.get("stream"):
                options = body.get("stream_options") or {}
                usage = options.get("include_usage") is True
                return await _stream(request, head, sequence, tokens, usage)
            ids = [token.id async for token in tokens]
        except WorkerError as error:
            return web.json_response(_error(error), status=error.status)
        choice = _choice(ids, sequence.finish)
        return web.json_response({**head, "choices": [choice], "usage": _usage(sequence)})

    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])


def parse_completion(body: Any, name: str, worker: Worker) -> Sequence:
    """Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    vocab = worker.engine.model.config.vocab
    if body.get("n", 1) != 1 or body.get("echo"):
        raise BadRequest("n other than 1 and echo are not supported")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = [_word_id(word, vocab) for word in prompt.split()]
    max_tokens = body.get("max_tokens")
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    if type(max_tokens) is not int or max_tokens < 1:
        raise BadRequest(f"max_tokens: {max_tokens!r}; a whole number >= 1 would do")
    return Sequence(
        id=name,
        tokens=list(token_ids(prompt, vocab)),
        max_tokens=max_tokens,
        tenant=str(body.get("user") or ""),
        sampling=parse_sampling(body),
        stop_tokens=_stops(body, worker, vocab),
        arrived_s=time.monotonic(),
    )


def _stops(body: dict[str, Any], worker: Worker, vocab: int) -> frozenset[int]:
    """End of text unless ignored, `stop_token_ids`, and `stop` strings of one word each."""
    stops = set() if body.get("ignore_eos") is True else set(worker.engine.stop_tokens)
    listed = body.get("stop_token_ids") or []
    words = body.get("stop") or []
    words = [words] if isinstance(words, str) else words
    if not isinstance(listed, list) or not isinstance(words, list):
        raise BadRequest("stop and stop_token_ids must be lists")
    stops.update(token_ids(listed, vocab) if listed else ())
    stops.update(_word_id(str(word).strip(), vocab) for word in words)
    return frozenset(stops)


def _word_id(word: str, vocab: int) -> int:
    if word.isdecimal() and int(word) < vocab:
        return int(word)
    return zlib.crc32(word.encode()) % vocab


async def _stream(
    request: web.Request,
    head: dict[str, Any],
    sequence: Sequence,
    tokens: AsyncGenerator[Token],
    include_usage: bool,
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    started = False

    async def send(value: object) -> None:
        nonlocal started
        if not started:
            await response.prepare(request)
            started = True
        text = value if isinstance(value, str) else json.dumps(value)
        await response.write(f"data: {text}\n\n".encode())

    usage = {"usage": None} if include_usage else {}
    try:
        async for token in tokens:
            await send({**head, "choices": [_choice([token.id], token.finish)], **usage})
    except WorkerError as error:
        if not started:
            raise
        await send(_error(error))
    else:
        if include_usage:
            await send({**head, "choices": [], "usage": _usage(sequence)})
        await send("[DONE]")
    finally:
        await tokens.aclose()
    await response.write_eof()
    return response


def _choice(ids: list[int], finish: str) -> dict[str, Any]:
    return {
        "index": 0,
        "text": "".join(f" {token}" for token in ids),
        "token_ids": ids,
        "logprobs": None,
        "finish_reason": finish or None,
    }


def _usage(sequence: Sequence) -> dict[str, int]:
    prompt, output = sequence.prompt_tokens, sequence.generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def _error(error: WorkerError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.kind}}
