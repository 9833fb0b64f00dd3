"""Which requests of a phase are decoded again by one monolithic engine."""

from __future__ import annotations

from harness.experiment import EmulateSpec
from harness.phases import Phase
from workloads.request import Request


class Sample:
    """Every so many requests of a phase, to be decoded again by one monolithic engine."""

    def __init__(self, emulate: EmulateSpec, phase: Phase) -> None:
        self.requests: dict[int, Request] = {}
        expected = phase.request_rate * phase.duration_s
        wanted = max(emulate.verify_share * expected, emulate.verify_least)
        self._stride = max(1, int(expected / wanted)) if wanted > 0 else 0

    def note(self, request: Request) -> None:
        if self._stride and request.id % self._stride == 0:
            self.requests[request.id] = request

    def holds(self, request_id: int) -> bool:
        return request_id in self.requests
