"""Sender and receiver over an in-memory network: rules by example, then under random faults."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from protocol_network import Faults, Network

from engine.transport.errors import FrameError
from engine.transport.frames import HEADER_BYTES, ROW_BYTES, Frame, Header, Type, control_frame
from engine.transport.history import Past
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
from engine.transport.outgoing import Ended
from engine.transport.receiver import Receiver
from engine.transport.regions import Kind, Region, RegionSize
from engine.transport.sender import Sender
from engine.transport.timing import Deadlines, Limits

CHUNK = 4096


def make_manifest(*sizes: int) -> Manifest:
    regions = tuple(
        RegionSize(Region(layer, Kind(layer % 3)), size) for layer, size in enumerate(sizes)
    )
    return Manifest(regions, n_tokens=64, chunk_bytes=CHUNK)


def contents(manifest: Manifest, seed: int = 0) -> dict[Region, bytes]:
    source = random.Random(seed)
    return {item.region: source.randbytes(item.size_bytes) for item in manifest.regions}


def network(seed: int = 1, faults: Faults = Faults(), limits: Limits = Limits()) -> Network:
    return Network(Sender(11, limits=limits), Receiver(22, limits=limits), seed, faults)


def test_whole_cache_arrives() -> None:
    net = network()
    manifest = make_manifest(3 * CHUNK + 5, 0, CHUNK, 100)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.push_all(transfer)
    net.sender.commit(net.now, transfer, 5, {})
    net.run()
    (ended,) = net.ended[Key("r")]
    assert ended.committed
    assert ended.resent == 0
    assert net.admitted[Key("r")] == contents(manifest)
    assert net.reserved == {}


def test_no_data_before_the_grant() -> None:
    net = network()
    manifest = make_manifest(CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.push_all(transfer)
    net.connect()
    assert net.sender.next_chunk(0.0, 0) is None


def granted_sender(chunks: int, credit_chunks: int) -> tuple[Sender, int]:
    """A sender whose transfer of one region is pushed and granted."""
    sender = Sender(11)
    manifest = make_manifest(chunks * CHUNK)
    transfer = sender.open(0.0, Key("r"), manifest)
    sender.on_connected(0.0, 22)
    sender.push(transfer, manifest.regions[0].region, chunks * CHUNK)
    sender.on_frame(0.0, reply(Type.GRANT, transfer, Grant(credit_chunks * CHUNK).encode()))
    return sender, transfer


def reply(type_: Type, transfer: int, body: bytes = b"") -> Frame:
    return control_frame(type_, source=22, target=11, transfer=transfer, body=body)


def test_credit_bounds_what_is_under_way() -> None:
    sender, transfer = granted_sender(8, credit_chunks=2)
    tasks = [sender.next_chunk(0.0, 0) for _ in range(3)]
    assert [task and task.number for task in tasks] == [0, 1, None]
    sender.on_frame(0.0, reply(Type.ACK, transfer, encode_numbers([0])))
    following = sender.next_chunk(0.0, 1)
    assert following is not None
    assert following.number == 2
    assert sender.backlog_bytes == 7 * CHUNK


def test_a_lane_that_breaks_gives_its_chunks_to_others() -> None:
    sender, _ = granted_sender(3, credit_chunks=8)
    assert [sender.next_chunk(0.0, lane).number for lane in (0, 1, 0)] == [0, 1, 2]  # type: ignore[union-attr]
    sender.lane_down(0.0, 0)
    again = [sender.next_chunk(0.0, 1) for _ in range(3)]
    assert sorted(task.number for task in again if task) == [0, 2]


def test_a_lane_without_progress_is_replaced() -> None:
    sender, transfer = granted_sender(3, credit_chunks=8)
    sender.next_chunk(0.0, 0)
    sender.next_chunk(0.0, 1)
    sender.lane_moved(1.0, 1)
    sender.on_frame(1.6, reply(Type.PONG, transfer))
    assert sender.tick(1.6) == [0]


def test_parts_that_end_inside_a_chunk_wait_for_the_rest() -> None:
    net = network()
    manifest = make_manifest(2 * CHUNK)
    region = manifest.regions[0].region
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.sender.push(transfer, region, CHUNK + 1)
    for _ in range(20):
        net.step()
    assert net.reserved[11, transfer][region][:CHUNK] == contents(manifest)[region][:CHUNK]
    assert net.reserved[11, transfer][region][CHUNK:] == bytes(CHUNK)
    net.sender.push(transfer, region, CHUNK - 1)
    net.sender.commit(net.now, transfer, 0, {})
    net.run()
    assert net.admitted[Key("r")] == contents(manifest)


def test_push_beyond_the_manifest_and_commit_before_the_end() -> None:
    net = network()
    manifest = make_manifest(CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    with pytest.raises(ValueError, match="0 bytes pushed of 4096"):
        net.sender.commit(0.0, transfer, 0, {})
    with pytest.raises(ValueError, match="4097 bytes pushed of 4096"):
        net.sender.push(transfer, Region(0, Kind.KV), CHUNK + 1)
    with pytest.raises(ValueError, match="not in the manifest"):
        net.sender.push(transfer, Region(9, Kind.KV), 1)


def test_damaged_chunk_is_sent_again() -> None:
    net = network(seed=3, faults=Faults(damage=0.2), limits=Limits(max_resends=30))
    manifest = make_manifest(20 * CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.push_all(transfer)
    net.sender.commit(net.now, transfer, 0, {})
    net.run()
    (ended,) = net.ended[Key("r")]
    assert ended.committed
    assert ended.resent > 0
    assert net.admitted[Key("r")] == contents(manifest)


def test_chunk_damaged_every_time_fails_closed() -> None:
    net = network(faults=Faults(damage=1.0))
    manifest = make_manifest(2 * CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.push_all(transfer)
    net.sender.commit(net.now, transfer, 0, {})
    net.run()
    (ended,) = net.ended[Key("r")]
    assert not ended.committed
    assert ended.retryable
    assert "damaged 4 times" in ended.reason
    assert net.admitted == {}
    assert net.aborted == [Key("r")]


def test_digest_that_differs_is_never_admitted() -> None:
    net = network()
    manifest = make_manifest(CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.push_all(transfer)
    for _ in range(30):
        net.step()
    body = Commit(digest=1, first_token=0).encode()
    frame = control_frame(Type.COMMIT, source=11, target=22, transfer=transfer, body=body)
    net.receiver.on_frame(net.now, 11, frame)
    net.run()
    assert net.admitted == {}
    assert net.aborted == [Key("r")]
    assert "digest" in net.ended[Key("r")][0].reason


def test_resume_sends_only_what_is_missing() -> None:
    net = network()
    manifest = make_manifest(16 * CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.sender.push(transfer, manifest.regions[0].region, 12 * CHUNK)
    for _ in range(60):
        net.step()
    net.cut_control()
    net.sender.push(transfer, manifest.regions[0].region, 4 * CHUNK)
    net.sender.commit(net.now, transfer, 0, {})
    net.run()
    (ended,) = net.ended[Key("r")]
    assert ended.committed
    assert ended.resent == 0
    assert 16 * CHUNK < ended.wire_bytes <= 16 * (CHUNK + HEADER_BYTES)


def test_outage_shorter_than_the_bound_heals_and_a_longer_one_fails() -> None:
    for outage_s, committed in ((1.2, True), (4.0, False)):
        net = network()
        manifest = make_manifest(12 * CHUNK)
        transfer = net.open(Key("r"), manifest, contents(manifest))
        net.push_all(transfer)
        net.sender.commit(net.now, transfer, 0, {})
        for _ in range(4):
            net.step()
        net.up = False
        for _ in range(round(outage_s / 0.05)):
            net.step()
        net.up = True
        net.run()
        assert net.ended[Key("r")][0].committed is committed
        assert (Key("r") in net.admitted) is committed
        assert net.reserved == {}


def test_restarted_receiver_fails_what_it_had_granted() -> None:
    net = network()
    manifest = make_manifest(4 * CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    while not net.granted:
        net.step()
    net.cut_control()
    net.receiver = Receiver(23)
    net.reserved.clear()
    net.push_all(transfer)
    net.run()
    (ended,) = net.ended[Key("r")]
    assert (ended.committed, ended.retryable) == (False, True)
    assert "restarted" in ended.reason
    again = net.open(Key("r", 1), manifest, contents(manifest))
    net.push_all(again)
    net.sender.commit(net.now, again, 0, {})
    net.run()
    assert net.ended[Key("r", 1)][0].committed


def test_frames_of_another_life_are_dropped() -> None:
    receiver = Receiver(22)
    receiver.on_connected(11, "")
    offer = Offer(Key("r"), make_manifest(CHUNK)).encode()
    receiver.on_frame(
        0.0, 11, control_frame(Type.OFFER, source=11, target=21, transfer=1, body=offer)
    )
    assert not receiver.events
    with pytest.raises(FrameError, match="another incarnation"):
        receiver.begin_chunk(0.0, Header(Type.DATA, CHUNK, source=11, target=21, transfer=1))


def test_earlier_attempt_is_fenced_by_a_later_one() -> None:
    net = network()
    manifest = make_manifest(4 * CHUNK)
    net.open(Key("r", 0), manifest, contents(manifest))
    while not net.granted:
        net.step()
    later = net.open(Key("r", 1), manifest, contents(manifest))
    net.push_all(later)
    net.sender.commit(net.now, later, 0, {})
    net.run()
    assert not net.ended[Key("r", 0)][0].committed
    assert net.ended[Key("r", 1)][0].committed
    stale = net.open(Key("r", 0), manifest, contents(manifest))
    net.push_all(stale)
    net.run()
    assert "later attempt" in net.ended[Key("r", 0)][1].reason


def test_cancel_waits_for_the_receiver_and_for_readers() -> None:
    sender, transfer = granted_sender(2, credit_chunks=8)
    first, second = sender.next_chunk(0.0, 0), sender.next_chunk(0.0, 1)
    assert first is not None
    assert second is not None
    sender.events.clear()
    sender.cancel(0.0, transfer)
    sender.chunk_sent(0.0, first, 1, CHUNK)
    assert not sender.events  # not acknowledged
    sender.on_frame(0.0, reply(Type.CANCELLED, transfer))
    assert not sender.events  # a lane still reads the memory
    sender.chunk_sent(0.0, second, None, 0)
    (ended,) = sender.events
    assert isinstance(ended, Ended)
    assert (ended.committed, ended.retryable) == (False, False)


def test_commit_that_overtook_a_cancel_is_reported() -> None:
    sender, transfer = granted_sender(1, credit_chunks=8)
    sender.events.clear()
    sender.cancel(0.0, transfer)
    sender.on_frame(0.0, reply(Type.COMMITTED, transfer))
    (ended,) = sender.events
    assert isinstance(ended, Ended)
    assert ended.committed


def test_blocks_are_quarantined_while_a_lane_writes() -> None:
    net = network()
    manifest = make_manifest(4 * CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    while not net.granted:
        net.step()
    header = Header(
        Type.DATA, CHUNK, source=11, target=22, transfer=transfer, layer=0, kind=0, chunk=0
    )
    slot = net.receiver.begin_chunk(net.now, header)
    assert slot is not None
    net.sender.cancel(net.now, transfer)
    for _ in range(20):
        net.step()
    assert net.aborted == []
    net.receiver.end_chunk(net.now, slot, None)
    net.run()
    assert net.aborted == [Key("r")]


def granted_receiver(chunks: int) -> tuple[Receiver, Header, bytes]:
    """A receiver with transfer 1 of one region granted; its first chunk's header; the offer."""
    receiver = Receiver(22)
    receiver.on_connected(11, "")
    offer = Offer(Key("r"), make_manifest(chunks * CHUNK)).encode()
    receiver.on_frame(0.0, 11, told(Type.OFFER, offer))
    assert receiver.grant(0.0, (11, 1))
    receiver.outbox.clear()
    receiver.events.clear()
    header = Header(Type.DATA, CHUNK, source=11, target=22, transfer=1, checksum=5)
    return receiver, header, offer


