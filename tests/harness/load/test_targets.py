"""Targets against servers that implement the documented fields."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Dynamo, Server, SglangHalf, VllmDecode, VllmPrefill, refuse
from scripted import make_request

from harness.errors import BadInput, NotReady
from harness.load.driver import Driver
from harness.load.flight import Flight
from harness.load.schedule import OpenSchedule
from harness.targets.base import Api, Kind, TargetSpec
from harness.targets.completion import Completion
from harness.targets.endpoint import Endpoint
from harness.targets.factory import make_target
from harness.targets.routing import PairRouter
from results.records import Status
from workloads.request import Request


async def load(spec: TargetSpec, count: int = 4, *, input_tokens: int = 8) -> list[Flight]:
    """`count` requests through the target, all at once."""
    target = make_target(spec)
    flights: list[Flight] = []
    driver = Driver(target, flights.append)
    try:
        await target.probe()
        requests = (Request(k, 0.0, input_tokens, 3) for k in range(count))
        loop = asyncio.get_running_loop()
        await driver.run(OpenSchedule(requests), "load", loop.time(), drain_s=20.0)
    finally:
        await target.close()
    return sorted(flights, key=lambda each: each.request.id)


def succeeded(flights: list[Flight]) -> bool:
    assert [each.failure for each in flights] == [""] * len(flights)
    return all(each.status is Status.SUCCEEDED for each in flights)


# vLLM


async def test_a_vllm_pair_hands_its_caches_over() -> None:
    prefill = VllmPrefill()
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR, prefill_urls=(prefill.url,), decode_urls=(decode.url,)
        )
        flights = await load(spec)
    assert succeeded(flights)
    assert not prefill.kept
    ids = [sorted(seen[0]["x-request-id"] for seen in side.seen) for side in (prefill, decode)]
    assert ids[0] == ids[1] and len(set(ids[0])) == 4
    assert [each.rsplit("-", 1)[0] for each in ids[0]] == [f"load-{k}" for k in range(4)]
    for each in flights:
        assert each.pool_wait_s is not None
    # The two halves carry one prompt.
    prompts = [{seen[1]["prompt"] for seen in side.seen} for side in (prefill, decode)]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 4
    for each in flights:
        assert each.sent_s is not None and each.prefill_finished_s is not None
        assert each.sent_s <= each.prefill_finished_s <= each.chunk_s[0]
        assert each.prefill_instance and each.decode_instance


def test_a_wait_for_a_connection_begins_when_it_was_asked_for() -> None:
    for asked_s, wait_s in ((None, 4.5), (5.0, 0.5)):
        flight = Flight(make_request(), "load", 0.0, 1.0, 0, 1.0, sent_s=1.0)
        exchange = Completion(flight, lambda flight: None, asked_s)
        exchange.started(5.5, True, lambda reason: None)
        # Another attempt is no other wait.
        exchange.started(7.5, True, lambda reason: None)
        assert flight.pool_wait_s == wait_s


async def test_waits_for_a_prefill_servers_connection_count() -> None:
    prefill = VllmPrefill()
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR,
            prefill_urls=(prefill.url,),
            decode_urls=(decode.url,),
            max_connections=1,
        )
        flights = await load(spec, 3)
    assert succeeded(flights)
    # The one connection is free for the third when the first two prefills have ended.
    first, *_, last = sorted(flights, key=lambda each: each.prefill_finished_s or 0.0)
    assert first.prefill_finished_s is not None and last.prefill_started_s is not None
    assert last.pool_wait_s is not None
    assert last.pool_wait_s >= first.prefill_finished_s - last.prefill_started_s


async def test_short_prompts_stay_with_the_decode_server() -> None:
    prefill = VllmPrefill()
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR,
            prefill_urls=(prefill.url,),
            decode_urls=(decode.url,),
            threshold_tokens=100,
        )
        assert succeeded(await load(spec, input_tokens=99))
        assert (decode.alone, len(prefill.seen)) == (4, 0)
        assert succeeded(await load(spec, input_tokens=100))
        assert (decode.alone, len(prefill.seen)) == (4, 4)


async def test_a_prefill_server_without_a_connector_is_named() -> None:
    prefill = VllmPrefill()
    prefill.kv_connector = False
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR, prefill_urls=(prefill.url,), decode_urls=(decode.url,)
        )
        flights = await load(spec, 1)
    assert "kv_transfer_params" in flights[0].failure


async def test_a_prefill_that_ended_the_text_is_decoded_without_its_cache() -> None:
    prefill = VllmPrefill()
    prefill.stops = True
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR, prefill_urls=(prefill.url,), decode_urls=(decode.url,)
        )
        assert succeeded(await load(spec, 2))
    assert (len(prefill.seen), decode.alone) == (2, 2)


async def test_what_forbids_an_answer_of_one_token_reaches_the_decode_server_only() -> None:
    prefill = VllmPrefill()
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR,
            prefill_urls=(prefill.url,),
            decode_urls=(decode.url,),
            extra_body={"min_tokens": 3, "top_p": 0.5, "stream_options": {"include_usage": True}},
        )
        assert succeeded(await load(spec, 1))
    bodies = [side.seen[0][1] for side in (prefill, decode)]
    assert [each.get("min_tokens") for each in bodies] == [None, 3]
    assert [each["top_p"] for each in bodies] == [0.5, 0.5]


async def test_runs_do_not_repeat_each_others_request_ids() -> None:
    prefill = VllmPrefill()
    async with prefill, VllmDecode(prefill) as decode:
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR, prefill_urls=(prefill.url,), decode_urls=(decode.url,)
        )
        assert succeeded(await load(spec, 2)) and succeeded(await load(spec, 2))
    assert len({seen[0]["x-request-id"] for seen in decode.seen}) == 4


async def test_prefill_and_decode_servers_are_taken_in_turn() -> None:
    prefills = [VllmPrefill(), VllmPrefill()]
    async with prefills[0], prefills[1], VllmDecode(prefills[0]) as decode:
        decode._prefill.kept = prefills[1].kept = prefills[0].kept
        spec = TargetSpec(
            kind=Kind.VLLM_PAIR,
            prefill_urls=(prefills[0].url, prefills[1].url),
            decode_urls=(decode.url,),
        )
        await load(spec, 6)
    assert [len(each.seen) for each in prefills] == [3, 3]


# Policies over pairs


@pytest.mark.parametrize(
    ("policy", "remote", "local"),
    [("homogeneous", 0, 8), ("naive", 8, 0), ("prfaas", 4, 4)],
)
async def test_a_policy_chooses_who_prefills(policy: str, remote: int, local: int) -> None:
    """Half of the prompts are longer than the threshold."""
    sides = [VllmPrefill(), VllmPrefill()]
    async with sides[0], sides[1], VllmDecode(sides[0]) as decode:
        sides[1].kept = sides[0].kept
        target = make_target(
            TargetSpec(
                kind=Kind.VLLM_PAIR,
                remote_prefill_urls=(sides[0].url,),
                prefill_urls=(sides[1].url,),
                decode_urls=(decode.url,),
                policy=policy,
                threshold_tokens=50,
            )
        )
        await target.probe()
        flights: list[Flight] = []
        driver = Driver(target, flights.append, max_concurrency=1)
        requests = (Request(k, 0.0, 20 if k % 2 else 80, 3) for k in range(8))
        loop = asyncio.get_running_loop()
        await driver.run(OpenSchedule(requests), "load", loop.time(), closed=True, drain_s=20.0)
        await target.close()
    assert succeeded(flights)
    assert [len(each.seen) for each in sides] == [remote, local]
    for each in flights:
        if policy == "prfaas":
            wanted = "prfaas" if each.request.input_tokens > 50 else "pd"
            assert each.prefill_cluster == wanted


async def test_balanced_uses_both_sides() -> None:
    router = PairRouter("balanced", 0.0, remote=1, local=1, decode=1)
    chosen = [router.choose(make_request(k), 0.0).prefill_cluster for k in range(100)]
    assert 40 <= chosen.count("prfaas") <= 60


async def test_accounts_are_settled_and_rates_observed() -> None:
    router = PairRouter("naive", 0.0, remote=2, local=0, decode=2)
    decisions = [router.choose(make_request(k), 0.0) for k in range(4)]
    assert sorted(each.prefill_key for each in decisions) == [0, 0, 1, 1]
    assert sorted(each.decode_key for each in decisions) == [0, 0, 1, 1]
    for each in decisions:
        router.prefilled(each, make_request(), 1.0, 0.5)
        router.ended(each, make_request())
    model = router._models["prfaas"]
    assert model.tokens_per_s == pytest.approx(8 / 0.5)
    decode = router._view.decode["pd"]
    assert [(decode.active(key), decode.tokens[key]) for key in range(2)] == [(0, 0), (0, 0)]
    assert router._view.prefill["prfaas"].busy_s == [1.0, 1.0]


# SGLang


async def test_an_sglang_pair_meets_in_one_room() -> None:
    rooms: dict[int, asyncio.Event] = {}
    async with SglangHalf(rooms, True) as prefill, SglangHalf(rooms, False) as decode:
        spec = TargetSpec(
            kind=Kind.SGLANG_PAIR, prefill_urls=(prefill.url,), decode_urls=(decode.url,)
        )
        flights = await load(spec)
    assert succeeded(flights)
    assert len(rooms) == 4
    assert all(0 <= room < 2**63 for room in rooms)
    for (_, one), (_, other) in zip(
        sorted(prefill.seen, key=lambda seen: seen[1]["bootstrap_room"]),
        sorted(decode.seen, key=lambda seen: seen[1]["bootstrap_room"]),
        strict=True,
    ):
        assert one == other


async def test_each_prefill_server_has_its_bootstrap_port() -> None:
    rooms: dict[int, asyncio.Event] = {}
    halves = [SglangHalf(rooms, True), SglangHalf(rooms, True)]
    async with halves[0], halves[1], Server() as decode:
        halves[1].port = 8999
        spec = TargetSpec(
            kind=Kind.SGLANG_PAIR,
            prefill_urls=(halves[0].url, halves[1].url),
            decode_urls=(decode.url,),
            bootstrap_ports=(8998, 8999),
        )
        assert succeeded(await load(spec, 4))
    assert [len(each.seen) for each in halves] == [2, 2]


async def test_the_bootstrap_host_is_written_as_in_a_url() -> None:
    for host in ("[fd00::1]", "10.0.0.1", "prefill"):
        assert Endpoint(TargetSpec(), f"http://{host}:30000").host == host


async def test_a_prefill_server_that_refuses_ends_the_request() -> None:
    rooms: dict[int, asyncio.Event] = {}
    async with SglangHalf(rooms, True) as prefill, SglangHalf(rooms, False) as decode:
        prefill.refuses = True
        spec = TargetSpec(
            kind=Kind.SGLANG_PAIR, prefill_urls=(prefill.url,), decode_urls=(decode.url,)
        )
        flights = await load(spec, 2)
    assert [each.failure for each in flights] == ["prefill: HTTP 500: out of memory"] * 2


# Dynamo and llm-d


async def test_dynamo_says_which_workers_served() -> None:
    async with Dynamo() as server:
        flights = await load(TargetSpec(kind=Kind.DYNAMO, base_urls=(server.url,)), 2)
    assert succeeded(flights)
    assert {(each.prefill_instance, each.decode_instance) for each in flights} == {("7", "9")}


async def test_llm_d_names_prefill_servers_in_turn_and_none_for_short_prompts() -> None:
    async with Server() as server:
        spec = TargetSpec(
            kind=Kind.LLM_D,
            base_urls=(server.url,),
            prefill_urls=("http://10.0.0.1:8000", "http://10.0.0.2:8000"),
            threshold_tokens=50,
        )
        assert succeeded(await load(spec, 4, input_tokens=60))
        assert succeeded(await load(spec, 1, input_tokens=10))
    named = [seen[0].get("x-prefiller-host-port") for seen in server.seen]
    assert sorted(named[:4]) == ["10.0.0.1:8000"] * 2 + ["10.0.0.2:8000"] * 2
    assert named[4] is None


# OpenAI


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("streamed", [True, False])
async def test_the_stub_in_every_form(
    api: Api, streamed: bool, stub_url: Callable[..., str]
) -> None:
    spec = TargetSpec(base_urls=(stub_url(),), api=api, stream=streamed)
    flights = await load(spec)
    assert succeeded(flights)
    for each in flights:
        assert (each.server_tokens, each.prompt_tokens, each.finish_reason) == (3, 8, "length")
        assert each.client_tokens == (3 if streamed else 1)


async def test_the_body_is_as_asked() -> None:
    async with Server() as server:
        spec = TargetSpec(
            base_urls=(server.url + "/v1/",),
            ignore_eos=True,
            extra_body={"top_p": 0.5},
            headers={"X-Team": "a"},
            prompt_vocab=1000,
        )
        await load(spec, 1, input_tokens=20)
    headers, body = server.seen[0]
    assert headers["x-team"] == "a"
    prompt = body.pop("prompt")
    assert len(prompt) == 20 and all(0 <= each < 1000 for each in prompt)
    assert body == {
        "model": "fake",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_p": 0.5,
    }


async def test_several_servers_are_taken_in_turn() -> None:
    async with Server() as one, Server() as other:
        assert succeeded(await load(TargetSpec(base_urls=(one.url, other.url)), 6))
    assert (len(one.seen), len(other.seen)) == (3, 3)


async def test_keys_come_from_the_environment(
    stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = stub_url("--api-key", "s3cret")
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert succeeded(await load(TargetSpec(base_urls=(url,), api_key_env="MY_KEY"), 1))
    monkeypatch.setenv("MY_KEY", "wrong")
    with pytest.raises(NotReady, match="HTTP 401"):
        await load(TargetSpec(base_urls=(url,), api_key_env="MY_KEY"), 1)


async def test_proxies_of_the_environment_are_ignored(
    stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert succeeded(await load(TargetSpec(base_urls=(stub_url(),)), 1))


async def test_a_proxy_that_was_asked_for_is_used() -> None:
    """The proxy answers itself: what counts is that it was asked, and for which URL."""
    asked: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b"\r\n")[0].decode())
        body = json.dumps({"data": [{"id": "far"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        spec = TargetSpec(base_urls=("http://far.invalid:81",), proxy=f"http://127.0.0.1:{port}")
        target = make_target(spec)
        assert await target.probe() == "far"
        await target.close()
    assert asked == ["GET http://far.invalid:81/v1/models HTTP/1.1"]


async def test_nobody_there_is_not_ready() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    target = make_target(TargetSpec(base_urls=(f"http://127.0.0.1:{port}",)))
    with pytest.raises(NotReady, match="is the server up"):
        await target.probe()
    await target.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
async def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadInput, match="needs http"):
        make_target(TargetSpec(base_urls=(url,)))


async def test_keys_in_urls_are_refused() -> None:
    with pytest.raises(BadInput, match="environment") as caught:
        make_target(TargetSpec(base_urls=("http://me:s3cret@host",)))
    assert "s3cret" not in str(caught.value)


# Connections


async def raw_server(answer: Callable[[int, bytes], bytes]) -> tuple[asyncio.Server, str]:
    """Answers the n-th request on all connections with bytes, and closes where there are none."""
    numbers = iter(range(1000))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                sent = answer(next(numbers), body)
                if not sent:
                    break
                writer.write(sent)
                await writer.drain()
                if b"Connection: close" in sent:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def whole(more: bytes = b"") -> bytes:
    body = json.dumps(
        {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    ).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (len(body), more) + body


async def in_turn(url: str, count: int, **settings: Any) -> list[Flight]:
    """`count` requests one after the other, without a probe."""
    target = make_target(TargetSpec(base_urls=(url,), stream=False, **settings))
    flights: list[Flight] = []
    driver = Driver(target, flights.append, max_concurrency=1)
    loop = asyncio.get_running_loop()
    requests = (make_request(k) for k in range(count))
    await driver.run(OpenSchedule(requests), "load", loop.time(), closed=True, drain_s=10.0)
    await target.close()
    return flights


async def test_a_kept_connection_that_was_closed_costs_a_counted_attempt() -> None:
    server, url = await raw_server(lambda number, body: b"" if number == 1 else whole())
    async with server:
        flights = await in_turn(url, 3)
    assert [(each.status, each.attempts) for each in flights] == [
        (Status.SUCCEEDED, 1),
        (Status.SUCCEEDED, 2),
        (Status.SUCCEEDED, 1),
    ]


async def test_a_new_connection_that_is_closed_fails() -> None:
    server, url = await raw_server(lambda number, body: b"")
    async with server:
        flights = await in_turn(url, 2)
    assert [each.attempts for each in flights] == [1, 1]
    assert all(each.failure.startswith("connection lost") for each in flights)


async def test_a_body_that_breaks_off_is_truncated_and_not_sent_again() -> None:
    cut = whole()[:-5] + b""

    def answer(number: int, body: bytes) -> bytes:
        return cut.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if number else whole()

    server, url = await raw_server(answer)
    async with server:
        flights = await in_turn(url, 2)
    assert [each.attempts for each in flights] == [1, 1]
    assert flights[1].failure.startswith("truncated")


async def test_connections_are_not_reused_where_the_server_says_so() -> None:
    server, url = await raw_server(lambda number, body: whole(b"Connection: close\r\n"))
    async with server:
        flights = await in_turn(url, 3)
    assert [each.new_connection for each in flights] == [True] * 3
    assert {each.status for each in flights} == {Status.SUCCEEDED}


async def test_what_is_not_http_fails() -> None:
    server, url = await raw_server(lambda number, body: b"NOPE\r\n\r\n")
    async with server:
        flights = await in_turn(url, 1)
    assert "not an HTTP/1.1 response" in flights[0].failure


async def test_refusals_are_told_apart() -> None:
    class Busy(Server):
        async def serve(self, request: Any, body: dict[str, Any]) -> Any:
            return refuse("busy", 503)

    async with Busy() as server:
        flights = await load(TargetSpec(base_urls=(server.url,)), 2)
    assert [each.failure for each in flights] == ["HTTP 503: busy"] * 2
    assert [each.http_status for each in flights] == [503, 503]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(authority, certificate, key) for localhost."""
    from engine.transport.certificates import make_authority, make_certificate

    authority = make_authority(tmp_path)
    cert, key = make_certificate(tmp_path, "localhost")
    return authority, cert, key


