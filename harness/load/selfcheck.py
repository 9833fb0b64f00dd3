"""Whether the client was the limit: what it saw of itself, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Own lateness of sends (p99), s.
LATE_S = 0.010
#: Share of the run in which the loop could not run, and its longest pause, s.
BLOCKED_SHARE = 0.05
BLOCKED_S = 1.0
#: Share of a core that one client process used.
CPU_SHARE = 0.90
#: Wait for a connection under a limit of connections (p99), s.
POOL_WAIT_S = 0.010


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """One client process over one phase. `blocked_s` sums how late the loop's own timer came;
    `connection_limit` says that waits for connections come from a limit and not from opening them.
    `core_wait_s` is how long the loop's thread was ready to run and other processes had the cores:
    what of the rest is the machine's doing.
    """

    duration_s: float
    cpu_s: float
    blocked_s: float
    longest_block_s: float
    connection_limit: bool = False
    core_wait_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def core_wait_share(self) -> float:
        return self.core_wait_s / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def blocked_share(self) -> float:
        return self.blocked_s / self.duration_s if self.duration_s > 0 else 0.0


def client_limits(
    clients: Sequence[ClientHealth],
    lateness_p99_s: float | None,
    pool_wait_p99_s: float | None,
) -> list[str]:
    """Why the numbers are the client's rather than the server's; empty when they are not.

    `lateness_p99_s` (sent - due) and `pool_wait_p99_s` are of the merged histograms of all clients;
    None is too few samples to tell.
    """
    found = []
    if lateness_p99_s is not None and lateness_p99_s > LATE_S:
        found.append(
            f"requests left {lateness_p99_s * 1e3:.1f} ms late (p99; limit {LATE_S * 1e3:g} ms)"
        )
    worst = max(clients, key=lambda each: each.blocked_share, default=None)
    if worst is not None and worst.blocked_share > BLOCKED_SHARE:
        found.append(
            f"the client's loop was blocked {worst.blocked_share:.0%} of the time "
            f"(limit {BLOCKED_SHARE:.0%})"
        )
    longest_s = max((each.longest_block_s for each in clients), default=0.0)
    if longest_s > BLOCKED_S:
        found.append(f"the client's loop stood still for {longest_s:.2f} s (limit {BLOCKED_S:g} s)")
    busiest = max((each.cpu_share for each in clients), default=0.0)
    if busiest > CPU_SHARE:
        found.append(f"a client process used {busiest:.0%} of a core (limit {CPU_SHARE:.0%})")
    limited = any(each.connection_limit for each in clients)
    if limited and pool_wait_p99_s is not None and pool_wait_p99_s > POOL_WAIT_S:
        found.append(
            f"requests waited {pool_wait_p99_s * 1e3:.1f} ms for a connection (p99; limit "
            f"{POOL_WAIT_S * 1e3:g} ms)"
        )
    return found
