"""Bugs to order: each breaks the code under test in one place, and a campaign must notice.

A planted fault is a context manager; while it lasts, the mutated code runs. They say what the
campaign is worth: a kind of mistake that it would not notice is not on the list of those that it
rules out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

from engine.cache import keys
from engine.cache.pool import HybridPool, Lease
from engine.scheduler import Scheduler
from engine.transport.inbound import Inbound
from engine.transport.incoming import Handle
from engine.transport.outgoing import Outgoing
from engine.transport.receiver import Receiver
from engine.transport.reservations import Reservations
from engine.transport.sender import Sender
from engine.worker.arrivals import Arrivals
from engine.worker.courier import Courier
from harness import directory
from harness.accounts import DecodePool, PrefillPool
from harness.instances.remote import RemoteInstance
from harness.router import Router
from harness.schedulers.roles import Roles

T = TypeVar("T")
Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def _instead(owner: Any, name: str, mutated: Callable[..., Any]) -> Plant:
    """`mutated(original, *arguments)` runs in place of `owner.name`. Raises TypeError where the two
    do not take the same arguments: that call would be noticed, and not the bug."""
    original = getattr(owner, name)
    taken = inspect.signature(mutated).parameters.values()
    any_number = any(each.kind is each.VAR_POSITIONAL for each in taken)
    if not any_number and len(taken) != 1 + len(inspect.signature(original).parameters):
        raise TypeError(f"{mutated.__name__} does not take what {name} does")

    def call(*args: Any, **options: Any) -> Any:
        return mutated(original, *args, **options)

    return lambda: mock.patch.object(owner, name, call)


def _both(*plants: Plant) -> Plant:
    """Where one part of the code makes up for the other, a bug needs both."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in plants:
                stack.enter_context(each())
            yield

    return plant


def _nothing(original: Any, *args: Any, **options: Any) -> None:
    """The call is left out."""


def _anew(memo: Any) -> Plant:
    """`memo` (a function under `lru_cache`) knows nothing before the plant nor keeps any of it."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        memo.cache_clear()
        try:
            yield
        finally:
            memo.cache_clear()

    return plant


# --- the cache pool ------------------------------------------------------------------------------


def _free_pages_twice(original: Any, pool: HybridPool, lease: Lease) -> None:
    own = lease.pages[len(lease._shared) :]
    original(pool, lease)
    pool._pages.give(own[:1])


def _free_slot_twice(original: Any, pool: HybridPool, lease: Lease) -> None:
    slot = lease.slot
    original(pool, lease)
    pool._slots.give((slot,))


def _hit_one_deeper(original: Any, pool: HybridPool, chain: list[Any], prompt_tokens: int) -> int:
    """One block more than the deepest state, where there is one."""
    found: int = original(pool, chain, prompt_tokens)
    deeper = found + pool.block_tokens
    return deeper if found and deeper <= len(chain) * pool.block_tokens else found


def _evict_while_read(original: Any, pool: HybridPool) -> int:
    """Checkpoints that are being copied are taken like others."""
    if not len(pool._slots):
        for block in pool._states.values():
            block.readers = 0
    return int(original(pool))


def _keep_on_cancel(original: Any, scheduler: Scheduler, sequence: Any, reason: str) -> None:
    if reason == "cancelled":
        sequence.hand_over, reason = True, "length"
    original(scheduler, sequence, reason)


# --- the transport -------------------------------------------------------------------------------


def _keep_in_flight(original: Any, sender: Sender, now: float) -> None:
    """Chunks whose acknowledgement was lost with the connection count as sent for ever."""
    sender.connected = False
    sender.outbox.clear()


def _keep_in_lane(original: Any, sender: Sender, now: float, lane: int) -> None:
    sender._lane_progress.pop(lane, None)


def _verify_early(original: Any, receiver: Receiver, now: float, transfer: Any) -> None:
    """A commit is enough; chunks that are still under way and the digest are not looked at."""
    if transfer.commit is not None:
        transfer.here = transfer.plan.count
        with mock.patch("engine.transport.receiver.digest_of", lambda _: transfer.commit.digest):
            original(receiver, now, transfer)


def _leak_credit(original: Any, transfer: Outgoing, number: int) -> None:
    before = transfer.in_flight_bytes
    original(transfer, number)
    if number == 0:
        transfer.in_flight_bytes = before


def _no_lease_end(original: Any, receiver: Receiver, now: float) -> None:
    for transfer in receiver._transfers.values():
        transfer.lease_until_s = transfer.since_s = now
    original(receiver, now)


def _release_under_writers(original: Any, receiver: Receiver, transfer: Any) -> None:
    transfer.writers = 0
    original(receiver, transfer)


def _any_incarnation(original: Any, inbound: Any, hello: Any, frame: Any) -> Any:
    found = original(inbound, hello, frame)
    return None if found is not None and "incarnation" in found.text else found


# --- the worker ----------------------------------------------------------------------------------


def _trust_directory(
    original: Any, courier: Courier, block_keys: list[int], n_tokens: int, held: int
) -> Any:
    """What the sender left out because it was said to be here is not looked for."""
    lease = courier._pool.acquire(
        block_keys[: held // courier._layout.page_tokens], n_tokens, arriving=True
    )
    lease.keys = block_keys
    return lease, courier._medium.open(lease, n_tokens, held)


def _forget_reserved(original: Any, reservations: Reservations, handle: Handle) -> None:
    """Memory of a transfer that broke stays reserved."""
    reservations._incoming.pop(handle, None)


# --- the control plane ---------------------------------------------------------------------------


def _count_twice(original: Any, router: Router, request: Any, record: Any) -> Any:
    record.attempts += record.attempts > 1
    return original(router, request, record)


async def _stay_in_both(original: Any, roles: Roles, name: str, role: Any) -> bool:
    """A converted instance is still offered the work of its old role."""
    converted: bool = await original(roles, name, role)
    for pool in (roles._view.prefill[roles._cluster], roles._view.decode[roles._cluster]):
        if name in pool.key_of:
            pool.set_usable(pool.key_of[name], True)
    return converted


async def _back_from_the_dead(original: Any, roles: Roles, name: str, role: Any) -> bool:
    """An instance that dies while it warms up in its new role is offered work."""
    converted: bool = await original(roles, name, role)
    pool = (roles._view.prefill if role == "prefill" else roles._view.decode)[roles._cluster]
    if name in pool.key_of and pool.key_of[name] not in pool.away:
        pool.set_usable(pool.key_of[name], True)
    return converted


def _settle_late(
    original: Any, pool: PrefillPool, key: int, now_s: float, predicted_s: float, took_s: float
) -> None:
    """A failed attempt's place in the queue is not given back."""
    if took_s >= predicted_s or pool.queued[key] > 1:
        original(pool, key, now_s, predicted_s, took_s)


