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

from collections import deque
from collections.abc import Callable, Sequence

from engine.transport.acknowledgements import Acknowledgements
from engine.transport.errors import FrameError
from engine.transport.frames import ROW_BYTES, Frame, Header, Type, control_frame
from engine.transport.history import History, Past
from engine.transport.incoming import (
    Aborted,
    Denied,
    Handle,
    Incoming,
    IncomingState,
    Offered,
    ReceiverEvent,
    Slot,
    Withdrawn,
)
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
from engine.transport.regions import ChunkPlan, Kind
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
        self._acks = Acknowledgements(limits.credit_bytes)

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
                self._emit((source, 0), Type.PONG)
            case Type.LEASE:
                for number in decode_numbers(frame.body, "Q"):
                    self._renew(now, (source, number))
            case Type.OFFER:
                self._on_offer(now, handle, Offer.decode(frame.body, header.attempt))
            case Type.COMMIT:
                self._on_commit(now, handle, header, Commit.decode(frame.body))
            case Type.CANCEL:
                self._on_cancel(handle, header.attempt)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Leases that ended, answers that did not come."""
        for transfer in list(self._transfers.values()):
            overdue = transfer.overdue(now, self._deadlines)
            if overdue is not None:
                answer, why = overdue
                self._abort(transfer, answer, Reason(why))

    def flush_acks(self) -> None:
        """Turn chunks that arrived since the last call into ACK frames."""
        for handle, numbers in self._acks.take():
            key = self._key_of(handle)
            if key is not None:
                self._emit(handle, Type.ACK, key.attempt, encode_numbers(numbers))

    @property
    def acks_due(self) -> bool:
        """Whether acknowledgements should not wait for the next tick."""
        return self._acks.due

    @property
    def wants_service(self) -> bool:
        """Whether something should go out now."""
        return bool(self.events or self.outbox or self._acks.due)

    # --- what the application answers --------------------------------------------------------

    def grant(self, now: float, handle: Handle) -> bool:
        """Memory for the whole transfer is reserved. False: nobody wants it any more, free it."""
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.state is not IncomingState.OFFERED:
            return False
        transfer.grant(now)
        # The wait for memory must not eat the lease.
        transfer.lease_until_s = max(transfer.lease_until_s, now + self._deadlines.give_up_s)
        self._send_grant(transfer)
        return True

    def refuse(self, handle: Handle, text: str, retryable: bool = True) -> None:
        """No memory will be reserved."""
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.state is IncomingState.OFFERED:
            del self._transfers[handle]
            self._refuse(handle, transfer.key, Reason(text, retryable))

    def admit(self, handle: Handle) -> bool:
        """The application took the cache over. False: it came too late, the transfer is aborted."""
        transfer = self._transfers.get(handle)
        if transfer is None or transfer.state is not IncomingState.ADMITTING:
            return False
        del self._transfers[handle]
        self._remember(transfer, Type.COMMITTED, Reason(""))
        self._emit(handle, Type.COMMITTED, transfer.key.attempt)
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
        transfer = self._addressed(header)
        if transfer is None:
            return None
        row = (transfer.number_of(header), header.checksum)
        (slot,) = transfer.slots([row], self._wire_size)
        if header.body_bytes != slot.wire_bytes:
            raise FrameError(
                f"chunk of {header.body_bytes} bytes, the manifest says {slot.wire_bytes}"
            )
        places = self._begin(now, transfer, [slot])
        return slot if places and places[0] is slot else None

    def begin_batch(
        self, now: float, header: Header, rows: Sequence[tuple[int, int]]
    ) -> list[Slot | int] | None:
        """Where the bodies of a BATCH go, in their order: a slot, or how many bytes to throw away.
        None: throw all of them away. Raises FrameError for chunks that the manifest does not have,
        or whose bytes do not add up to the frame's."""
        transfer = self._addressed(header)
        if transfer is None:
            return None
        slots = transfer.slots(rows, self._wire_size)
        expected = sum([slot.wire_bytes for slot in slots]) + len(rows) * ROW_BYTES
        if header.body_bytes != expected:
            raise FrameError(f"batch of {header.body_bytes} bytes, the manifest says {expected}")
        return self._begin(now, transfer, slots)

    def end_chunk(self, now: float, slot: Slot, checksum: int | None) -> None:
        """The lane no longer writes into the chunk's memory. `checksum`: of the body as it arrived;
        None where the connection broke in it."""
        self.end_batch(now, [slot], [checksum])

    def end_batch(self, now: float, slots: Sequence[Slot], checksums: Sequence[int | None]) -> None:
        """`end_chunk` of chunks of one transfer, at least one."""
        handle = slots[0].handle
        transfer = self._transfers[handle]
        judged = transfer.end(slots, checksums)
        self._acks.owe(handle, judged.here, judged.here_bytes)
        if transfer.state is IncomingState.GRANTED:
            # Also after a broken connection: another copy of the chunk may have been thrown away
            # while this one was being written.
            self._ask_again(transfer, Type.LOST, judged.lost)
            self._ask_again(transfer, Type.NACK, judged.damaged)
        if transfer.state is IncomingState.ABORTING:
            self._maybe_release(transfer)
        else:
            self._maybe_verify(now, transfer)

    # --- inside ------------------------------------------------------------------------------

    def _emit(self, handle: Handle, type_: Type, attempt: int = 0, body: bytes = b"") -> None:
        source, transfer = handle
        frame = control_frame(
            type_,
            source=self.incarnation,
            target=source,
            transfer=transfer,
            attempt=attempt,
            body=body,
        )
        self.outbox.append((source, frame))

    def _addressed(self, header: Header) -> Incoming | None:
        """The transfer that chunks belong to, or None: it is not, or no longer, known. Raises
        FrameError for chunks of another life."""
        if header.target != self.incarnation:
            raise FrameError("chunks for another incarnation")
        transfer = self._transfers.get((header.source, header.transfer))
        if transfer is None or transfer.key.attempt != header.attempt:
            return None
        return transfer

    def _begin(
        self, now: float, transfer: Incoming, slots: Sequence[Slot]
    ) -> list[Slot | int] | None:
        if transfer.state is not IncomingState.GRANTED:
            return None
        places, here = transfer.begin(slots, now + self._deadlines.give_up_s)
        if here:
            self._acks.owe(transfer.handle, here)  # the acknowledgement may have been lost
        return places

    def _ask_again(self, transfer: Incoming, type_: Type, numbers: Sequence[int]) -> None:
        if numbers:
            self._emit(transfer.handle, type_, transfer.key.attempt, encode_numbers(numbers))

    def _key_of(self, handle: Handle) -> Key | None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            return transfer.key
        past = self._history.of(handle)
        return None if past is None else past.key

    def _said_again(self, handle: Handle) -> bool:
        """A transfer that has ended is answered as it was then. False: it has not."""
        past = self._history.of(handle)
        if past is None:
            return False
        self._emit(handle, past.answer, past.key.attempt, past.reason.encode())
        return True

    def _renew(self, now: float, handle: Handle) -> None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            transfer.lease_until_s = now + self._deadlines.give_up_s

    def _on_offer(self, now: float, handle: Handle, offer: Offer) -> None:
        if self._said_again(handle):
            return
        source, key = handle[0], offer.key
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
            self._refuse(handle, key, Reason(why_not, retryable=False))
            return
        if key.attempt < self._history.newest_attempt(key.request_id):
            self._refuse(handle, key, Reason("a later attempt exists", retryable=False))
            return
        if sum(h[0] == source for h in self._transfers) >= self._limits.max_transfers:
            self._refuse(handle, key, Reason("too many transfers of this peer are open"))
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
        body = Grant(self._limits.credit_bytes, transfer.have()).encode()
        self._emit(transfer.handle, Type.GRANT, transfer.key.attempt, body)

    def _on_commit(self, now: float, handle: Handle, header: Header, commit: Commit) -> None:
        if self._said_again(handle):
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

    def _on_cancel(self, handle: Handle, attempt: int) -> None:
        past = self._history.of(handle)
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.state is not IncomingState.ADMITTING:
            if transfer.state is not IncomingState.ABORTING:
                self._abort(transfer, Type.CANCELLED, Reason("cancelled by the sender"))
            transfer.answer = Type.CANCELLED
        elif past is not None and past.answer is Type.COMMITTED:
            self._emit(handle, Type.COMMITTED, attempt)
        elif transfer is None:
            self._emit(handle, Type.CANCELLED, attempt)
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
        self.events.append(transfer.verified(transfer.commit))

    def _refuse(self, handle: Handle, key: Key, reason: Reason) -> None:
        self._history.ended(handle, Past(key, Type.REFUSE, reason))
        self._emit(handle, Type.REFUSE, key.attempt, reason.encode())

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
        body = transfer.reason.encode()
        self._emit(transfer.handle, transfer.answer, transfer.key.attempt, body)

    def _remember(self, transfer: Incoming, answer: Type, reason: Reason) -> None:
        self._acks.forget(transfer.handle)
        self._history.ended(transfer.handle, Past(transfer.key, answer, reason))
