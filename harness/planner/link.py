"""What the throughput model knows of a link: the bound on its rate, and one transfer's delay."""

from __future__ import annotations

from dataclasses import dataclass

from harness.profiles import Profile
from harness.profiles.curves import FloatArray


@dataclass(frozen=True, slots=True)
class LinkModel:
    """`rate_gbps` None is unbounded. `window_bytes` bounds the bytes in flight of one TCP
    connection; a transfer uses `connections` of them at once. `rtt_s` is the round-trip time."""

    rate_gbps: float | None = None
    rtt_s: float = 0.0
    window_bytes: float | None = None
    connections: int = 1

    def transfer_gbps(self) -> float | None:
        """The rate of one transfer on an otherwise idle link: link rate or window / RTT a
        connection, whichever is less. None is unbounded."""
        bounds = [] if self.rate_gbps is None else [self.rate_gbps]
        if self.window_bytes is not None and self.rtt_s > 0:
            bounds.append(self.connections * self.window_bytes * 8e-9 / self.rtt_s)
        return min(bounds, default=None)


#: No bound and no delay: the paper's own TTFT.
IDEAL_LINK = LinkModel()


def delivery_s(profile: Profile, link: LinkModel, tokens: FloatArray) -> FloatArray:
    """Seconds from the start of a prefill to the arrival of its whole cache on an idle link.

    Layers are sent as they are computed, n equal ones: layer i leaves at the later of its end
    i T/n and the end of the one before. The last arrives at max(T + S/(n r), T/n + S/r) + RTT/2.
    """
    prefill_s = profile.prefill_array_s(tokens)
    rate_gbps = link.transfer_gbps()
    if rate_gbps is None:
        return prefill_s + link.rtt_s / 2
    sending_s = (profile.fixed_bytes + profile.per_token_bytes * tokens) * 8e-9 / rate_gbps
    n = profile.n_layers
    return _later(prefill_s + sending_s / n, prefill_s / n + sending_s) + link.rtt_s / 2


def _later(first: FloatArray, second: FloatArray) -> FloatArray:
    return first * (first >= second) + second * (first < second)
