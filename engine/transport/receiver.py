"""The receiving end for all peers of one plane, without I/O: time and frames are passed in.

A transfer is granted only after the application has reserved memory for the whole of it, is written
chunk by chunk, and is admitted only when every chunk arrived, every checksum agreed and the digest
agreed. Whatever else happens ends in `Aborted`, exactly once, and only when no lane can still write
into the transfer's memory (quarantine).

Driver's duties: pass frames to `on_frame` (after `on_connected`), send what `outbox` holds, call
`tick` often; answer `Offered` with `grant` or `refuse` and `Verified` with `admit` or `reject`. For
each DATA header a lane calls `begin_chunk`, fills the memory named, and calls `end_chunk`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

from engine.transport.errors import FrameError
from engine.transport.frames import ROW_BYTES, Frame, Header, Type, control_frame
from engine.transport.history import History, Past
from engine.transport.incoming import (
    HERE,
    NOTHING,
    WRITING,
    Aborted,
    Denied,
    Handle,
    Incoming,
    IncomingState,
    Offered,
    ReceiverEvent,
    Slot,
    Verified,
    Withdrawn,
)
from engine.transport.messages import (
    MAX_LISTED,
    Commit,
    Grant,
    Key,
    Manifest,
    Offer,
    Reason,
    decode_numbers,
    encode_numbers,
)
from engine.transport.regions import ChunkPlan, Kind, Region
from engine.transport.timing import Deadlines, Limits
from engine.transport.verify import digest_of


class Receiver:
    """See the module. `wire_size(manifest, kind, size)` gives a chunk's bytes on the wire (codecs);
    `authorise(identity, manifest)` returns why not, or an empty string."""

    def __init__(
        self,
        incarnation: int,
        deadlines: Deadlines = Deadlines(),
        limits: Limits = Limits(),
        authorise: Callable[[str, Manifest], str] = lambda identity, manifest: "",
        wire_size: Callable[[Manifest, Kind, int], int] = lambda manifest, kind, size: size,
    ) -> None:
        self.incarnation = incarnation
        #: (source incarnation, frame)
        self.outbox: deque[tuple[int, Frame]] = deque()
        self.events: deque[ReceiverEvent] = deque()
        self._deadlines = deadlines
        self._limits = limits
        self._authorise = authorise
        self._wire_size = wire_size
        #: Of each peer that is connected: (identity, incarnation of its instance).
        self._peers: dict[int, tuple[str, int]] = {}
        self._transfers: dict[Handle, Incoming] = {}
        self._history = History(limits.remembered)
        self._acks: dict[Handle, list[int]] = {}
        self._unacked_bytes = 0

    # --- connections -------------------------------------------------------------------------

    def on_connected(self, source: int, identity: str, instance: int = 0) -> None:
        """A handshake of the peer with incarnation `source` is done; `instance`: see `Hello`."""
        self._peers[source] = identity, instance

    def on_disconnected(self, source: int) -> None:
        """Nothing comes from the peer any more, unless it connects again. Its transfers go on."""
        self._peers.pop(source, None)

    @property
    def active(self) -> int:
        """Transfers that hold, or wait for, memory."""
        return len(self._transfers)

    def on_frame(self, now: float, source: int, frame: Frame) -> None:
        """One control frame. Frames that are not from `source` to this incarnation are dropped.

        Raises FrameError for a body that breaks the format; the connection should then close.
        """
        header = frame.header
        if header.source != source or header.target != self.incarnation:
            return
        handle = (source, header.transfer)
        match header.type:
            case Type.PING:
                self._emit(source, Type.PONG)
            case Type.LEASE:
                for number in decode_numbers(frame.body, "Q"):
                    self._renew(now, (source, number))
            case Type.OFFER:
                self._on_offer(now, handle, Offer.decode(frame.body, header.attempt))
            case Type.COMMIT:
                self._on_commit(now, handle, header, Commit.decode(frame.body))
            case Type.CANCEL:
                self._on_cancel(now, handle, header.attempt)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Leases that ended, answers that did not come."""
        for transfer in list(self._transfers.values()):
            if transfer.state in (IncomingState.OFFERED, IncomingState.GRANTED):
                if now > transfer.lease_until_s:
                    self._abort(transfer, Type.ABORTED, Reason("the sender's lease ended"))
                elif (
                    transfer.state is IncomingState.OFFERED
                    and now - transfer.since_s > self._deadlines.grant_s
                ):
                    self._refuse_open(transfer, Reason("no memory was reserved in time"))
            elif (
                transfer.state is IncomingState.ADMITTING
                and now - transfer.since_s > self._deadlines.admit_s
            ):
                self._abort(transfer, Type.ABORTED, Reason("the cache was not admitted in time"))

    def flush_acks(self) -> None:
        """Turn chunks that arrived since the last call into ACK frames."""
        for handle, numbers in self._acks.items():
            key = self._key_of(handle)
            if key is None:
                continue
            for at in range(0, len(numbers), MAX_LISTED):
                body = encode_numbers(numbers[at : at + MAX_LISTED])
                self._emit(handle[0], Type.ACK, handle[1], key.attempt, body)
        self._acks.clear()
        self._unacked_bytes = 0

    @property
    def acks_due(self) -> bool:
        """Whether acknowledgements should go out now. Until then they can wait for the next tick:
        they only return credit, and an eighth of it does not stop a sender."""
        return self._unacked_bytes * 8 >= self._limits.credit_bytes

    @property
    def wants_service(self) -> bool:
        """Whether something should go out now."""
        return bool(self.events or self.outbox or self.acks_due)

    # --- what the application answers --------------------------------------------------------

    def grant(self, now: float, handle: Handle) -> bool:
        """Memory for the whole transfer is reserved. False: nobody wants it any more, free it."""
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.state is not IncomingState.OFFERED:
            return False
        # Not before: an offer must cost its receiver next to nothing.
        transfer.chunks = bytearray(transfer.plan.count)
        transfer.checksums = array("Q", bytes(8 * transfer.plan.count))
        transfer.state = IncomingState.GRANTED
        transfer.since_s = now
        # The wait for memory must not eat the lease.
        transfer.lease_until_s = max(transfer.lease_until_s, now + self._deadlines.give_up_s)
        self._send_grant(transfer)
        return True

    def refuse(self, handle: Handle, text: str, retryable: bool = True) -> None:
        """No memory will be reserved."""
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.state is IncomingState.OFFERED:
            self._refuse_open(transfer, Reason(text, retryable), withdraw=False)

    def admit(self, handle: Handle) -> bool:
        """The application took the cache over. False: it came too late, the transfer is aborted."""
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.state is not IncomingState.ADMITTING:
            return False
        del self._transfers[handle]
        self._remember(transfer, Type.COMMITTED, Reason(""))
        self._emit(handle[0], Type.COMMITTED, handle[1], transfer.key.attempt)
        return True

    def reject(self, handle: Handle, text: str) -> None:
        """The application does not take the cache; `Aborted` follows."""
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.state is IncomingState.ADMITTING:
            self._abort(transfer, Type.ABORTED, Reason(text))

    def abort(self, handle: Handle, text: str) -> None:
        """Give a granted transfer up from this side; `Aborted` follows."""
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.state is not IncomingState.ABORTING:
            self._abort(transfer, Type.ABORTED, Reason(text))

    # --- what lanes ask ----------------------------------------------------------------------

    def begin_chunk(self, now: float, header: Header) -> Slot | None:
        """Where the body of a DATA frame goes, or None: read it and throw it away (late, doubled,
        or of a transfer that ended). Raises FrameError for a chunk the manifest does not have."""
        handle = (header.source, header.transfer)
        if header.target != self.incarnation:
            raise FrameError("chunk for another incarnation")
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.key.attempt != header.attempt:
            return None
        try:
            region = Region(header.layer, Kind(header.kind))
        except ValueError as error:
            raise FrameError(f"region kind {header.kind}") from error
        number = transfer.plan.number(region, header.chunk)
        if number is None:
            raise FrameError(f"chunk {header.chunk} of {region} is not in the manifest")
        slot = self._slot(transfer, number, header.checksum)
        if header.body_bytes != slot.wire_bytes:
            raise FrameError(
                f"chunk of {header.body_bytes} bytes, the manifest says {slot.wire_bytes}"
            )
        if transfer.state is not IncomingState.GRANTED:
            return None
        return slot if self._begin(now, transfer, number) else None

    def begin_batch(
        self, now: float, header: Header, rows: Sequence[tuple[int, int]]
    ) -> list[Slot | int] | None:
        """Where the bodies of a BATCH go, in their order: a slot, or how many bytes to throw away.
        None: throw all of them away. Raises FrameError for chunks that the manifest does not have,
        or whose bytes do not add up to the frame's."""
        handle = (header.source, header.transfer)
        if header.target != self.incarnation:
            raise FrameError("chunks for another incarnation")
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.key.attempt != header.attempt:
            return None
        count = transfer.plan.count
        for number, _ in rows:
            if number >= count:
                raise FrameError(f"chunk {number} of {count} is not in the manifest")
        slots = [self._slot(transfer, number, checksum) for number, checksum in rows]
        expected = sum([slot.wire_bytes for slot in slots]) + len(rows) * ROW_BYTES
        if header.body_bytes != expected:
            raise FrameError(f"batch of {header.body_bytes} bytes, the manifest says {expected}")
        if transfer.state is not IncomingState.GRANTED:
            return None
        # A chunk named twice is written once: the second finds the first WRITING.
        return [
            slot if self._begin(now, transfer, slot.number) else slot.wire_bytes for slot in slots
        ]

    def end_chunk(self, now: float, slot: Slot, checksum: int | None) -> None:
        """The lane no longer writes into the chunk's memory. `checksum`: of the body as it arrived;
        None where the connection broke in it."""
        self.end_batch(now, [slot], [checksum])

    def end_batch(self, now: float, slots: Sequence[Slot], checksums: Sequence[int | None]) -> None:
        """`end_chunk` of chunks of one transfer, at least one."""
        handle = slots[0].handle
        transfer = self._transfers[handle]
        transfer.writers -= len(slots)
        acks = self._acks.setdefault(handle, [])
        lost: list[int] = []
        damaged: list[int] = []
        for slot, checksum in zip(slots, checksums, strict=True):
            number = slot.number
            if checksum == slot.checksum:
                transfer.chunks[number] = HERE
                transfer.checksums[number] = checksum
                transfer.here += 1
                acks.append(number)
                self._unacked_bytes += slot.size
            else:
                transfer.chunks[number] = NOTHING
                (lost if checksum is None else damaged).append(number)
        if transfer.state is IncomingState.GRANTED:
            # Also after a broken connection: another copy of the chunk may have been thrown away
            # while this one was being written.
            self._ask_again(transfer, Type.LOST, lost)
            self._ask_again(transfer, Type.NACK, damaged)
        if transfer.state is IncomingState.ABORTING:
            self._maybe_release(transfer)
        else:
            self._maybe_verify(now, transfer)

    # --- inside ------------------------------------------------------------------------------

    def _emit(
        self, source: int, type_: Type, transfer: int = 0, attempt: int = 0, body: bytes = b""
    ) -> None:
        frame = control_frame(
            type_,
            source=self.incarnation,
            target=source,
            transfer=transfer,
            attempt=attempt,
            body=body,
        )
        self.outbox.append((source, frame))

    def _ack(self, handle: Handle, number: int) -> None:
        self._acks.setdefault(handle, []).append(number)

    def _slot(self, transfer: Incoming, number: int, checksum: int) -> Slot:
        region, _, start, size = transfer.plan.locate(number)
        wire_bytes = size
        if transfer.manifest.codecs:
            wire_bytes = self._wire_size(transfer.manifest, region.kind, size)
        return Slot(transfer.handle, number, region, start, size, checksum, wire_bytes)

    def _begin(self, now: float, transfer: Incoming, number: int) -> bool:
        """Whether a lane is to write the chunk."""
        state = transfer.chunks[number]
        if state != NOTHING:
            if state == HERE:
                self._ack(transfer.handle, number)  # the acknowledgement may have been lost
            return False
        transfer.chunks[number] = WRITING
        transfer.writers += 1
        transfer.lease_until_s = now + self._deadlines.give_up_s
        return True

    def _ask_again(self, transfer: Incoming, type_: Type, numbers: Sequence[int]) -> None:
        if numbers:
            source, id_ = transfer.handle
            self._emit(source, type_, id_, transfer.key.attempt, encode_numbers(numbers))

    def _key_of(self, handle: Handle) -> Key | None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            return transfer.key
        past = self._history.of(handle)
        return None if past is None else past.key

    def _renew(self, now: float, handle: Handle) -> None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            transfer.lease_until_s = now + self._deadlines.give_up_s

    def _on_offer(self, now: float, handle: Handle, offer: Offer) -> None:
        source, id_ = handle
        key = offer.key
        past = self._history.of(handle)
        if past is not None:
            self._emit(source, past.answer, id_, past.key.attempt, past.reason.encode())
            return
        known = self._transfers.get(handle)
        if known is not None:
            if known.key != key or known.manifest != offer.manifest:
                raise FrameError("an offer changed its manifest")
            self._renew(now, handle)
            if known.state in (IncomingState.GRANTED, IncomingState.ADMITTING):
                self._send_grant(known)
            return
        identity, instance = self._peers.get(source, ("", 0))
        manifest = offer.manifest
        why_not = self._authorise(identity, manifest)
        if why_not:
            self.events.append(Denied(handle, key, manifest, identity, instance, why_not))
            self._refuse_new(handle, key, Reason(why_not, retryable=False))
            return
        if key.attempt < self._history.newest_attempt(key.request_id):
            self._refuse_new(handle, key, Reason("a later attempt exists", retryable=False))
            return
        if sum(h[0] == source for h in self._transfers) >= self._limits.max_transfers:
            self._refuse_new(handle, key, Reason("too many transfers of this peer are open"))
            return
        for other in list(self._transfers.values()):
            # One whose commit is being answered ends by that answer, not by this offer.
            if (
                other.key.request_id == key.request_id
                and other.state is not IncomingState.ADMITTING
            ):
                self._abort(other, Type.ABORTED, Reason("a later attempt was offered"))
        self._history.attempted(key)
        plan = ChunkPlan(manifest.regions, manifest.chunk_bytes)
        until_s = now + self._deadlines.give_up_s
        transfer = Incoming(handle, key, manifest, plan, identity, instance, until_s, since_s=now)
        self._transfers[handle] = transfer
        self.events.append(Offered(handle, key, manifest, identity))

    def _send_grant(self, transfer: Incoming) -> None:
        source, id_ = transfer.handle
        body = Grant(self._limits.credit_bytes, transfer.have()).encode()
        self._emit(source, Type.GRANT, id_, transfer.key.attempt, body)

    def _on_commit(self, now: float, handle: Handle, header: Header, commit: Commit) -> None:
        past = self._history.of(handle)
        if past is not None:
            self._emit(handle[0], past.answer, handle[1], past.key.attempt, past.reason.encode())
            return
        transfer = self._transfers.get(handle)
        if (
            transfer is None
            or transfer.state is not IncomingState.GRANTED
            or header.attempt != transfer.key.attempt
        ):
            return
        transfer.commit = commit
        self._renew(now, handle)
        self._maybe_verify(now, transfer)

    def _on_cancel(self, now: float, handle: Handle, attempt: int) -> None:
        past = self._history.of(handle)
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.state is not IncomingState.ADMITTING:
            if transfer.state is not IncomingState.ABORTING:
                self._abort(transfer, Type.CANCELLED, Reason("cancelled by the sender"))
            transfer.answer = Type.CANCELLED
        elif past is not None and past.answer is Type.COMMITTED:
            self._emit(handle[0], Type.COMMITTED, handle[1], attempt)
        elif transfer is None:
            self._emit(handle[0], Type.CANCELLED, handle[1], attempt)
        # ADMITTING: the commit came first; its answer ends the transfer.

    def _maybe_verify(self, now: float, transfer: Incoming) -> None:
        if (
            transfer.state is not IncomingState.GRANTED
            or transfer.commit is None
            or transfer.here < transfer.plan.count
        ):
            return
        if digest_of(transfer.checksums) != transfer.commit.digest:
            self._abort(transfer, Type.ABORTED, Reason("the digest of the whole cache differs"))
            return
        transfer.state = IncomingState.ADMITTING
        transfer.since_s = now
        self.events.append(
            Verified(
                transfer.handle,
                transfer.key,
                transfer.manifest,
                transfer.commit,
                transfer.identity,
                transfer.instance,
            )
        )

    def _refuse_new(self, handle: Handle, key: Key, reason: Reason) -> None:
        self._history.ended(handle, Past(key, Type.REFUSE, reason))
        self._emit(handle[0], Type.REFUSE, handle[1], key.attempt, reason.encode())

    def _refuse_open(self, transfer: Incoming, reason: Reason, withdraw: bool = True) -> None:
        del self._transfers[transfer.handle]
        if withdraw:
            self.events.append(Withdrawn(transfer.handle, transfer.key, reason.text))
        self._refuse_new(transfer.handle, transfer.key, reason)

    def _abort(self, transfer: Incoming, answer: Type, reason: Reason) -> None:
        if transfer.state is IncomingState.ABORTING:
            return
        transfer.answer, transfer.reason = answer, reason
        if transfer.state is IncomingState.OFFERED:
            del self._transfers[transfer.handle]
            self.events.append(Withdrawn(transfer.handle, transfer.key, reason.text))
            self._finish(transfer)
            return
        transfer.state = IncomingState.ABORTING
        self._maybe_release(transfer)

    def _maybe_release(self, transfer: Incoming) -> None:
        if transfer.writers:
            return
        del self._transfers[transfer.handle]
        self.events.append(Aborted(transfer.handle, transfer.key, transfer.reason.text))
        self._finish(transfer)

    def _finish(self, transfer: Incoming) -> None:
        self._remember(transfer, transfer.answer, transfer.reason)
        source, id_ = transfer.handle
        self._emit(source, transfer.answer, id_, transfer.key.attempt, transfer.reason.encode())

    def _remember(self, transfer: Incoming, answer: Type, reason: Reason) -> None:
        self._acks.pop(transfer.handle, None)
        self._history.ended(transfer.handle, Past(transfer.key, answer, reason))
