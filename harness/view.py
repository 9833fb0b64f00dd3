"""What the control plane knows: its own accounting of instances, and measured link signals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.accounts import DecodePool, Path, PrefillPool
from harness.ports import LinkSignals, Role
from workloads.request import Request


class PrefixHits(Protocol):
    """Which cluster and instance is thought to hold how much of a prompt (`harness.directory`).

    `hit_tokens` and `instance_tokens` count what a prefill could start from: whole blocks up to the
    deepest recurrent state, at most all but the last token. `held_tokens` counts attention blocks
    alone: they need not cross again.
    """

    def hit_tokens(self, cluster: str, request: Request) -> int: ...

    def instance_tokens(self, instance: str, request: Request) -> int: ...

    def holders(self, cluster: str, request: Request, most: int) -> Sequence[tuple[str, int]]:
        """Up to `most` instances of `cluster` with a prefix, the longest first; none where the
        instances of a cluster share one pool."""
        ...

    def held_tokens(self, cluster: str, request: Request) -> int: ...

    def instance_held_tokens(self, instance: str, request: Request) -> int: ...


@dataclass(slots=True)
class View:
    """Everything a policy may look at when it routes. `copies`: prefixes can be fetched from
    another cluster before a prefill. `explains`: somebody wants to know what else a decision could
    have been, so it is worth predicting what the choice does not depend on.

    An instance takes work while it is not lost (what whoever watches it says, `set_lost`) and
    stands in a role (what changes of role say, `leave` and `enter`); neither undoes the other.
    """

    now_s: float
    prefill: dict[str, PrefillPool]
    decode: dict[str, DecodePool]
    links: dict[tuple[str, str], LinkSignals]
    directory: PrefixHits | None = None
    byte_scale: float = 1.0
    copies: bool = False
    explains: bool = False
    #: Names of instances that are dead, or do not answer, and are not back yet.
    lost: set[str] = field(default_factory=set)
    #: Losses so far, and which of them was each instance's last.
    n_losses: int = 0
    last_loss: dict[str, int] = field(default_factory=dict)
    #: How often an instance began to take work, after a loss or in a new role.
    n_returns: int = 0
    _paths: dict[tuple[str, str], Path] = field(default_factory=dict)

    def set_lost(self, name: str, lost: bool) -> None:
        """`name` takes no work from now on, in no role; or it is back. Idempotent."""
        if lost and name not in self.lost:
            self.lost.add(name)
            self.n_losses += 1
            self.last_loss[name] = self.n_losses
        elif not lost:
            self.lost.discard(name)
        self._apply(name)

    def lost_since(self, n_losses: int, *names: str) -> bool:
        """Whether one of `names` was lost after `n_losses` was the count."""
        return any(self.last_loss.get(name, 0) > n_losses for name in names)

    def leave(self, cluster: str, name: str) -> None:
        """`name` takes no work in any role until it enters one."""
        for pool in (self.prefill.get(cluster), self.decode.get(cluster)):
            if pool is not None and name in pool.key_of:
                pool.away.add(pool.key_of[name])
        self._apply(name)

    def enter(self, cluster: str, name: str, role: Role) -> None:
        """`name` serves `role` and no other, as soon as it is not lost."""
        self.leave(cluster, name)
        pool = self.prefill[cluster] if role is Role.PREFILL else self.decode[cluster]
        key = pool.key_of.get(name)
        if key is None:
            pool.add(name)
        else:
            pool.away.discard(key)
        self._apply(name)

    def _apply(self, name: str) -> None:
        for pool in self._pools():
            key = pool.key_of.get(name)
            if key is not None:
                usable = name not in self.lost and key not in pool.away
                pool.set_usable(key, usable)
                self.n_returns += usable

    def _pools(self) -> Iterator[PrefillPool | DecodePool]:
        yield from self.prefill.values()
        yield from self.decode.values()

    def path(self, source: str, sink: str) -> Path | None:
        """The account of a link; None where there is none."""
        ends = (source, sink)
        path = self._paths.get(ends)
        if path is None and ends in self.links:
            path = self._paths[ends] = Path(self.links[ends], self.byte_scale)
        return path
