"""Prefill/decode pairs whose client is the router: vLLM's and SGLang's hand-over protocols.

Without a policy, prefill and decode servers are taken in turn, each by itself, and a prompt shorter
than `threshold_tokens` is computed where it is decoded, as an ordinary request. With one, the
project's own policy chooses among remote and local prefill servers (`routing`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import orjson

from harness.errors import BadInput
from harness.load.alarm import Due
from harness.load.answer import error_text, refusal_text
from harness.load.flight import Flight
from harness.policies.base import NoRoute
from harness.targets.base import Done, TargetSpec
from harness.targets.body import PATHS, BodyBuilder
from harness.targets.completion import Completion
from harness.targets.endpoint import Endpoint
from harness.targets.routing import PairRouter
from harness.topology import PRFAAS

Message = Callable[[bytes, str], bytes]

#: What vLLM's prefill server is told: keep the cache for a decode server that will ask for it
#: (vLLM, NixlConnector and its proxy `toy_proxy_server.py`).
VLLM_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: What contradicts an answer of one token in one piece, and so must not reach a prefill server.
_NOT_FOR_PREFILL = frozenset(
    (
        *("min_tokens", "min_completion_tokens", "max_tokens", "max_completion_tokens"),
        "stream_options",
    )
)


class _Pair(ABC):
    """What both kinds share: the servers, in turn, and requests that need no hand-over."""

    def __init__(self, spec: TargetSpec, due: Due | None = None) -> None:
        self._spec = spec
        path = spec.endpoint or PATHS[spec.api]
        if not spec.decode_urls or not (spec.prefill_urls or spec.remote_prefill_urls):
            raise BadInput(f"target {spec.kind.value}: needs prefill and decode URLs")
        self._loop = asyncio.get_running_loop()
        self._local = [Endpoint(spec, url, due) for url in spec.prefill_urls]
        self._remote = [Endpoint(spec, url, due) for url in spec.remote_prefill_urls]
        decode = [Endpoint(spec, url, due) for url in spec.decode_urls]
        self._endpoints = self._local + self._remote + decode
        self._prefill = itertools.cycle(self._local + self._remote)
        self._decoders = [(each, each.heads(path)) for each in decode]
        self._decode = itertools.cycle(self._decoders)
        self._router: PairRouter | None = None
        if spec.policy:
            self._router = PairRouter(
                spec.policy,
                spec.threshold_tokens,
                len(self._remote),
                len(self._local),
                len(decode),
            )
        # Servers keep caches by request id for a while: ids of two runs must not be equal.
        self._run = secrets.token_hex(4)
        self._named(spec.model)
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_prefill: dict[int, Callable[[float | None], None]] = {}

    async def probe(self) -> str:
        models = [await each.probe() for each in self._endpoints]
        name = self._spec.model or models[-1]
        self._named(name)
        return name

    def _named(self, model: str) -> None:
        """Bodies from now on ask for `model`."""
        self._bodies = BodyBuilder(self._spec, model)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for each in self._endpoints:
            each.close()

    def send(self, flight: Flight, done: Done) -> None:
        if self._router is not None:
            self._route(self._router, flight, done)
            return
        decoder, message = next(self._decode)
        flight.decode_instance = decoder.name
        if flight.request.input_tokens < self._spec.threshold_tokens:
            body = self._bodies.build(flight, stream=self._spec.stream)
            decoder.pool.submit(message(body, self._lines(flight)), Completion(flight, done))
            return
        prefiller = next(self._prefill)
        flight.prefill_instance = prefiller.name
        self._hand_over(flight, done, prefiller, decoder, message)

    def _route(self, router: PairRouter, flight: Flight, done: Done) -> None:
        """Let the policy choose, and tell it how the prefill and the request ended."""
        request = flight.request
        begun_s = self._loop.time()
        try:
            decision = router.choose(request, begun_s)
        except NoRoute as error:
            self._loop.call_soon(self._failed, flight, str(error), done)
            return
        side = self._remote if decision.prefill_cluster == PRFAAS else self._local
        prefiller = side[decision.prefill_key]
        decoder, message = self._decoders[decision.decode_key]
        flight.prefill_cluster = decision.prefill_cluster
        flight.prefill_instance, flight.decode_instance = prefiller.name, decoder.name
        settled = False

        def prefilled(took_s: float | None) -> None:
            nonlocal settled
            if not settled:
                settled = True
                router.prefilled(decision, request, self._loop.time(), took_s)

        def ended(flight: Flight) -> None:
            finished_s = flight.prefill_finished_s
            self._on_prefill.pop(id(flight), None)
            prefilled(None if finished_s is None else finished_s - begun_s)
            router.ended(decision, request)
            done(flight)

        self._on_prefill[id(flight)] = prefilled
        self._hand_over(flight, ended, prefiller, decoder, message)

    def _prefilled(self, flight: Flight) -> None:
        """The prefill of `flight` has ended well."""
        flight.prefill_finished_s = now = self._loop.time()
        told = self._on_prefill.pop(id(flight), None)
        if told is not None and flight.prefill_started_s is not None:
            told(now - flight.prefill_started_s)

    @abstractmethod
    def _hand_over(
        self, flight: Flight, done: Done, prefiller: Endpoint, decoder: Endpoint, message: Message
    ) -> None:
        """Send both halves of `flight`, in whichever order the servers want; then call `done`."""

    def _lines(self, flight: Flight) -> str:
        """Both halves carry one id."""
        return f"X-Request-Id: {flight.phase}-{flight.request.id}-{self._run}"

    def _start(self, flight: Flight, work: Any, done: Done) -> None:
        """Run the coroutine `work` for `flight`, which its canceller then ends."""
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def cancel(reason: str) -> None:
            task.cancel()
            self._failed(flight, reason, done)

        flight.cancel = cancel

    def _failed(self, flight: Flight, reason: str, done: Done) -> None:
        if flight.ended_s is None:
            flight.fail(reason)
            flight.cancel = None
            flight.ended_s = self._loop.time()
            done(flight)


class VllmPair(_Pair):
    """POST to a prefill server with one token asked, then the same request, with the returned
    `kv_transfer_params`, to a decode server, which is streamed. A prefill that ended by itself (its
    one token was the end of the text) may return none: the decode server then computes the prompt.
    """

    def _named(self, model: str) -> None:
        super()._named(model)
        kept = {
            name: value
            for name, value in self._spec.extra_body.items()
            if name not in _NOT_FOR_PREFILL
        }
        self._prefill_bodies = BodyBuilder(
            self._spec.model_copy(update={"extra_body": kept}), model
        )

    def _hand_over(
        self, flight: Flight, done: Done, prefiller: Endpoint, decoder: Endpoint, message: Message
    ) -> None:
        self._start(flight, self._prefill_first(flight, done, prefiller, decoder, message), done)

    async def _prefill_first(
        self, flight: Flight, done: Done, prefiller: Endpoint, decoder: Endpoint, message: Message
    ) -> None:
        body = self._prefill_bodies.build(
            flight, stream=False, max_tokens=1, extra={"kv_transfer_params": VLLM_PREFILL}
        )
        flight.prefill_started_s = asked_s = self._loop.time()

        def started(now: float) -> None:
            if flight.pool_wait_s is None:
                flight.pool_wait_s = now - asked_s

        try:
            status, answer = await prefiller.call(
                self._path, body, lines=self._lines(flight), on_start=started
            )
        except ConnectionError as error:
            self._failed(flight, f"prefill: {error}", done)
            return
        if status != 200:
            self._failed(flight, f"prefill: {refusal_text(status, answer)}", done)
            return
        self._prefilled(flight)
        parameters, finish = _handed_over(answer)
        if not parameters and finish != "stop":
            self._failed(
                flight,
                "prefill: no kv_transfer_params in the answer; does the server run with a "
                "--kv-transfer-config?",
                done,
            )
            return
        extra = {"kv_transfer_params": parameters} if parameters else None
        body = self._bodies.build(flight, stream=self._spec.stream, extra=extra)
        exchange = Completion(flight, done, self._loop.time())
        decoder.pool.submit(message(body, self._lines(flight)), exchange)


class SglangPair(_Pair):
    """The same body to both servers at once, with where the decode server fetches the cache
    (`bootstrap_*`). The decode server's answer is streamed; a prefill server that refuses fails the
    request.
    """

    def __init__(self, spec: TargetSpec, due: Due | None = None) -> None:
        super().__init__(spec, due)
        # Rooms must not repeat while they are open, also among clients of one seed.
        self._rooms = random.SystemRandom()
        prefillers = self._local + self._remote
        ports = spec.bootstrap_ports
        if len(ports) == 1:
            ports *= len(prefillers)
        self._ports = dict(zip(prefillers, ports, strict=True))

    def _hand_over(
        self, flight: Flight, done: Done, prefiller: Endpoint, decoder: Endpoint, message: Message
    ) -> None:
        extra = {
            "bootstrap_host": prefiller.host,
            "bootstrap_port": self._ports[prefiller],
            "bootstrap_room": self._rooms.getrandbits(63),
        }
        body = self._bodies.build(flight, stream=self._spec.stream, extra=extra)
        flight.prefill_started_s = self._loop.time()
        decoder.pool.submit(message(body, self._lines(flight)), Completion(flight, done))
        task = self._loop.create_task(self._watch_prefill(flight, done, prefiller, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_prefill(
        self, flight: Flight, done: Done, prefiller: Endpoint, body: bytes
    ) -> None:
        try:
            status, answer = await prefiller.call(self._path, body, lines=self._lines(flight))
        except ConnectionError as error:
            self._refused(flight, f"prefill: {error}", done)
            return
        if status != 200:
            self._refused(flight, f"prefill: {refusal_text(status, answer)}", done)
        elif flight.ended_s is None and b'"error"' in answer[:4096]:
            self._refused(flight, f"prefill: {_error_of(answer)}", done)
        elif flight.ended_s is None:
            self._prefilled(flight)

    def _refused(self, flight: Flight, reason: str, done: Done) -> None:
        """The decode server would wait for a cache that never comes."""
        if flight.ended_s is not None:
            return
        if flight.cancel is not None:
            flight.cancel(reason)
        else:
            self._failed(flight, reason, done)


def _handed_over(answer: bytes) -> tuple[Any, str]:
    """(kv_transfer_params, finish reason) of a prefill's answer; (None, "") of another form."""
    try:
        said = orjson.loads(answer)
        return said.get("kv_transfer_params"), str(said["choices"][0].get("finish_reason"))
    except (orjson.JSONDecodeError, AttributeError, IndexError, KeyError, TypeError):
        return None, ""


def _error_of(answer: bytes) -> str:
    text = answer.removeprefix(b"data: ").split(b"\n\n")[0]
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return error_text(text.decode("utf-8", "replace"))
    return error_text(said.get("error") if isinstance(said, dict) else said)
