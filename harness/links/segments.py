"""Super-packets as TUN hands them over: how many segments they hold, and dropping some of them.

With offloads a TUN device passes up to 64 KiB of TCP as one packet behind a 10-byte virtio header.
A link loses single segments, so a loss cuts the super-packet into the runs that survive.
"""

from __future__ import annotations

import struct

from harness.links.shape import ETHERNET_HEADER_BYTES

VIRTIO_HEADER_BYTES = 10
_GSO_NONE, _GSO_TCPV4 = 0, 1
_GSO_TYPE_MASK = 0x7F
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def segment_count(packet: bytes) -> int:
    """Segments that a network card would make of `packet` (virtio header included)."""
    gso_size = packet[4] | packet[5] << 8
    if not packet[1] or not gso_size:
        return 1
    payload = len(packet) - VIRTIO_HEADER_BYTES - _header_bytes(packet)
    return max(1, -(-payload // gso_size))


def frame_bytes(packet: bytes, segments: int) -> int:
    """Ethernet frame bytes of all segments of `packet`."""
    once = len(packet) - VIRTIO_HEADER_BYTES + ETHERNET_HEADER_BYTES
    if segments == 1:
        return once
    return once + (segments - 1) * (_header_bytes(packet) + ETHERNET_HEADER_BYTES)


def surviving_runs(segments: int, lost: list[int]) -> list[tuple[int, int]]:
    """Half-open runs of 0..segments-1 between the lost indices (ascending)."""
    runs, start = [], 0
    for index in [*lost, segments]:
        if index > start:
            runs.append((start, index))
        start = index + 1
    return runs


def cut(packet: bytes, run: tuple[int, int], segments: int) -> bytes:
    """The segments `run` of a TCP/IPv4 super-packet, as a packet of its own."""
    start, stop = run
    if run == (0, segments):
        return packet
    gso_size = packet[4] | packet[5] << 8
    headers = _header_bytes(packet)
    ip_bytes = (packet[VIRTIO_HEADER_BYTES] & 0x0F) * 4
    body = VIRTIO_HEADER_BYTES + headers
    payload = packet[body + start * gso_size : body + stop * gso_size]

    virtio = bytearray(packet[:VIRTIO_HEADER_BYTES])
    if stop - start == 1:
        virtio[1] = _GSO_NONE
        virtio[4:6] = b"\0\0"
    ip = bytearray(packet[VIRTIO_HEADER_BYTES : VIRTIO_HEADER_BYTES + ip_bytes])
    identification = (struct.unpack_from("!H", ip, 4)[0] + start) & 0xFFFF
    struct.pack_into("!HH", ip, 2, headers + len(payload), identification)
    struct.pack_into("!H", ip, 10, 0)
    struct.pack_into("!H", ip, 10, ~ones_sum(bytes(ip)) & 0xFFFF)

    tcp = bytearray(packet[VIRTIO_HEADER_BYTES + ip_bytes : body])
    sequence = (struct.unpack_from("!I", tcp, 4)[0] + start * gso_size) & 0xFFFFFFFF
    struct.pack_into("!I", tcp, 4, sequence)
    if stop < segments:
        tcp[13] &= ~(_FIN | _PSH)
    if start > 0:
        tcp[13] &= ~_CWR & 0xFF
    # The checksum is left to the receiver (VIRTIO_NET_HDR_F_NEEDS_CSUM): the field holds the sum of
    # the pseudo-header only, whose length has changed.
    pseudo = bytes(ip[12:20]) + struct.pack("!HH", ip[9], len(tcp) + len(payload))
    struct.pack_into("!H", tcp, 16, ones_sum(pseudo))
    return bytes(virtio) + bytes(ip) + bytes(tcp) + payload


def can_cut(packet: bytes) -> bool:
    """Whether `packet` is a TCP/IPv4 super-packet, the only kind that the device is asked for."""
    return packet[1] & _GSO_TYPE_MASK == _GSO_TCPV4


def ones_sum(data: bytes) -> int:
    """The 16-bit one's complement sum of RFC 1071, not complemented."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _header_bytes(packet: bytes) -> int:
    """IPv4 and TCP header bytes of a TCP packet."""
    ip_bytes = (packet[VIRTIO_HEADER_BYTES] & 0x0F) * 4
    return ip_bytes + (packet[VIRTIO_HEADER_BYTES + ip_bytes + 12] >> 4) * 4