def told(type_: Type, body: bytes = b"") -> Frame:
    return control_frame(type_, source=11, target=22, transfer=1, body=body)


def test_bitmap_names_only_chunks_that_were_verified() -> None:
    receiver, header, offer = granted_receiver(3)
    here = receiver.begin_chunk(0.0, header._replace(chunk=1))
    assert here is not None
    receiver.end_chunk(0.0, here, 5)
    assert receiver.begin_chunk(0.0, header) is not None  # still being written
    receiver.on_frame(0.0, 11, told(Type.OFFER, offer))
    ((_, frame),) = receiver.outbox
    assert Grant.decode(frame.body).have == b"\x02"


def batch(*numbers: int, size: int = CHUNK, transfer: int = 1) -> tuple[Header, list]:
    """A BATCH's header and rows; every chunk's checksum is 5."""
    size = len(numbers) * (size + ROW_BYTES)
    header = Header(Type.BATCH, size, source=11, target=22, transfer=transfer, chunk=len(numbers))
    return header, [(number, 5) for number in numbers]


def test_each_chunk_of_a_batch_is_judged_alone() -> None:
    receiver, header, _ = granted_receiver(4)
    here = receiver.begin_chunk(0.0, header)
    assert here is not None
    receiver.end_chunk(0.0, here, 5)
    places = receiver.begin_batch(0.0, *batch(0, 1, 2, 1))
    assert places is not None
    # One is here already, one is named twice: both are read and thrown away.
    assert [p if isinstance(p, int) else p.number for p in places] == [CHUNK, 1, 2, CHUNK]
    slots = [place for place in places if not isinstance(place, int)]
    receiver.end_batch(0.0, slots, [5, 6])
    receiver.flush_acks()
    told = {frame.header.type: decode_numbers(frame.body) for _, frame in receiver.outbox}
    assert told == {Type.NACK: (2,), Type.ACK: (0, 0, 1)}
    assert receiver.begin_chunk(0.0, header._replace(chunk=2)) is not None


