"""A lane's thread and the sender's state when a connection breaks amid several chunks."""

from __future__ import annotations

import os
import socket
import threading
import time

from engine.transport.arena import SharedArena
from engine.transport.frames import HEADER_BYTES, Type, checksum, control_frame
from engine.transport.lanes import SendLane, SendState, Source
from engine.transport.messages import Grant, Key, Manifest, encode_numbers
from engine.transport.regions import Kind, Range, RangeList, Region, RegionSize
from engine.transport.sender import Sender

CHUNK = 1 << 18
COUNT = 3
SENDER, RECEIVER = 7, 8


def test_a_chunk_that_arrived_before_the_break_is_known_to_the_digest() -> None:
    """Chunks share a system call. The receiver may have some of them whole when it fails, and then
    they never go again; the commit must not wait for their checksums for ever."""
    region = Region(0, Kind.KV)
    manifest = Manifest((RegionSize(region, COUNT * CHUNK),), n_tokens=1, chunk_bytes=CHUNK)
    arena = SharedArena.create(COUNT * CHUNK)
    arena.buffer[:] = os.urandom(COUNT * CHUNK)
    sender = Sender(SENDER)
    state = SendState(sender)
    now = time.monotonic()
    transfer = sender.open(now, Key("r"), manifest)
    sender.on_connected(now, RECEIVER)
    grant = Grant(COUNT * CHUNK).encode()
    reply = {"source": RECEIVER, "target": SENDER, "transfer": transfer}
    sender.on_frame(now, control_frame(Type.GRANT, **reply, body=grant))
    state.sources[transfer] = Source({region: RangeList([Range(0, COUNT * CHUNK)])}, manifest)
    sender.push(transfer, region, COUNT * CHUNK)
    sender.commit(now, transfer, 5, {})
    ours, theirs = socket.socketpair()
    sockets, broken = [ours], threading.Event()

    def connect(lane: int) -> socket.socket:
        if sockets:
            return sockets.pop()
        broken.set()
        state.closed = True
        raise OSError("no second connection")

    lane = SendLane(0, state, arena, connect, lambda: None, 0.01)
    lane.start()
    left = HEADER_BYTES + CHUNK
    while left:
        left -= len(theirs.recv(left))
    theirs.close()
    assert broken.wait(20)

    with state.changed:
        sender.on_frame(now, control_frame(Type.ACK, **reply, body=encode_numbers([0])))
        again = []
        while (task := sender.next_chunk(now, 1)) is not None:
            again.append(task.number)
            body = arena.views([Range(task.start, task.size)])
            sender.chunk_sent(now, task, checksum(body), HEADER_BYTES + task.size)
        state.sender.connected = False
        state.changed.notify_all()
    assert again == [1, 2]
    assert [frame.header.type for frame in sender.outbox].count(Type.COMMIT) == 1
    lane.join(20)
