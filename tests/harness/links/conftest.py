"""Fixtures of the link tests: what this host offers, and a traffic process on each side."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from harness.links.base import ShapedLink
from harness.links.factory import build
from harness.links.probe import Offers, probe
from harness.links.spec import parse_link

OpenLink = Callable[..., Awaitable[ShapedLink]]

#: A listener that counts to the end of each connection, then answers with the count.
SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    received = 0
    while data := connection.recv(1 << 18):
        received += len(data)
    connection.sendall(str(received).encode())
    connection.close()
"""
#: Sends some bytes, prints the answer and the seconds that it took.
SOURCE = """
import json, socket, sys, time
began = time.monotonic()
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
answer = b""
while data := connection.recv(4096):
    answer += data
print(json.dumps([int(answer), time.monotonic() - began]))
"""


@pytest.fixture(scope="session")
def offers() -> Offers:
    return probe()


@pytest.fixture
async def open_backend(offers: Offers) -> AsyncIterator[OpenLink]:
    """Opens a link of a backend, or skips with the reason; closes it at the end."""
    opened: list[ShapedLink] = []

    async def open_one(backend: str, **table: object) -> ShapedLink:
        if not offers.available(backend):
            pytest.skip(f"{backend}: {offers.by_backend[backend].reason}")
        link = build(parse_link({**table, "backend": backend}), ("prfaas", "pd"), False, offers)
        await link.open()
        opened.append(link)
        return link

    yield open_one
    for link in opened:
        await link.close()


class Traffic:
    """A counting listener on `side` of a link, and transfers to it."""

    def __init__(self, link: ShapedLink, side: str, port: int) -> None:
        self.link, self.side, self.port = link, side, port

    async def send(self, payload_bytes: int, crossing: bool = True) -> tuple[int, float]:
        """(bytes received, seconds) of one transfer from the other side, or from the same one."""
        link, host = self.link, self.link.bind_host(self.side)
        where = (host, self.port)
        source = self.side
        if crossing:
            where = await link.expose(self.side, host, self.port)
            source = next(side for side in link.sides if side != self.side)
        process = await asyncio.create_subprocess_exec(
            *link.launch_prefix(source),
            *(sys.executable, "-c", SOURCE, where[0], str(where[1]), str(payload_bytes)),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 40)
        received, seconds = json.loads(out)
        link.sample()
        return received, seconds


@pytest.fixture
async def listen() -> AsyncIterator[Callable[[ShapedLink, str], Awaitable[Traffic]]]:
    processes: list[asyncio.subprocess.Process] = []

    async def start(link: ShapedLink, side: str) -> Traffic:
        process = await asyncio.create_subprocess_exec(
            *link.launch_prefix(side),
            *(sys.executable, "-c", SINK, link.bind_host(side)),
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout
        return Traffic(link, side, int(await process.stdout.readline()))

    yield start
    for process in processes:
        process.kill()
        await process.wait()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After each test, this process owns no namespace."""
    yield
    mine = f"-{os.getpid()}-"
    left = [path.name for path in Path("/run/netns").glob("prfaas-*") if mine in path.name]
    if "open_backend" not in request.fixturenames:
        assert left == []
