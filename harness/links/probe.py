"""Which backends this host offers, found by really setting each up in a scratch namespace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from harness.links.netlink import call_in_namespace
from harness.links.state import NETNS_DIR, PREFIX, LinkError, LinkState, command, remove

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000


@dataclass(frozen=True, slots=True)
class Offer:
    """Whether a backend works here; `reason` says in words why not, or what it gives."""

    backend: str
    available: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Offers:
    """All backends, best first, and which rate qdisc the tbf backend would use."""

    by_backend: dict[str, Offer]
    rate_qdisc: str

    def available(self, backend: str) -> bool:
        return self.by_backend[backend].available


def probe() -> Offers:
    """Try every backend; leaves nothing behind."""
    state = LinkState.new("probe", ("a", "b"), persistent=False)
    rate_qdisc = "tbf"
    try:
        with _scratch(state) as namespace:
            offers = [_offer("netem", _try_netem(namespace)), _offer("tun", _try_tun(namespace))]
            complaint = _try_qdisc(namespace, "tbf rate 1gbit burst 128kb limit 1mb")
            if complaint and not _try_qdisc(namespace, "htb default 1"):
                rate_qdisc, complaint = "htb", ""
            offers.append(_offer("tbf", complaint))
    except (LinkError, OSError) as error:
        why = f"no network namespace can be made: {error}"
        if os.geteuid() != 0:
            why = "needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) for network namespaces"
        offers = [Offer(name, False, why) for name in ("netem", "tun", "tbf")]
    offers.append(Offer("relay", True, _GIVES["relay"]))
    return Offers({offer.backend: offer for offer in offers}, rate_qdisc)


_GIVES = {
    "netem": "rate, delay, jitter, loss in the kernel; end-to-end TCP",
    "tun": "rate, delay, jitter, loss in a process of its own; end-to-end TCP, to about 4 Gbit/s",
    "tbf": "rate only, in the kernel; end-to-end TCP",
    "relay": "rate and delay without privilege; TCP ends at the relay: no loss, no true TCP_INFO",
}


def _offer(backend: str, complaint: str) -> Offer:
    return Offer(backend, not complaint, complaint or _GIVES[backend])


@contextlib.contextmanager
def _scratch(state: LinkState) -> Iterator[str]:
    """A namespace with one end of a veth pair `PREFIX+token+a` in it."""
    name = state.namespace_name("probe")
    state.namespaces = {name: 0}
    state.save()
    try:
        command("ip", "netns", "add", name)
        state.namespaces[name] = (NETNS_DIR / name).stat().st_ino
        interface = f"{PREFIX}{state.token}"
        command(
            *("ip", "-n", name, "link", "add", f"{interface}a", "type", "veth"),
            *("peer", "name", f"{interface}b"),
        )
        yield name
    finally:
        remove(state)


def _try_qdisc(namespace: str, words: str) -> str:
    """Add and delete a root qdisc; returns the complaint, or "" when it worked."""
    token = namespace.split("-")[1]
    where = ["dev", f"{PREFIX}{token}a", "root"]
    try:
        command("tc", "-n", namespace, "qdisc", "add", *where, *words.split())
        command("tc", "-n", namespace, "qdisc", "delete", *where)
    except LinkError as error:
        if "unknown" in str(error).lower() or "no such file" in str(error).lower():
            return f"this kernel has no sch_{words.split()[0]}"
        return str(error)
    return ""


def _try_netem(namespace: str) -> str:
    return _try_qdisc(namespace, "netem delay 1ms rate 1gbit limit 1000")


def _try_tun(namespace: str) -> str:
    token = namespace.split("-")[1]

    def make() -> None:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        try:
            request = tun_request(f"{PREFIX}{token}t")
            fcntl.ioctl(fd, TUNSETIFF, request)
        finally:
            os.close(fd)

    try:
        call_in_namespace(str(NETNS_DIR / namespace), make)
    except FileNotFoundError:
        return "there is no /dev/net/tun"
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    return ""


def tun_request(name: str) -> bytes:
    """The ifreq of a TUN device with offload headers."""
    return struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
