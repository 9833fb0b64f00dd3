"""The sending end of one session, without I/O: time and frames go in, frames and events come out.

One `Sender` stands for one peer. It survives reconnects: a transfer is offered again and resumes
from the receiver's bitmap of chunks. A restarted peer (another incarnation) fails every transfer.

Driver's duties: keep one control connection and some data lanes; pass frames to `on_frame`, send
what `outbox` holds, call `tick` often; each lane takes work from `next_chunks`, sends it, and
reports `chunk_sent`. Memory of a transfer must stay untouched until its last event (`Ended`), which
comes only when no lane still reads from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.transport.frames import Frame, Type, control_frame
from engine.transport.heads import head_of
from engine.transport.messages import (
    Commit,
    Grant,
    Key,
    Manifest,
    Offer,
    Reason,
    decode_numbers,
    encode_numbers,
)
from engine.transport.outgoing import (
    ChunkTask,
    Granted,
    Outgoing,
    OutgoingState,
    SenderEvent,
)
from engine.transport.regions import ChunkPlan, Region
from engine.transport.timing import Deadlines, Limits
from engine.transport.verify import digest_of


class Sender:
    """See the module. `outbox` and `events` are drained by the driver after each call."""

    def __init__(
        self, incarnation: int, deadlines: Deadlines = Deadlines(), limits: Limits = Limits()
    ) -> None:
        self.incarnation = incarnation
        self.peer_incarnation = 0
        self.outbox: deque[Frame] = deque()
        self.events: deque[SenderEvent] = deque()
        self.connected = False
        self.heard_s: float | None = None
        #: Why the driver cannot connect, for the reason of a failure.
        self.trouble = ""
        self._deadlines = deadlines
        self._limits = limits
        self._transfers: dict[int, Outgoing] = {}
        self._next_id = 1
        self._pinged_s = float("-inf")
        self._lane_progress: dict[int, float] = {}

    # --- what the application asks -----------------------------------------------------------

    def open(self, now: float, key: Key, manifest: Manifest) -> int:
        """Offer a transfer; returns its number. Chunks may be pushed at once, they wait for the
        grant. Raises ValueError for a manifest out of bounds."""
        manifest.validate()
        plan = ChunkPlan(manifest.regions, manifest.chunk_bytes)
        transfer = Outgoing(self._next_id, key, manifest, plan, started_s=now, waiting_since_s=now)
        self._next_id += 1
        if not self._transfers:
            self.heard_s = now  # silence counts from the time there was something to say
        self._transfers[transfer.id] = transfer
        if self.connected:
            self._offer(transfer)
        return transfer.id

    def push(self, transfer_id: int, region: Region, size: int) -> None:
        """`size` further bytes of `region` are final and readable. Raises ValueError beyond the
        manifest; a transfer that has ended ignores it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state is OutgoingState.ENDING:
            return
        transfer.push(region, size)

    def commit(self, now: float, transfer_id: int, first_token: int, meta: dict) -> None:
        """Everything is pushed. Raises ValueError where regions are short."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state is OutgoingState.ENDING:
            return
        for item in transfer.manifest.regions:
            if transfer.available[item.region] != item.size_bytes:
                raise ValueError(
                    f"{item.region}: {transfer.available[item.region]} bytes pushed of "
                    f"{item.size_bytes} in the manifest"
                )
        transfer.commit = (first_token, meta)
        transfer.waiting_since_s = now
        self._maybe_commit(transfer)

    def cancel(self, now: float, transfer_id: int, reason: str = "cancelled by the sender") -> None:
        """Stop sending; `Ended` follows when the receiver has let go of its blocks (or is lost)."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state in (OutgoingState.CANCELLING, OutgoingState.ENDING):
            return
        transfer.state = OutgoingState.CANCELLING
        transfer.reason = reason
        transfer.retryable = False
        transfer.ready.clear()
        if self.connected:
            self._emit(Type.CANCEL, transfer)
        elif self.peer_incarnation == 0:
            self._end(now, transfer, reason, retryable=False)  # never offered to anyone

    @property
    def active(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def has_ready(self) -> bool:
        """Whether a lane may find something to send."""
        for transfer in self._transfers.values():
            if (
                transfer.ready
                and transfer.state is OutgoingState.GRANTED
                and transfer.in_flight_bytes < transfer.credit_bytes
            ):
                return True
        return False

    @property
    def backlog_bytes(self) -> int:
        """Bytes pushed and not yet acknowledged, over all transfers."""
        return sum(t.unacked_bytes for t in self._transfers.values())

    # --- what lanes ask ----------------------------------------------------------------------

    def next_chunks(
        self, now: float, lane: int, most_bytes: int = 1, most_chunks: int = 1
    ) -> list[ChunkTask]:
        """The next chunks for a lane, all of the oldest transfer that has some: one whatever its
        size, and more as far as all stay within `most_bytes` and `most_chunks`. Empty: nothing
        ready or no credit."""
        if not self.connected:
            return []
        for transfer in self._transfers.values():
            if transfer.ready and transfer.state is OutgoingState.GRANTED:
                tasks = transfer.take(lane, most_bytes, most_chunks)
                if tasks:
                    self._lane_progress.setdefault(lane, now)
                    return tasks
        return []

    def next_chunk(self, now: float, lane: int) -> ChunkTask | None:
        """One chunk, or None."""
        return next(iter(self.next_chunks(now, lane)), None)

    def head(
        self, tasks: Sequence[ChunkTask], bodies_bytes: int, checksums: Sequence[int]
    ) -> bytes:
        """What goes before the bodies of chunks that a lane took together. See `head_of`."""
        return head_of(tasks, bodies_bytes, checksums, self.incarnation, self.peer_incarnation)

    def chunk_sent(
        self, now: float, task: ChunkTask, checksum: int | None, wire_bytes: int
    ) -> None:
        """A lane no longer reads the chunk's memory. `checksum` None: no byte of it was sent. One
        that was sent in part only counts as sent: it may have arrived all the same, and its
        checksum is then needed for the digest though it never goes again."""
        self.chunks_sent(now, [task], [checksum], wire_bytes)

    def chunks_sent(
        self, now: float, tasks: Sequence[ChunkTask], checksums: Sequence[int | None], size: int
    ) -> None:
        """`chunk_sent` of all chunks that a lane had taken together; `size`: wire bytes of all."""
        transfer = self._transfers.get(tasks[0].transfer)
        if transfer is None:
            return
        transfer.readers -= len(tasks)
        transfer.wire_bytes += size
        for task, checksum in zip(tasks, checksums, strict=True):
            if checksum is not None:
                transfer.note_checksum(task.number, checksum)
        self._maybe_commit(transfer)
        self._maybe_release(now, transfer)

    def lane_moved(self, now: float, lane: int) -> None:
        """Bytes of the lane were acknowledged by the peer's kernel: it is not stalled."""
        if lane in self._lane_progress:
            self._lane_progress[lane] = now

    def lane_down(self, now: float, lane: int) -> None:
        """The lane's connection is gone; what it had under way is sent again by others."""
        self._lane_progress.pop(lane, None)
        for transfer in self._transfers.values():
            transfer.take_back([n for n, owner in transfer.in_flight.items() if owner == lane])

    # --- the control connection --------------------------------------------------------------

    def on_connected(self, now: float, peer_incarnation: int) -> None:
        """The handshake is done. Another incarnation than before: the peer has restarted and knows
        nothing of earlier transfers, so they fail."""
        restarted = self.peer_incarnation not in (0, peer_incarnation)
        self.peer_incarnation = peer_incarnation
        self.connected = True
        self.heard_s = now
        self.trouble = ""
        for transfer in list(self._transfers.values()):
            if transfer.state is OutgoingState.ENDING:
                continue
            if restarted and (transfer.granted_once or transfer.state is OutgoingState.CANCELLING):
                self._end(now, transfer, "the receiver was restarted", retryable=True)
            elif transfer.state is OutgoingState.CANCELLING:
                self._emit(Type.CANCEL, transfer)
            else:
                transfer.state = OutgoingState.OFFERED
                transfer.commit_sent = False
                self._offer(transfer)

    def on_disconnected(self, now: float) -> None:
        """The control connection is gone: chunks under way are unknown until the next grant."""
        self.connected = False
        self.outbox.clear()
        for transfer in self._transfers.values():
            transfer.take_back(list(transfer.in_flight))

    def fail_all(self, now: float, reason: str, retryable: bool, refused: bool = False) -> None:
        """The peer is lost or refuses this session: every transfer ends."""
        for transfer in list(self._transfers.values()):
            transfer.refused = transfer.refused or refused
            self._end(now, transfer, reason, retryable)

    def on_frame(self, now: float, frame: Frame) -> None:
        """One control frame of the peer. Frames of another incarnation are dropped; frames of
        transfers that have ended are late and mean nothing."""
        header = frame.header
        if header.source != self.peer_incarnation or header.target != self.incarnation:
            return
        self.heard_s = now
        transfer = self._transfers.get(header.transfer)
        if transfer is None or transfer.state is OutgoingState.ENDING:
            return
        if header.attempt != transfer.key.attempt:
            return
        cancelling = transfer.state is OutgoingState.CANCELLING
        match header.type:
            case Type.COMMITTED:
                # Also while cancelling: the commit was first, and the application must know it.
                transfer.committed = True
                self._end(now, transfer, "", retryable=False)
            case Type.CANCELLED:
                if cancelling:
                    self._end(now, transfer, transfer.reason, transfer.retryable)
            case Type.GRANT if not cancelling:
                self._granted(now, transfer, Grant.decode(frame.body))
            case Type.REFUSE | Type.ABORTED:
                reason = Reason.decode(frame.body)
                transfer.refused = header.type is Type.REFUSE
                self._end(now, transfer, reason.text, reason.retryable and not cancelling)
            case Type.ACK if not cancelling:
                self._acked(now, transfer, decode_numbers(frame.body))
            case Type.NACK | Type.LOST if not cancelling:
                for number in decode_numbers(frame.body):
                    self._send_again(transfer, number, damaged=header.type is Type.NACK)
            case _:
                pass

    def tick(self, now: float) -> list[int]:
        """Pings, leases and deadlines. Returns lanes whose connection should be replaced.

        `silent_s(now)` tells the driver when to redial; after `give_up_s` of silence transfers fail
        here.
        """
        deadlines = self._deadlines
        if self.connected and now - self._pinged_s >= deadlines.ping_s:
            self._pinged_s = now
            self.outbox.append(self._frame(Type.PING))
            held = [t.id for t in self._transfers.values() if t.state is not OutgoingState.ENDING]
            if held:
                self.outbox.append(self._frame(Type.LEASE, body=encode_numbers(held, "Q")))
        if self._transfers and self.silent_s(now) > deadlines.give_up_s:
            why = f" ({self.trouble})" if self.trouble else ""
            self.fail_all(
                now,
                f"the receiver was not heard for {deadlines.give_up_s:g} s{why}",
                retryable=True,
            )
        for transfer in list(self._transfers.values()):
            why = transfer.overdue(now, deadlines)
            if why:
                self._cancel_for_retry(transfer, why)
        owners = {lane for t in self._transfers.values() for lane in t.in_flight.values()}
        for lane in [lane for lane in self._lane_progress if lane not in owners]:
            del self._lane_progress[lane]
        return [
            lane
            for lane, moved_s in self._lane_progress.items()
            if now - moved_s > deadlines.lane_stall_s
        ]

    def silent_s(self, now: float) -> float:
        """Seconds since the peer was last heard (0 before there was anything to hear)."""
        return 0.0 if self.heard_s is None else now - self.heard_s

    # --- inside ------------------------------------------------------------------------------

    def _frame(self, type_: Type, transfer: Outgoing | None = None, body: bytes = b"") -> Frame:
        return control_frame(
            type_,
            source=self.incarnation,
            target=self.peer_incarnation,
            transfer=0 if transfer is None else transfer.id,
            attempt=0 if transfer is None else transfer.key.attempt,
            body=body,
        )

    def _emit(self, type_: Type, transfer: Outgoing, body: bytes = b"") -> None:
        self.outbox.append(self._frame(type_, transfer, body))

    def _offer(self, transfer: Outgoing) -> None:
        self._emit(Type.OFFER, transfer, Offer(transfer.key, transfer.manifest).encode())

    def _granted(self, now: float, transfer: Outgoing, grant: Grant) -> None:
        if transfer.state is not OutgoingState.OFFERED:
            return  # the answer to an offer that was already answered
        transfer.state = OutgoingState.GRANTED
        transfer.credit_bytes = grant.credit_bytes
        transfer.waiting_since_s = now
        have = grant.have
        if any(have):
            numbers = range(min(transfer.plan.count, 8 * len(have)))
            self._acked(now, transfer, [n for n in numbers if have[n >> 3] >> (n & 7) & 1])
        transfer.queue_missing()
        if not transfer.granted_once:
            transfer.granted_once = True
            self.events.append(Granted(transfer.id, transfer.key))
        self._maybe_commit(transfer)

    def _acked(self, now: float, transfer: Outgoing, numbers: Sequence[int]) -> None:
        moved = set()
        for number in numbers:
            lane = transfer.in_flight.get(number)
            if transfer.acknowledge(number):
                moved.add(lane)
                transfer.waiting_since_s = now
        for lane in moved:
            if lane is not None:
                self.lane_moved(now, lane)

    def _send_again(self, transfer: Outgoing, number: int, damaged: bool) -> None:
        if number >= transfer.plan.count or transfer.acked[number]:
            return
        seen = transfer.corrupt.get(number, 0) + damaged
        transfer.corrupt[number] = seen
        transfer.land(number)
        if seen > self._limits.max_resends:
            region, index, _, _ = transfer.plan.locate(number)
            why = f"chunk {index} of {region} arrived damaged {seen} times"
            self._cancel_for_retry(transfer, why)
        elif number not in transfer.ready:
            transfer.ready.appendleft(number)

    def _cancel_for_retry(self, transfer: Outgoing, reason: str) -> None:
        transfer.state = OutgoingState.CANCELLING
        transfer.reason, transfer.retryable = reason, True
        transfer.ready.clear()
        if self.connected:
            self._emit(Type.CANCEL, transfer)

    def _maybe_commit(self, transfer: Outgoing) -> None:
        """Commit goes out when every chunk was sent once: it then needs no extra round trip."""
        if transfer.commit is None or not transfer.commit_due or not self.connected:
            return
        transfer.commit_sent = True
        transfer.digest = digest_of(transfer.checksums)
        first_token, meta = transfer.commit
        self._emit(Type.COMMIT, transfer, Commit(transfer.digest, first_token, meta).encode())

    def _end(self, now: float, transfer: Outgoing, reason: str, retryable: bool) -> None:
        if transfer.state is OutgoingState.ENDING:
            return
        transfer.state = OutgoingState.ENDING
        transfer.reason, transfer.retryable = reason, retryable
        transfer.ready.clear()
        transfer.in_flight.clear()
        transfer.in_flight_bytes = 0
        self._maybe_release(now, transfer)

    def _maybe_release(self, now: float, transfer: Outgoing) -> None:
        if transfer.state is not OutgoingState.ENDING or transfer.readers:
            return
        del self._transfers[transfer.id]
        self.events.append(transfer.ended(now))
