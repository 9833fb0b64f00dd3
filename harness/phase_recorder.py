"""What happens in the phases of one configuration, written to the tables of its run.

Of a phase of the search (`slo_search`) only the audit is: it tells of caches that crossed, whatever
for.
"""

from __future__ import annotations

from harness.links.flow import Flow
from harness.phases import SEARCH
from harness.policies import Decision
from harness.view import View
from results.recorder import Recorder
from results.records import RequestRecord
from results.rows import AuditRow, DecisionRow, FlowRow, InstanceRow, LinkRow


class PhaseRecorder:
    """Of the configuration of that name. Times of rows count from the beginning of the phase."""

    def __init__(self, recorder: Recorder, configuration: str) -> None:
        self._recorder = recorder
        self._configuration = configuration
        self._phase = ""
        self._origin_s = 0.0

    def begin(self, phase: str, origin_s: float) -> None:
        """The phase of that name begins, at this time of the loop."""
        self._phase = phase
        self._origin_s = origin_s

    def request(self, record: RequestRecord) -> None:
        """It has ended; its tokens are not needed any more."""
        record.token_ids = None
        if self._phase != SEARCH:
            self._recorder.request(record, self._configuration, self._phase)

    def decision(self, record: RequestRecord, decision: Decision, view: View) -> None:
        """A routing decision, just taken on what `view` says."""
        if self._phase == SEARCH:
            return
        prefill = view.prefill[decision.prefill_cluster]
        decode = view.decode[decision.decode_cluster]
        signals = view.links.get((decision.prefill_cluster, decision.decode_cluster))
        self._recorder.decision(
            DecisionRow(
                record.id,
                record.attempts,
                view.now_s - self._origin_s,
                record.input_tokens,
                decision.cached_tokens,
                decision.held_tokens,
                decision.threshold_tokens,
                decision.prefill_cluster,
                prefill.names[decision.prefill_key],
                decode.names[decision.decode_key],
                decision.predicted_work_s,
                prefill.wait_s(decision.prefill_key, view.now_s),
                decode.active(decision.decode_key),
                signals.utilisation if signals else None,
                signals.backlog_bytes if signals else None,
                decision.reason,
                decision.alternatives,
            ),
            self._configuration,
            self._phase,
        )

    def link(self, row: LinkRow) -> None:
        if self._phase != SEARCH:
            self._recorder.link(row, self._configuration, self._phase)

    def flow(self, link: str, flow: Flow) -> None:
        """A traced flow has ended on the link of that name."""
        if self._phase == SEARCH:
            return
        ident, attempt = flow.owner.key or (None, None)
        for time_s, rate_bps in flow.rates or ():
            row = FlowRow(time_s - self._origin_s, link, ident, attempt, rate_bps)
            self._recorder.flow(row, self._configuration, self._phase)

    def instance(self, row: InstanceRow) -> None:
        if self._phase != SEARCH:
            self._recorder.instance(row, self._configuration, self._phase)

    def audit(self, row: AuditRow) -> None:
        self._recorder.audit(row, self._configuration, self._phase)

    def flush(self) -> None:
        """Whatever ends the run from here on, what is recorded so far is on disk."""
        self._recorder.flush()
