"""Worker processes from a nursery: their HTTP API, their failures, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.in_use import in_use_bytes

pytest.importorskip("torch")

PACING = {
    "prefill": {"quadratic_s": [0.2, 1e-6, 0.0]},
    "decode": {"step_s": 0.2, "max_batch": 4, "phases": 2},
}


class Owner:
    """The nursery's owner, as a fleet is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(folder / "owner.sock"))
        listener.listen(1)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.worker.nursery", "--socket", folder / "owner.sock"]
        )
        listener.settimeout(60)
        self.connection, _ = listener.accept()
        listener.close()
        self.connection.settimeout(60)
        self._lines = self.connection.makefile("rb")
        self._exits: dict[int, int] = {}
        self._number = 0
        assert self.hear() == {"ready": True}

    def hear(self) -> dict[str, Any]:
        return json.loads(self._lines.readline())

    def fork(self, name: str, *argv: str, at: str = "socket") -> int:
        self._number += 1
        where = ["--socket", str(self.folder / f"{name}.sock")] if at == "socket" else []
        message = {
            "id": self._number,
            "argv": [*where, "--name", name, "--page-tokens", "16", "--slots", "16", *argv],
            "log": str(self.folder / f"{name}.log"),
            "netns": None,
        }
        self.connection.sendall(json.dumps(message).encode() + b"\n")
        while "pid" not in (reply := self.hear()):
            self._exits[reply["exit"]] = reply["status"]
        assert reply["id"] == self._number
        return reply["pid"]

    def exit_of(self, pid: int) -> int:
        while pid not in self._exits:
            reply = self.hear()
            self._exits[reply["exit"]] = reply["status"]
        return self._exits[pid]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def owner(tmp_path_factory) -> Iterator[Owner]:
    owner = Owner(tmp_path_factory.mktemp("nursery"))
    yield owner
    owner.connection.shutdown(socket.SHUT_RDWR)
    assert owner.process.wait(10) == 0


@contextlib.asynccontextmanager
async def client(owner: Owner, name: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(owner.folder / f"{name}.sock"))
    async with aiohttp.ClientSession("http://worker", connector=connector) as session:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get("/health") as response:
                    if (await response.json())["state"] == "ready":
                        break
            await asyncio.sleep(0.05)
        yield session


async def call(session, path, body=None, status=200) -> Any:
    method = "GET" if body is None else "POST"
    async with session.request(method, path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_prefill_and_decode_over_http(owner, engine, tmp_path):
    pacing = tmp_path / "pace.json"
    pacing.write_text(json.dumps(PACING))
    p = owner.fork("p", "--role", "prefill", "--pacing", str(pacing), "--cluster", "remote")
    d = owner.fork("d", "--role", "decode", "--pacing", str(pacing))
    prompt = [(7 * n) % 256 for n in range(50)]
    async with client(owner, "p") as to_p, client(owner, "d") as to_d:
        health = await call(to_d, "/health")
        assert (health["role"], health["pid"]) == ("decode", d)
        body = {
            "request_id": "r1",
            "attempt": 1,
            "prompt": prompt,
            "system_tokens": 50 * 64,
            "destination": {**health["data"], "incarnation": health["incarnation"]},
        }
        began_s = time.monotonic()
        # Two at once: one queue, so the second starts at the modelled end of the first.
        first, second = await asyncio.gather(
            call(to_p, "/prefill", body), call(to_p, "/prefill", {**body, "request_id": "r2"})
        )
        # Two connections: either may be heard first.
        first, second = sorted((first, second), key=lambda result: result["started_s"])
        assert began_s <= first["started_s"] and first["delivered_s"] <= time.monotonic()
        modelled_s = 0.2 + 1e-6 * 3200
        for result in (first, second):
            assert result["finished_s"] - result["started_s"] >= modelled_s - 1e-9
        if not first["overrun"]:
            assert second["started_s"] - first["started_s"] == pytest.approx(modelled_s, abs=1e-6)
        decode = {"request_id": "r1", "attempt": 1, "max_tokens": 4, "ignore_eos": True}
        async with to_d.post("/decode", json=decode) as response:
            assert response.content_type == "application/x-ndjson"
            lines = [json.loads(line) async for line in response.content]
        expected = engine().generate(prompt, 4)
        assert [line["token"] for line in lines[:-1]] == expected
        assert first["first_token"] == second["first_token"] == expected[0]
        times = [line["t_s"] for line in lines[1:-1]]
        assert times[0] - lines[0]["admitted_s"] >= 0.2 - 1e-9
        assert lines[-1]["done"] and lines[-1]["finish"] == "length"
        missing = await call(to_d, "/decode", decode, status=404)
        assert missing["error"] == "unknown_request"
        await call(to_d, "/abandon", {"request_id": "r2", "attempt": 1})
        stats = await call(to_d, "/stats")
        assert (stats["arrivals"], stats["leases"], stats["received_caches"]) == (0, 0, 2)
        memory = stats["memory"]
        if in_use_bytes() is not None:
            assert memory["in_use_bytes"] > memory["plane_in_use_bytes"] > 2**20
        bad = await call(to_p, "/prefill", {**body, "prompt": [1, 999]}, status=400)
        assert bad == {"error": "bad_request", "message": "prompt: 999 is not a token id below 256"}
        refused = await call(to_p, "/v1/completions", {"prompt": [1]}, status=503)
        assert refused["error"]["code"] == "not_ready"
        async with to_d.get("/metrics") as response:
            assert 'prfaas_worker_requests_total{outcome="decodes"} 1.0' in await response.text()
        converted = await call(to_p, "/convert", {"role": "decode"})
        assert converted == {"role": "decode", "state": "ready"}
    os.kill(p, signal.SIGTERM)
    os.kill(d, signal.SIGTERM)
    assert owner.exit_of(p) == owner.exit_of(d) == 0
    assert not (owner.folder / "p.sock").exists()


async def test_completions_as_openai_clients_see_them(owner, engine):
    pid = owner.fork("both")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = engine().generate(prompt, 6)
    async with client(owner, "both") as session:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "ignore_eos": True}
        whole = await call(session, "/v1/completions", body)
        assert whole["choices"][0]["token_ids"] == expected
        assert whole["choices"][0]["text"] == "".join(f" {token}" for token in expected)
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
        }
        stopped = await call(session, "/v1/completions", {**body, "stop": [str(expected[2])]})
        assert stopped["choices"][0]["token_ids"] == expected[: expected.index(expected[2]) + 1]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with session.post("/v1/completions", json=body | options) as response:
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert [c["choices"][0]["token_ids"][0] for c in chunks[:-1]] == expected
        finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
        assert finishes == [None] * 5 + ["length"]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
        long = {"prompt": [1] * 20_000, "max_tokens": 1}
        refused = await call(session, "/v1/completions", long, status=422)
        assert refused["error"]["type"] == "invalid_request_error"
        refused = await call(session, "/v1/completions", {"prompt": []}, status=400)
        assert "non-empty list" in refused["error"]["message"]
        # A client that leaves in the middle of a stream frees everything.
        body = {**body, "max_tokens": 5000, "stream": True}
        async with session.post("/v1/completions", json=body) as response:
            await response.content.readline()
        for _ in range(200):
            stats = await call(session, "/stats")
            if not stats["jobs"] and not stats["leases"]:
                break
            await asyncio.sleep(0.02)
        assert (stats["jobs"], stats["leases"]) == (0, 0)
        assert stats["requests"]["cancelled"] == 1
    os.kill(pid, signal.SIGKILL)
    assert owner.exit_of(pid) == -signal.SIGKILL