async def tls_server(certificate: tuple[Path, Path, Path]) -> tuple[asyncio.Server, str]:
    _, cert, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(whole(b"Connection: close\r\n"))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    return server, f"https://localhost:{server.sockets[0].getsockname()[1]}"


async def test_tls_with_an_authority_of_ones_own(certificate: tuple[Path, Path, Path]) -> None:
    server, url = await tls_server(certificate)
    async with server:
        flights = await in_turn(url, 2, ca_file=str(certificate[0]))
        unverified = await in_turn(url, 1, verify_tls=False)
        refused = await in_turn(url, 1)
    assert {each.status for each in flights + unverified} == {Status.SUCCEEDED}
    assert refused[0].status is Status.FAILED
    assert "certificate" in refused[0].failure


async def test_tls_through_a_proxy_is_tunnelled(certificate: tuple[Path, Path, Path]) -> None:
    asked: list[bytes] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b" ")[0])
        port = int(head.split(b" ")[1].rpartition(b":")[2])
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pipe(reader, far_writer), pipe(far_reader, writer))

    server, url = await tls_server(certificate)
    async with server, await asyncio.start_server(proxy, "127.0.0.1", 0) as through:
        port = through.sockets[0].getsockname()[1]
        flights = await in_turn(
            url, 2, ca_file=str(certificate[0]), proxy=f"http://127.0.0.1:{port}"
        )
    assert [each.failure for each in flights] == ["", ""]
    assert asked == [b"CONNECT", b"CONNECT"]