def test_a_batch_that_breaks_is_asked_for_again_as_one() -> None:
    receiver, _, _ = granted_receiver(3)
    places = receiver.begin_batch(0.0, *batch(0, 2))
    assert places is not None
    receiver.end_batch(0.0, [p for p in places if not isinstance(p, int)], [None, None])
    ((_, frame),) = receiver.outbox
    assert (frame.header.type, decode_numbers(frame.body)) == (Type.LOST, (0, 2))


def test_batches_that_the_manifest_forbids_or_nobody_waits_for() -> None:
    receiver, _, _ = granted_receiver(3)
    with pytest.raises(FrameError, match="chunk 3 of 3"):
        receiver.begin_batch(0.0, *batch(0, 3))
    with pytest.raises(FrameError, match="the manifest says"):
        receiver.begin_batch(0.0, *batch(0, 1, size=CHUNK - 1))
    header, rows = batch(0, 1)
    with pytest.raises(FrameError, match="another incarnation"):
        receiver.begin_batch(0.0, header._replace(target=21), rows)
    assert receiver.begin_batch(0.0, *batch(0, 1, transfer=9)) is None
    assert receiver.begin_batch(0.0, header._replace(attempt=1), rows) is None
    # Nothing of these was taken for being written.
    assert [p for p in receiver.begin_batch(0.0, header, rows) or () if isinstance(p, int)] == []


