"""A small measuring pair for links: `serve` on one side, `drive` on the other, JSON between.

    python -m harness.links.prober serve HOST            prints the port it listens on
    python -m harness.links.prober drive HOST PORT JSON  prints one JSON object

Runs in the sides' namespaces as processes of its own, so that measuring takes no time from the
harness. Rates are of TCP payload at the receiver: `shape.GOODPUT_SHARE` of the frames.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from typing import Any

_BLOCK_BYTES = 1 << 18
_DATAGRAM_BYTES = 200
_UDP_OVERHEAD_BYTES = 42
_BATCH_DATAGRAMS = 2000
_TCP_CONGESTION = 13
_SO_RCVBUFFORCE = 33


def serve(host: str) -> None:
    server = socket.create_server((host, 0), backlog=64)
    print(server.getsockname()[1], flush=True)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve_one, args=(connection, host), daemon=True).start()


def _serve_one(connection: socket.socket, host: str) -> None:
    with contextlib.suppress(OSError), connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = json.loads(_read_line(connection))
        if request["mode"] == "echo":
            while data := connection.recv(64):
                connection.sendall(data)
        elif request["mode"] == "sink":
            answer = _sink(connection, request["warm_up_s"], request["duration_s"])
            connection.sendall(json.dumps(answer).encode() + b"\n")
        else:
            _count_datagrams(connection, host)


def _sink(connection: socket.socket, warm_up_s: float, duration_s: float) -> dict[str, float]:
    """Receive to the end; payload bytes and seconds of the window after the warm-up."""
    buffer = bytearray(_BLOCK_BYTES)
    began_s = time.monotonic()
    first_s = last_s = 0.0
    counted = 0
    while received := connection.recv_into(buffer):
        now_s = time.monotonic()
        if now_s - began_s < warm_up_s:
            continue
        if not first_s:
            first_s = last_s = now_s
        elif now_s - first_s <= duration_s:
            counted += received
            last_s = now_s
    return {"bytes": counted, "seconds": last_s - first_s}


def _count_datagrams(connection: socket.socket, host: str) -> None:
    """Tell the client a UDP port; at each `sync` line answer how many datagrams have come so far.

    A link keeps order, so when a `sync` arrives, what was sent before it waits here or is lost.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        with contextlib.suppress(OSError):
            receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 23)
        receiver.bind((host, 0))
        receiver.setblocking(False)
        connection.sendall(json.dumps({"port": receiver.getsockname()[1]}).encode() + b"\n")
        received = 0
        while _read_line(connection):
            with contextlib.suppress(BlockingIOError):
                while receiver.recv(2048):
                    received += 1
            connection.sendall(json.dumps({"received": received}).encode() + b"\n")


def drive(host: str, port: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Run the parts of `plan`: `rtt_count`, `rate_s` (with `connections`), `loss_packets`."""
    result: dict[str, Any] = {}
    if count := plan.get("rtt_count"):
        result["rtt_s"] = measure_rtt(host, port, count)
    if duration_s := plan.get("rate_s"):
        result["goodput_bps"] = measure_goodput(
            host,
            port,
            duration_s,
            plan.get("warm_up_s", 1.0),
            plan.get("connections", 1),
            plan.get("congestion"),
        )
    if packets := plan.get("loss_packets"):
        result["loss"] = measure_loss(host, port, packets, plan["loss_bps"])
    return result


def measure_rtt(host: str, port: int, count: int) -> dict[str, float]:
    """Median, minimum and 95th percentile of one-byte round trips, seconds."""
    connection = _connect(host, port, {"mode": "echo"})
    times = []
    with connection:
        for _ in range(count + 3):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - began)
            time.sleep(0.002)
    # The first few pay for waking processes and filling caches.
    times = sorted(times[3:])
    return {
        "median": statistics.median(times),
        "min": times[0],
        "p95": times[int(0.95 * (len(times) - 1))],
    }


def measure_goodput(
    host: str,
    port: int,
    duration_s: float,
    warm_up_s: float,
    connections: int,
    congestion: str | None,
) -> float:
    """Payload bit/s at the receiver over `duration_s`, all connections together."""
    rates: list[float] = []

    def send() -> None:
        request = {"mode": "sink", "warm_up_s": warm_up_s, "duration_s": duration_s}
        connection = _connect(host, port, request, congestion)
        block = bytes(_BLOCK_BYTES)
        ends_s = time.monotonic() + warm_up_s + duration_s + 0.3
        with connection:
            while time.monotonic() < ends_s:
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            answer = json.loads(_read_line(connection))
        if answer["seconds"]:
            rates.append(answer["bytes"] * 8 / answer["seconds"])

    threads = [threading.Thread(target=send) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def measure_loss(host: str, port: int, packets: int, rate_bps: float) -> float:
    """Share of `packets` small datagrams, paced to `rate_bps` of frames, that did not arrive.

    After each batch the receiver is asked to empty its socket, so that none is lost there.
    """
    connection = _connect(host, port, {"mode": "datagrams"})
    received = 0
    with connection, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        target = (host, json.loads(_read_line(connection))["port"])
        gap_s = (_DATAGRAM_BYTES + _UDP_OVERHEAD_BYTES) * 8 / rate_bps
        datagram = bytes(_DATAGRAM_BYTES)
        for first in range(0, packets, _BATCH_DATAGRAMS):
            began_s = time.monotonic()
            for index in range(min(_BATCH_DATAGRAMS, packets - first)):
                if index % 16 == 0 and (early_s := began_s + index * gap_s - time.monotonic()) > 0:
                    time.sleep(early_s)
                sender.sendto(datagram, target)
            connection.sendall(b"sync\n")
            received = json.loads(_read_line(connection))["received"]
    return 1 - received / packets


def _connect(
    host: str, port: int, request: dict[str, Any], congestion: str | None = None
) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, congestion.encode())
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


def _read_line(connection: socket.socket) -> bytes:
    """One line, a byte at a time: what follows it belongs to the caller."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data:
            raise ConnectionError("the other side closed the connection")
        line += data
    return line


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(drive(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))))


if __name__ == "__main__":
    main()