async def test_a_killed_decode_worker_fails_the_transfer(owner, tmp_path):
    pacing = tmp_path / "pace.json"
    pacing.write_text(json.dumps({**PACING, "prefill": {"quadratic_s": [1.0, 0.0, 0.0]}}))
    p = owner.fork("kp", "--role", "prefill", "--pacing", str(pacing))
    d = owner.fork("kd", "--role", "decode")
    async with client(owner, "kp") as to_p, client(owner, "kd") as to_d:
        health = await call(to_d, "/health")
        body = {
            "request_id": "r1",
            "attempt": 1,
            "prompt": [5] * 50,
            "destination": {**health["data"], "incarnation": health["incarnation"]},
        }
        prefilling = asyncio.create_task(call(to_p, "/prefill", body, status=502))
        for _ in range(400):
            if (await call(to_d, "/stats"))["arrivals"]:
                break
            await asyncio.sleep(0.01)
        os.kill(d, signal.SIGKILL)
        failed = await prefilling
        assert failed["error"] == "transfer_failed"
        stats = await call(to_p, "/stats")
        assert (stats["jobs"], stats["leases"]) == (0, 0)
    os.kill(p, signal.SIGTERM)
    assert (owner.exit_of(d), owner.exit_of(p)) == (-signal.SIGKILL, 0)


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        (["--model", "huge"], 2, "prfaas worker: model shape 'huge' is unknown"),
        (["--pacing", "/none.json"], 2, "prfaas worker: pacing file /none.json: "),
        (["--pages", "0"], 2, "prfaas worker: --pages 0; 1 or more would do"),
        (["--data-host", "192.0.2.1"], 3, "prfaas worker: data plane on 192.0.2.1: "),
        (["--role", "cook"], 2, "invalid choice: 'cook'"),
        (
            ["--authority", "/no.pem", "--key", "/no.key", "--certificate", "/no.crt"],
            2,
            "prfaas worker: /no.crt: no such file",
        ),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(argv, status, line, owner):
    name = f"bad{argv[0]}"
    assert owner.exit_of(owner.fork(name, *argv)) == status
    last = owner.log(name).strip().splitlines()[-1]
    assert line in last and "Traceback" not in owner.log(name)


def test_a_busy_address_is_named(owner):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pid = owner.fork("busy", "--listen", f"127.0.0.1:{port}", at="listen")
        assert owner.exit_of(pid) == 3
    expected = f"prfaas worker: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert owner.log("busy").strip().splitlines()[-1] == expected


def test_workers_end_with_a_killed_nursery(tmp_path):
    owner = Owner(tmp_path)
    pid = owner.fork("w")
    planes: list[int] = []
    for _ in range(400):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if (planes := [int(child) for child in children]) and "ready" in owner.log("w"):
            break
        time.sleep(0.05)
    assert planes
    owner.process.kill()
    owner.process.wait()
    for _ in range(200):
        if gone(pid) and all(map(gone, planes)):
            break
        time.sleep(0.05)
    assert gone(pid) and all(map(gone, planes))