def test_a_lane_takes_only_chunks_of_one_transfer_and_within_its_bounds() -> None:
    sender, first = granted_sender(3, credit_chunks=8)
    manifest = make_manifest(8 * CHUNK)
    second = sender.open(0.0, Key("s"), manifest)
    sender.push(second, manifest.regions[0].region, 8 * CHUNK)
    assert [task.number for task in sender.next_chunks(0.0, 0, 16 * CHUNK, 16)] == [0, 1, 2]
    assert not sender.has_ready  # what is pushed but not granted wakes nobody
    sender.on_frame(0.0, reply(Type.GRANT, second, Grant(5 * CHUNK).encode()))
    assert sender.has_ready
    taken = [sender.next_chunks(0.0, 0, 2 * CHUNK + 1, 16), sender.next_chunks(0.0, 1, 1, 16)]
    taken.append(sender.next_chunks(0.0, 2, 16 * CHUNK, 16))
    assert [[task.number for task in tasks] for tasks in taken] == [[0, 1], [2], [3, 4]]
    assert {task.transfer for tasks in taken for task in tasks} == {second} != {first}
    assert not sender.has_ready  # credit is used up


def test_copy_thrown_away_beside_one_that_breaks_is_asked_for_again() -> None:
    receiver, header, _ = granted_receiver(1)
    slot = receiver.begin_chunk(0.0, header)
    assert slot is not None
    assert receiver.begin_chunk(0.0, header) is None
    receiver.end_chunk(0.0, slot, None)
    ((_, frame),) = receiver.outbox
    assert (frame.header.type, decode_numbers(frame.body)) == (Type.LOST, (0,))
    assert receiver.begin_chunk(0.0, header) is not None


