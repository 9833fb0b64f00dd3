"""Faults that other transports met, each on real processes: the right outcome, no leaked block, no
partial cache admitted. The wait in every test is bounded by what the transport promises, not by
what it happened to take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.transport.errors import TransferFailed, TransferRefused
from engine.transport.frames import (
    Frame,
    Header,
    Type,
    checksum,
    control_frame,
    encode_header,
    encode_table,
)
from engine.transport.messages import Hello, Key, Offer, decode_numbers
from engine.transport.outbound import Peer
from engine.transport.sockets import read_frame, write_frame
from engine.transport.timing import Deadlines, Limits

MIB = 1 << 20
#: Time for this machine to get round to what is due; no part of what is promised.
SLACK_S = 10.0
#: For tests in which connections break but nobody is given up.
PATIENT = Deadlines(give_up_s=20.0)
#: For tests in which the peer is gone and how soon that is found does not matter.
QUICK = Deadlines(peer_silence_s=0.5, give_up_s=0.7)


async def start_half(bench: Any, sender: Any, peer: Peer, key: Key) -> tuple[Any, Any]:
    """A transfer in progress: half of its layers are pushed, and some chunks have gone."""
    manifest = bench.manifest()
    transfer = await sender.open(peer, key, manifest)
    layout = bench.layout(manifest)
    for item in manifest.regions[:2]:
        transfer.push(item.region, [layout[item.region]])
    await asyncio.sleep(0.1)
    return transfer, manifest


def push_rest(bench: Any, transfer: Any) -> None:
    layout = bench.layout(transfer.manifest)
    for item in transfer.manifest.regions[2:]:
        transfer.push(item.region, [layout[item.region]])


async def fails(transfer: Any, match: str) -> float:
    """The commit fails once, for a reason that another attempt may cure. Returns seconds."""
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=match) as caught:
        async with asyncio.timeout(3.0 + SLACK_S):
            await transfer.commit()
    assert caught.value.retryable
    return time.monotonic() - started


# --- peer dies mid-layer -------------------------------------------------------------------------


async def test_receiver_dies_mid_layer(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender(deadlines=QUICK)
    transfer, manifest = await start_half(bench, sender, Peer(*receiver.address), Key("r"))
    os.kill(receiver.pid, signal.SIGKILL)
    push_rest(bench, transfer)
    await fails(transfer, "not heard")
    await receiver.closed
    assert (decoder.aborted, decoder.committed) == ([Key("r")], {})
    assert len(decoder.free) == decoder.blocks
    elsewhere, second = await bench.decoder()
    await bench.send(sender, Peer(*second.address), Key("r", 1), manifest)
    bench.assert_arrived(elsewhere, Key("r", 1), manifest)


async def test_sender_dies_mid_layer(bench: Any) -> None:
    decoder, receiver = await bench.decoder(deadlines=QUICK)
    sender = await bench.sender()
    transfer, manifest = await start_half(bench, sender, Peer(*receiver.address), Key("r"))
    os.kill(sender.pid, signal.SIGKILL)
    with pytest.raises(TransferFailed, match="has ended"):
        transfer._raise_unless_committed(await transfer._ended)
    await bench.until(lambda: decoder.aborted == [Key("r")])
    assert len(decoder.free) == decoder.blocks
    again = await bench.sender()
    await bench.send(again, Peer(*receiver.address), Key("r", 1), manifest)
    bench.assert_arrived(decoder, Key("r", 1), manifest)


# --- link flaps or stalls ------------------------------------------------------------------------


async def test_link_flaps_and_the_transfer_resumes(bench: Any) -> None:
    decoder, receiver = await bench.decoder(deadlines=PATIENT)
    sender = await bench.sender(deadlines=PATIENT)
    proxy = await bench.proxy(receiver)
    peer = Peer("127.0.0.1", proxy.port)
    transfer, manifest = await start_half(bench, sender, peer, Key("r"))
    for _ in range(3):
        proxy.cut()
        await asyncio.sleep(0.2)
    push_rest(bench, transfer)
    stats = await transfer.commit()
    bench.assert_arrived(decoder, Key("r"), manifest)
    # What had arrived was not sent again: the whole is 6.5 MiB.
    assert stats.wire_bytes < manifest.total_bytes + 4 * MIB
    assert decoder.aborted == []


async def test_link_stalls_and_heals(bench: Any) -> None:
    decoder, receiver = await bench.decoder(deadlines=PATIENT)
    sender = await bench.sender(deadlines=PATIENT)
    proxy = await bench.proxy(receiver)
    transfer, manifest = await start_half(bench, sender, Peer("127.0.0.1", proxy.port), Key("r"))
    connections = proxy.accepted
    proxy.pause()
    push_rest(bench, transfer)
    commit = asyncio.ensure_future(transfer.commit())
    await asyncio.sleep(1.5)
    proxy.resume()
    await commit
    bench.assert_arrived(decoder, Key("r"), manifest)
    assert proxy.accepted > connections  # silence had ended the old connections


async def test_dead_link_is_given_up_in_under_three_seconds(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    proxy = await bench.proxy(receiver)
    transfer, _ = await start_half(bench, sender, Peer("127.0.0.1", proxy.port), Key("r"))
    proxy.pause()
    push_rest(bench, transfer)
    await fails(transfer, "not heard")
    await bench.until(lambda: decoder.aborted == [Key("r")])
    assert len(decoder.free) == decoder.blocks


# --- corrupt chunk -------------------------------------------------------------------------------


async def test_corrupt_chunk_is_sent_again(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender(lanes=1)
    proxy = await bench.proxy(receiver, damage=1)
    manifest = bench.manifest()
    stats = await bench.send(sender, Peer("127.0.0.1", proxy.port), Key("r"), manifest)
    assert stats.resent == 1
    bench.assert_arrived(decoder, Key("r"), manifest)


# --- duplicate or late delivery ------------------------------------------------------------------


class RawPeer:
    """Speaks the protocol by hand, to say what a real sender never would."""

    def __init__(self, address: tuple[str, int], source: int = 77) -> None:
        self.address = address
        self.source = source
        self.target = 0

    def connect(self, lane: int) -> Any:
        sock = socket.create_connection(self.address)
        body = Hello("t", lane).encode()
        write_frame(
            sock, control_frame(Type.HELLO, source=self.source, target=self.target, body=body)
        )
        self.target = self.read(sock).header.source
        return sock

    def frame(self, type_: Type, transfer: int = 0, body: bytes = b"") -> Frame:
        return control_frame(
            type_, source=self.source, target=self.target, transfer=transfer, body=body
        )

    def read(self, sock: Any) -> Frame:
        return read_frame(sock, time.monotonic() + SLACK_S)

    def wait(self, sock: Any, type_: Type) -> Frame:
        while (frame := self.read(sock)).header.type is not type_:
            write_frame(sock, self.frame(Type.PING))
        return frame

    def chunk(self, transfer: int, body: bytes, chunk: int = 0) -> bytes:
        header = Header(
            Type.DATA,
            len(body),
            source=self.source,
            target=self.target,
            transfer=transfer,
            chunk=chunk,
            checksum=checksum([body]),
        )
        return encode_header(header) + body

    def batch(self, transfer: int, bodies: dict[int, bytes]) -> bytes:
        """Chunks by their numbers, in one frame."""
        table = encode_table([(number, checksum([body])) for number, body in bodies.items()])
        header = Header(
            Type.BATCH,
            len(table) + sum(map(len, bodies.values())),
            source=self.source,
            target=self.target,
            transfer=transfer,
            chunk=len(bodies),
            checksum=checksum([table]),
        )
        return encode_header(header) + table + b"".join(bodies.values())


async def test_doubled_and_late_chunks_change_nothing(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    manifest = bench.manifest(1, kv=8192, chunk_bytes=4096)
    raw = RawPeer(receiver.address)

    def talk() -> None:
        control = raw.connect(-1)
        lane = raw.connect(0)
        write_frame(control, raw.frame(Type.OFFER, 1, Offer(Key("r"), manifest).encode()))
        raw.wait(control, Type.GRANT)
        lane.sendall(raw.chunk(1, b"a" * 4096) + raw.chunk(1, b"b" * 4096))
        lane.sendall(raw.batch(1, {0: b"b" * 4096, 1: b"e" * 4096}))
        seen: set[int] = set()
        while seen < {0, 1}:
            seen.update(decode_numbers(raw.wait(control, Type.ACK).body))
        write_frame(control, raw.frame(Type.CANCEL, 1))
        raw.wait(control, Type.CANCELLED)
        lane.sendall(raw.chunk(1, b"c" * 4096) + raw.chunk(9, b"d" * 4096))
        lane.sendall(raw.batch(1, {0: b"c" * 4096, 1: b"c" * 4096}))
        write_frame(control, raw.frame(Type.PING))
        raw.wait(control, Type.PONG)

    await asyncio.get_running_loop().run_in_executor(None, talk)
    await bench.until(lambda: decoder.aborted == [Key("r")])
    assert bytes(decoder.arena.buffer).count(b"b" * 4096) == 0
    assert bytes(decoder.arena.buffer).count(b"c" * 4096) == 0
    assert bytes(decoder.arena.buffer).count(b"a" * 4096) == 1
    assert bytes(decoder.arena.buffer).count(b"e" * 4096) == 1
    assert not receiver.closed.done()


async def test_nonsense_ends_its_connection_and_nothing_else(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    raw = RawPeer(receiver.address)

    def talk() -> None:
        for junk in (os.urandom(4096), encode_header(Header(Type.DATA, 4096, source=1))):
            with socket.create_connection(receiver.address) as sock:
                sock.sendall(junk)
                sock.settimeout(SLACK_S)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        control = raw.connect(-1)
        control.sendall(os.urandom(256))
        control.settimeout(SLACK_S)
        assert control.recv(1) == b""

    await asyncio.get_running_loop().run_in_executor(None, talk)
    sender = await bench.sender()
    manifest = bench.manifest()
    await bench.send(sender, Peer(*receiver.address), Key("r"), manifest)
    bench.assert_arrived(decoder, Key("r"), manifest)


# --- receiver out of blocks ----------------------------------------------------------------------


async def test_out_of_blocks_waits_a_bounded_time_and_holds_nothing(bench: Any) -> None:
    decoder, receiver = await bench.decoder(8 * MIB)
    sender = await bench.sender()
    peer = Peer(*receiver.address)
    manifest = bench.manifest()
    first = await sender.open(peer, Key("a"), manifest)
    left = len(decoder.free)
    with pytest.raises(TransferRefused, match="no blocks"):
        await sender.open(peer, Key("b"), manifest)
    assert len(decoder.free) == left
    decoder.wait_s = SLACK_S
    second = asyncio.ensure_future(bench.send(sender, peer, Key("c"), manifest))
    await asyncio.sleep(0.1)
    assert len(decoder.free) == left
    bench.push_all(first)
    await first.commit()
    decoder.release(Key("a"))
    await second
    bench.assert_arrived(decoder, Key("c"), manifest)


async def test_withdrawn_offer_stops_waiting_for_blocks(bench: Any) -> None:
    decoder, receiver = await bench.decoder(MIB)
    decoder.wait_s = 60.0
    sender = await bench.sender()
    transfer = sender.offer(Peer(*receiver.address), Key("r"), bench.manifest())
    await bench.until(lambda: receiver.reservations)
    assert await transfer.cancel() is False
    await bench.until(lambda: not receiver.reservations)
    assert len(decoder.free) == decoder.blocks
    assert decoder.aborted == []  # nothing was ever reserved


# --- slow receiver -------------------------------------------------------------------------------


async def test_slow_receiver_holds_the_sender_back_and_loses_nothing(bench: Any) -> None:
    decoder, receiver = await bench.decoder(limits=Limits(credit_bytes=2 * MIB))
    sender = await bench.sender()
    proxy = await bench.proxy(receiver, rate_bytes_s=4 * MIB)
    manifest = bench.manifest()
    stats = await bench.send(sender, Peer("127.0.0.1", proxy.port), Key("r"), manifest)
    bench.assert_arrived(decoder, Key("r"), manifest)
    assert stats.resent == 0


# --- cancel mid-transfer -------------------------------------------------------------------------


async def test_cancel_fences_before_blocks_are_used_again(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    proxy = await bench.proxy(receiver, rate_bytes_s=2 * MIB)
    transfer, _ = await start_half(bench, sender, Peer("127.0.0.1", proxy.port), Key("r"))
    await asyncio.sleep(0.3)
    proxy.rate_bytes_s = 200 * MIB
    assert await transfer.cancel() is False
    await bench.until(lambda: decoder.aborted == [Key("r")])
    decoder.arena.buffer[:] = b"\xaa" * decoder.arena.size_bytes
    await asyncio.sleep(0.5)
    assert bytes(decoder.arena.buffer).count(b"\xaa") == decoder.arena.size_bytes
    assert len(decoder.free) == decoder.blocks


# --- stale epoch after a restart -----------------------------------------------------------------


async def test_restarted_receiver_never_accepts_an_earlier_life(bench: Any) -> None:
    decoder, receiver = await bench.decoder(incarnation=41)
    sender = await bench.sender(deadlines=PATIENT)
    peer = Peer(*receiver.address, 41)
    transfer, manifest = await start_half(bench, sender, peer, Key("r"))
    os.kill(receiver.pid, signal.SIGKILL)
    await receiver.closed
    reborn = await bench.plane(decoder.arena, decoder, incarnation=42, port=peer.port)
    push_rest(bench, transfer)
    await fails(transfer, "restarted")
    with pytest.raises(TransferRefused, match="restarted"):
        await sender.open(peer, Key("r", 1), manifest)
    await bench.send(sender, Peer(*reborn.address, 42), Key("r", 2), manifest)
    bench.assert_arrived(decoder, Key("r", 2), manifest)
    assert decoder.aborted == [Key("r")]


# --- lost completion -----------------------------------------------------------------------------


async def test_completion_lost_on_the_way_is_said_again(bench: Any) -> None:
    decoder, receiver = await bench.decoder(deadlines=PATIENT)
    sender = await bench.sender(deadlines=PATIENT)
    proxy = await bench.proxy(receiver)

    async def cut_first(key: Key) -> None:
        proxy.refuse = True
        proxy.cut()

    decoder.before_commit = cut_first
    manifest = bench.manifest()
    sending = asyncio.ensure_future(
        bench.send(sender, Peer("127.0.0.1", proxy.port), Key("r"), manifest)
    )
    await bench.until(lambda: decoder.committed)
    assert not sending.done()
    proxy.refuse = False
    await sending
    bench.assert_arrived(decoder, Key("r"), manifest)


async def test_worker_that_never_answers_a_commit_is_an_explicit_failure(bench: Any) -> None:
    decoder, receiver = await bench.decoder(deadlines=Deadlines(admit_s=0.5))
    sender = await bench.sender()

    async def never(key: Key) -> None:
        await asyncio.sleep(3600)

    decoder.before_commit = never
    transfer = await sender.open(Peer(*receiver.address), Key("r"), bench.manifest())
    bench.push_all(transfer)
    await fails(transfer, "not admitted")
    await bench.until(lambda: decoder.aborted == [Key("r")])
    assert (len(decoder.free), decoder.committed) == (decoder.blocks, {})


async def test_plane_that_dies_during_a_commit_leaves_the_cache_with_one_owner(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender(deadlines=QUICK)

    async def kill_plane(key: Key) -> None:
        os.kill(receiver.pid, signal.SIGKILL)
        await receiver.closed
        if key.request_id == "rejected":
            raise ValueError("planned")

    decoder.before_commit = kill_plane
    transfer = await sender.open(Peer(*receiver.address), Key("taken"), bench.manifest(2))
    bench.push_all(transfer)
    await fails(transfer, "not heard")
    await bench.until(lambda: decoder.committed)
    assert decoder.aborted == []
    receiver = await bench.plane(decoder.arena, decoder)
    transfer = await sender.open(Peer(*receiver.address), Key("rejected"), bench.manifest(2))
    bench.push_all(transfer)
    await fails(transfer, "not heard")
    await bench.until(lambda: decoder.aborted == [Key("rejected")])
    assert set(decoder.committed) == {Key("taken")}


# --- connection per transfer exhausts ports ------------------------------------------------------


async def test_connections_are_made_once(bench: Any) -> None:
    _, receiver = await bench.decoder()
    sender = await bench.sender()
    proxy = await bench.proxy(receiver)
    manifest = bench.manifest(2, kv=4096, state=4096)
    for number in range(40):
        await bench.send(sender, Peer("127.0.0.1", proxy.port), Key(f"r{number}"), manifest)
    assert sorted(proxy.lanes) == [-1, 0, 1, 2, 3]


# --- one slow handshake --------------------------------------------------------------------------


async def test_slow_handshakes_block_nobody_and_end(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    slow = [await asyncio.open_connection(*receiver.address) for _ in range(20)]
    for _, writer in slow:
        writer.write(b"P")
    manifest = bench.manifest()
    await bench.send(sender, Peer(*receiver.address), Key("r"), manifest)
    bench.assert_arrived(decoder, Key("r"), manifest)
    async with asyncio.timeout(Deadlines().handshake_s + SLACK_S):
        for reader, writer in slow:
            assert await reader.read() == b""
            writer.close()


# --- a stopped peer ------------------------------------------------------------------------------


def test_deadlines_promise_detection_in_under_three_seconds() -> None:
    deadlines = Deadlines()
    assert deadlines.worker_silence_s + deadlines.give_up_s < 3.0


async def test_stopped_receiver_is_detected(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    key = Key("r")
    transfer, manifest = await start_half(bench, sender, Peer(*receiver.address), key)
    os.kill(receiver.pid, signal.SIGSTOP)
    try:
        push_rest(bench, transfer)
        await fails(transfer, "not heard")
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    await bench.until(lambda: decoder.aborted or decoder.committed)
    if decoder.committed:  # everything lay in its sockets when it ran again
        bench.assert_arrived(decoder, key, manifest)
        decoder.release(key)
    else:
        assert decoder.aborted == [key]
    assert len(decoder.free) == decoder.blocks


async def test_stopped_receiver_of_half_a_cache_lets_go(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    await start_half(bench, sender, Peer(*receiver.address), Key("r"))
    os.kill(receiver.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(2 * Deadlines().give_up_s)
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    await bench.until(lambda: decoder.aborted == [Key("r")])
    assert (len(decoder.free), decoder.committed) == (decoder.blocks, {})


async def test_stopped_sender_is_detected(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    await start_half(bench, sender, Peer(*receiver.address), Key("r"))
    os.kill(sender.pid, signal.SIGSTOP)
    try:
        await bench.until(lambda: decoder.aborted == [Key("r")], 3.0 + SLACK_S)
    finally:
        os.kill(sender.pid, signal.SIGCONT)
    assert len(decoder.free) == decoder.blocks


async def test_stopped_worker_is_detected_though_its_plane_runs(bench: Any) -> None:
    sender = await bench.sender()
    options = {"host": "127.0.0.1", "arena_bytes": 16 * MIB, "layout": "t"}
    sink = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine.transport.peers", "sink", json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert sink.stdout is not None
    port = json.loads(await sink.stdout.readline())["port"]
    try:
        transfer, _ = await start_half(bench, sender, Peer("127.0.0.1", port), Key("r"))
        sink.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        push_rest(bench, transfer)
        await fails(transfer, "not heard")
    finally:
        sink.kill()
        await sink.wait()


async def test_plane_ends_with_its_worker(bench: Any) -> None:
    options = {"host": "127.0.0.1", "arena_bytes": MIB}
    sink = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine.transport.peers", "sink", json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert sink.stdout is not None
    await sink.stdout.readline()
    children = Path(f"/proc/{sink.pid}/task/{sink.pid}/children").read_text().split()
    assert len(children) == 1
    sink.kill()
    await sink.wait()
    await bench.until(lambda: not Path("/proc", children[0]).exists())
