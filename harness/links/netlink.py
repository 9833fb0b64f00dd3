"""Counters of a qdisc in another namespace, read over one kept netlink socket.

A socket belongs for life to the namespace it was made in, so one thread enters the namespace, makes
it and ends. A sample then costs tens of microseconds, where a process for `tc -s` would cost
milliseconds; the monitor samples many times a second.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
_RTM_GETQDISC = 38
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TC_H_ROOT = 0xFFFFFFFF
_TCA_STATS2, _TCA_STATS_BASIC, _TCA_STATS_QUEUE = 7, 1, 3
_NLA_TYPE_MASK = 0x3FFF


@dataclass(frozen=True, slots=True)
class QdiscCounters:
    """`sent_*` left the qdisc; `backlog_bytes` is in it, a delay line included."""

    sent_bytes: int
    sent_packets: int
    backlog_bytes: int
    dropped_packets: int


def set_namespace(path: str) -> None:
    """Move the calling thread into the network namespace at `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(fd)


def call_in_namespace(path: str, function: Callable[[], T]) -> T:
    """Call `function` in a thread that has entered the namespace at `path`; return its result."""
    result: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            set_namespace(path)
            result.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


class QdiscReader:
    """Reads the root qdisc's counters of `interface` in the namespace at `path`."""

    def __init__(self, path: str, interface: str) -> None:
        def connect() -> tuple[socket.socket, int]:
            opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
            return opened, socket.if_nametoindex(interface)

        self._socket, self._index = call_in_namespace(path, connect)
        self._socket.settimeout(1.0)
        self._sequence = 0
        # Counters are sampled in one thread and shapes changed in another; a socket lists for one.
        self._listing = threading.Lock()

    def read(self) -> QdiscCounters | None:
        """The counters, or None while the interface has no root qdisc of its own."""
        with self._listing:
            return self._list()

    def _list(self) -> QdiscCounters | None:
        self._sequence += 1
        body = struct.pack("=BxxxiIII", socket.AF_UNSPEC, self._index, 0, 0, 0)
        header = struct.pack(
            "=IHHII", 16 + len(body), _RTM_GETQDISC, _NLM_F_REQUEST_DUMP, self._sequence, 0
        )
        self._socket.send(header + body)
        found = None
        while True:
            data = self._socket.recv(65_536)
            for kind, payload in _messages(data):
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    code = struct.unpack_from("=i", payload)[0]
                    raise OSError(-code, "netlink refused to list qdiscs")
                _, index, _, parent, _ = struct.unpack_from("=BxxxiIII", payload)
                if index == self._index and parent == _TC_H_ROOT:
                    found = _counters(payload[20:])

    def close(self) -> None:
        self._socket.close()


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, offset)
        yield kind, data[offset + 16 : offset + length]
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return
        yield kind & _NLA_TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _counters(attributes: bytes) -> QdiscCounters | None:
    for kind, value in _attributes(attributes):
        if kind == _TCA_STATS2:
            parts = dict(_attributes(value))
            sent_bytes, sent_packets = struct.unpack_from("=QI", parts[_TCA_STATS_BASIC])
            _, backlog, dropped = struct.unpack_from("=III", parts[_TCA_STATS_QUEUE])
            return QdiscCounters(sent_bytes, sent_packets, backlog, dropped)
    return None