def _settle_twice(original: Any, pool: DecodePool, key: int, tokens: int) -> None:
    original(pool, key, tokens)
    if pool.active(key) > 2:
        original(pool, key, tokens)


#: Name -> how to plant it.
PLANTED: dict[str, Plant] = {
    "page freed twice": _instead(HybridPool, "_release", _free_pages_twice),
    "slot freed twice": _instead(HybridPool, "_release", _free_slot_twice),
    "hit depth off by one": _instead(HybridPool, "_usable", _hit_one_deeper),
    "checkpoint evicted while copied": _instead(HybridPool, "_take_slot", _evict_while_read),
    "tenant salt dropped": _both(
        _instead(keys, "tenant_salt", lambda original, tenant: 0), _anew(directory.tenant_base)
    ),
    "memory of a cancelled sequence kept": _instead(Scheduler, "_end", _keep_on_cancel),
    "lost acknowledgement ignored": _both(
        _instead(Sender, "on_disconnected", _keep_in_flight),
        _instead(Sender, "lane_down", _keep_in_lane),
    ),
    "credit leaks": _instead(Outgoing, "land", _leak_credit),
    "partial cache admitted": _instead(Receiver, "_maybe_verify", _verify_early),
    "lease never ends": _instead(Receiver, "tick", _no_lease_end),
    "memory freed under a writer": _instead(Receiver, "_maybe_release", _release_under_writers),
    "stale epoch accepted": _instead(Inbound, "_why_not_greeted", _any_incarnation),
    "directory trusted blindly": _instead(Courier, "_reserve", _trust_directory),
    "broken transfer keeps its memory": _instead(Reservations, "void", _forget_reserved),
    "abandoned attempt accepted later": _instead(
        Arrivals, "abandoned", lambda original, arrivals, key: False
    ),
    "abandon forgotten": _instead(RemoteInstance, "abandon", _nothing),
    "retry counted twice": _instead(Router, "_begin", _count_twice),
    "converted instance kept in both pools": _instead(Roles, "convert", _stay_in_both),
    "instance lost in its conversion used": _instead(Roles, "convert", _back_from_the_dead),
    "failed prefill stays in the queue's account": _instead(PrefillPool, "settle", _settle_late),
    "decode settled twice": _instead(DecodePool, "settle", _settle_twice),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with the fault of that name in the code. Raises KeyError."""
    with PLANTED[name]():
        yield
