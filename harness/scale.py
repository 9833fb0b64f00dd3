"""How an emulated system relates to the modelled one, and back.

`emulate` keeps the ratios that decide the outcome: S_kv / (T_prefill x B_out) and the share of the
fixed state in the payload. One engine token stands for `token_scale` tokens, one real second for
`time_scale` modelled seconds, one real byte for `byte_scale` modelled bytes. In `simulate` and
`live` all are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from results.summary import Scale as RecordedScale


@dataclass(frozen=True, slots=True)
class Scale:
    time_scale: float = 1.0
    token_scale: int = 1
    byte_scale: float = 1.0

    def loop_s(self, modelled_s: float) -> float:
        """Seconds of the running loop that stand for `modelled_s`."""
        return modelled_s / self.time_scale

    def modelled_s(self, loop_s: float) -> float:
        return loop_s * self.time_scale

    def loop_rate(self, modelled_rate: float) -> float:
        """Events per second of the running loop for a modelled rate (requests/s, say)."""
        return modelled_rate * self.time_scale

    def modelled_rate(self, loop_rate: float) -> float:
        return loop_rate / self.time_scale

    def link_bps(self, modelled_bps: float) -> float:
        """Bits per real second that a link of `modelled_bps` must carry."""
        return modelled_bps * self.time_scale / self.byte_scale

    def modelled_bps(self, link_bps: float) -> float:
        return link_bps * self.byte_scale / self.time_scale

    def recorded(self) -> RecordedScale:
        """The factors as summary.json keeps them."""
        return RecordedScale(self.time_scale, self.token_scale, self.byte_scale)


UNSCALED = Scale()
