"""Cutting super-packets: what arrives is what a network that lost those segments would deliver."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from harness.links.segments import (
    VIRTIO_HEADER_BYTES,
    cut,
    frame_bytes,
    ones_sum,
    segment_count,
    surviving_runs,
)

SOURCE, SINK = bytes([10, 77, 0, 1]), bytes([10, 77, 0, 2])
MSS = 1448
FIN_PSH_ACK = 0x19


def super_packet(payload: bytes, sequence: int = 1000, flags: int = FIN_PSH_ACK) -> bytes:
    gso = (1, MSS) if len(payload) > MSS else (0, 0)
    virtio = struct.pack("<BBHHHH", 1, gso[0], 52, gso[1], 20, 16)
    pseudo = ones_sum(SOURCE + SINK + struct.pack("!HH", 6, 32 + len(payload)))
    ports = struct.pack("!HHIIBB", 5000, 6000, sequence, 77, 8 << 4, flags)
    tcp = ports + struct.pack("!HHH", 500, pseudo, 0) + bytes(12)
    ip = bytearray(
        struct.pack("!BBHHHBBH4s4s", 0x45, 0, 52 + len(payload), 9, 0x4000, 64, 6, 0, SOURCE, SINK)
    )
    struct.pack_into("!H", ip, 10, ~ones_sum(bytes(ip)) & 0xFFFF)
    return virtio + bytes(ip) + tcp + payload


def test_counts_segments_and_frames() -> None:
    packet = super_packet(bytes(3 * MSS + 1))
    assert segment_count(packet) == 4
    assert frame_bytes(packet, 4) == 4 * 66 + 3 * MSS + 1
    assert segment_count(super_packet(bytes(10))) == 1
    assert frame_bytes(super_packet(bytes(10)), 1) == 76


def test_runs_between_losses() -> None:
    assert surviving_runs(5, [2]) == [(0, 2), (3, 5)]
    assert surviving_runs(5, [0, 4]) == [(1, 4)]
    assert surviving_runs(2, [0, 1]) == []


@given(
    segments=st.integers(2, 12),
    tail=st.integers(1, MSS),
    lost=st.sets(st.integers(0, 11), min_size=1, max_size=11),
    sequence=st.integers(0, 2**32 - 1),
)
def test_surviving_segments_keep_their_place_and_have_true_headers(
    segments: int, tail: int, lost: set[int], sequence: int
) -> None:
    payload = bytes(index % 251 for index in range((segments - 1) * MSS + tail))
    packet = super_packet(payload, sequence)
    dropped = sorted(index for index in lost if index < segments)
    arrived = {}
    for run in surviving_runs(segments, dropped):
        piece = cut(packet, run, segments)
        assert run[1] - run[0] == segment_count(piece)
        ip, tcp = piece[VIRTIO_HEADER_BYTES:], piece[VIRTIO_HEADER_BYTES + 20 :]
        assert ones_sum(ip[:20]) == 0xFFFF
        assert len(ip) == struct.unpack_from("!H", ip, 2)[0]
        pseudo = ip[12:20] + struct.pack("!HH", 6, len(ip) - 20)
        assert ones_sum(pseudo) == struct.unpack_from("!H", tcp, 16)[0]
        offset = (struct.unpack_from("!I", tcp, 4)[0] - sequence) & 0xFFFFFFFF
        arrived[offset // MSS] = run
        assert payload[offset : offset + len(ip) - 52] == ip[52:]
        # Only the piece with the last byte may end the stream.
        assert bool(tcp[13] & 1) == (run[1] == segments)
    expected = [index for index in range(segments) if index not in dropped]
    seen = sorted(index for run in arrived.values() for index in range(*run))
    assert expected == seen