def test_sender_drops_answers_of_another_life() -> None:
    sender, transfer = granted_sender(1, credit_chunks=8)
    sender.events.clear()
    sender.on_frame(0.0, control_frame(Type.COMMITTED, source=21, target=11, transfer=transfer))
    sender.on_frame(0.0, control_frame(Type.COMMITTED, source=22, target=10, transfer=transfer))
    assert not sender.events


def test_lost_answer_to_a_commit_is_answered_again() -> None:
    net = network()
    manifest = make_manifest(CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.push_all(transfer)
    net.sender.commit(net.now, transfer, 0, {})
    while not net.admitted:
        net.step()
    net.receiver.outbox.clear()
    net.cut_control()
    net.run()
    assert [e.committed for e in net.ended[Key("r")]] == [True]


def test_a_peer_that_falls_silent_is_found_out_within_its_deadline_at_both_ends() -> None:
    """In the protocol's own time, whatever the machine does meanwhile: under 3 s with the silence
    that a plane allows its worker."""
    net = network()
    deadlines = Deadlines()
    manifest = make_manifest(3 * CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    net.sender.push(transfer, manifest.regions[0].region, CHUNK)
    for _ in range(20):
        net.step()
    assert Key("r") in net.granted
    net.up = False
    silent_s = net.now
    ended_s: dict[str, float] = {}
    while len(ended_s) < 2:
        net.step(0.01)
        assert net.now - silent_s < 3.0 - deadlines.worker_silence_s
        if Key("r") in net.ended:
            ended_s.setdefault("sender", net.now)
        if Key("r") in net.aborted:
            ended_s.setdefault("receiver", net.now)
    assert not net.ended[Key("r")][0].committed
    assert not net.reserved


def test_lease_ends_when_the_sender_forgets() -> None:
    net = network()
    manifest = make_manifest(CHUNK)
    net.open(Key("r"), manifest, contents(manifest))
    while not net.granted:
        net.step()
    net.sender._transfers.clear()
    net.run()
    assert net.aborted == [Key("r")]


def test_more_acknowledgements_than_a_frame_may_list() -> None:
    receiver = Receiver(22)
    receiver._history.ended((11, 1), Past(Key("r"), Type.COMMITTED, Reason("")))
    receiver._acks.owe((11, 1), range(70_000))
    receiver.flush_acks()
    counts = [len(decode_numbers(frame.body)) for _, frame in receiver.outbox]
    assert counts == [65_536, 4_464]


def test_authorisation_is_asked_before_memory() -> None:
    receiver = Receiver(22, authorise=lambda identity, manifest: f"{identity} may not")
    net = Network(Sender(11), receiver, 1)
    manifest = make_manifest(CHUNK)
    net.open(Key("r"), manifest, contents(manifest))
    net.run()
    (ended,) = net.ended[Key("r")]
    assert (ended.reason, ended.refused, ended.retryable) == ("peer may not", True, False)
    assert net.reserved == {}


def test_a_changed_manifest_or_a_wrong_size_ends_the_connection() -> None:
    net = network()
    manifest = make_manifest(CHUNK)
    transfer = net.open(Key("r"), manifest, contents(manifest))
    while not net.granted:
        net.step()
    other = Offer(Key("r"), replace(manifest, n_tokens=63)).encode()
    with pytest.raises(FrameError, match="changed its manifest"):
        net.receiver.on_frame(
            0.0, 11, control_frame(Type.OFFER, source=11, target=22, transfer=transfer, body=other)
        )
    short = Header(Type.DATA, CHUNK - 1, source=11, target=22, transfer=transfer)
    with pytest.raises(FrameError, match="the manifest says 4096"):
        net.receiver.begin_chunk(0.0, short)
    beyond = Header(Type.DATA, CHUNK, source=11, target=22, transfer=transfer, chunk=1)
    with pytest.raises(FrameError, match="not in the manifest"):
        net.receiver.begin_chunk(0.0, beyond)


def test_reason_round_trip() -> None:
    assert Reason.decode(Reason("x", False).encode()) == Reason("x", False)


fault_plans = st.builds(
    Faults,
    damage=st.sampled_from([0.0, 0.05, 0.2]),
    damage_control=st.sampled_from([0.0, 0.05]),
    double=st.sampled_from([0.0, 0.2]),
    cut_lane=st.sampled_from([0.0, 0.05]),
    cut_control=st.sampled_from([0.0, 0.03]),
    refuse=st.sampled_from([0.0, 0.2]),
    reject=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), faults=fault_plans, cancels=st.booleans())
def test_whatever_the_network_does_a_transfer_ends_once_and_whole_or_not_at_all(
    seed: int, faults: Faults, cancels: bool
) -> None:
    net = network(seed, faults, Limits(credit_bytes=4 * CHUNK, max_resends=8))
    chooser = random.Random(seed)
    keys = []
    for number in range(4):
        sizes = [chooser.randrange(0, 6 * CHUNK) for _ in range(chooser.randrange(1, 4))]
        manifest = make_manifest(*sizes)
        key = Key(f"r{number % 3}", number // 3)
        transfer = net.open(key, manifest, contents(manifest, number))
        keys.append((key, manifest, number))
        for _ in range(chooser.randrange(10)):
            net.step()
        if transfer not in net.sources:
            continue
        net.push_all(transfer)
        if cancels and chooser.random() < 0.3:
            net.sender.cancel(net.now, transfer)
        else:
            net.sender.commit(net.now, transfer, number, {})
    net.run(300.0)
    for key, manifest, number in keys:
        (ended,) = net.ended[key]
        if ended.committed:
            assert net.admitted[key] == contents(manifest, number)
    assert net.reserved == {}
    assert net.sources == {}
    assert len(net.aborted) == len(set(net.aborted))
    assert not set(net.aborted) & set(net.admitted)
