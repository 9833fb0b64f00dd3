"""Money: what a request costs, and the prices at which one configuration stops paying.

Prices are in any one currency. An hour of a configuration costs its instances' hours and the bytes
that cross; a request costs that hour divided by the requests of an hour at the given rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """Currency per instance-hour and per GB (1e9 bytes) that leaves the remote cluster.

    None is unknown: then costs of configurations that need it are unknown too.
    """

    remote_per_hour: float | None = None
    local_per_hour: float | None = None
    egress_per_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Operation:
    """A configuration at work: instances of each cluster, requests/s, GB sent per request."""

    n_remote: int
    n_local: int
    requests_per_s: float
    gb_per_request: float = 0.0

    @property
    def requests_per_hour(self) -> float:
        return 3600 * self.requests_per_s


def cost_per_hour(work: Operation, prices: Prices) -> float | None:
    """None when a price that it needs is unknown."""
    cost = work.requests_per_hour * work.gb_per_request * prices.egress_per_gb
    for count, price in (
        (work.n_remote, prices.remote_per_hour),
        (work.n_local, prices.local_per_hour),
    ):
        if count:
            if price is None:
                return None
            cost += count * price
    return cost


def cost_per_request(work: Operation, prices: Prices) -> float | None:
    """None when a price is unknown or nothing is served."""
    cost = cost_per_hour(work, prices)
    return None if cost is None or work.requests_per_s <= 0 else cost / work.requests_per_hour


def break_even_remote_per_hour(
    work: Operation, baseline: Operation, prices: Prices
) -> float | None:
    """The remote instance-hour price at which `work` costs a request what `baseline` does.

    Below it `work` is cheaper. Negative: `work` costs more even with free remote instances.
    `baseline` has no remote instances. None when a price is unknown or `work` has none.
    """
    target = cost_per_request(baseline, prices)
    if not work.n_remote or baseline.n_remote or target is None or prices.local_per_hour is None:
        return None
    others = work.n_local * prices.local_per_hour
    others += work.requests_per_hour * work.gb_per_request * prices.egress_per_gb
    return (target * work.requests_per_hour - others) / work.n_remote


def break_even_egress_per_gb(work: Operation, baseline: Operation, prices: Prices) -> float | None:
    """The egress price at which `work` costs a request what `baseline` does; see above."""
    target = cost_per_request(baseline, prices)
    instances = cost_per_hour(work, Prices(prices.remote_per_hour, prices.local_per_hour))
    if target is None or instances is None or work.gb_per_request <= 0:
        return None
    if work.requests_per_s <= 0:
        return None
    return (target - instances / work.requests_per_hour) / work.gb_per_request
