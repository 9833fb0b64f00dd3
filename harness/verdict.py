"""Whether a run's numbers can be trusted, and if not, why and with which exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.errors import ExitCode
from harness.experiment import Experiment
from harness.phases import CAPACITY
from results.summary import ConfigurationSummary

#: Sends later than this (p99, real seconds) make TTFT the load generator's as much as the fleet's.
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    text: str
    exit_code: ExitCode


#: Stands in the summary of a run until it ends.
CUT_OFF = Fault("cut off: the run was killed, or has not ended yet", ExitCode.INCOMPLETE)


def faults(
    experiment: Experiment,
    configurations: list[ConfigurationSummary],
    lost: Mapping[str, list[str]],
    interrupted: bool,
) -> Iterator[Fault]:
    """The gravest first within a configuration; none means that the run is good. `lost` names the
    workers that a configuration lost on its way.
    """
    if interrupted:
        yield Fault("interrupted", ExitCode.INTERRUPTED)
    for each in configurations:
        wrong = sum(phase.counts.mismatched for phase in each.phases)
        if wrong:
            yield Fault(
                f"{each.name}: tokens of {wrong} requests differ from the monolithic engine's",
                ExitCode.BUG,
            )
        unsent = sum(phase.counts.unsent for phase in each.phases)
        if unsent and not interrupted:
            yield Fault(f"{each.name}: {unsent} requests were not sent", ExitCode.INCOMPLETE)
        if lost.get(each.name):
            yield Fault(
                f"{each.name}: lost {', '.join(lost[each.name])} on the way; its figures are of a "
                "smaller fleet",
                ExitCode.INCOMPLETE,
            )
        for phase in each.phases:
            if phase.name == CAPACITY and phase.throughput.paper is None and not interrupted:
                yield Fault(
                    f"{each.name}: no two requests ended in the capacity window; a longer "
                    "measure.capacity_window_s or more requests would do",
                    ExitCode.INCOMPLETE,
                )
        if each.stalled_s:
            yield Fault(
                f"{each.name}: the harness itself stood still for {each.stalled_s:.1f} s (stopped, "
                "swapped out, or the machine was); figures of that time are its own",
                ExitCode.CLIENT_LIMITED,
            )
        limit = experiment.emulate.overrun_limit
        if each.paced_steps and each.pacing_overruns > limit * each.paced_steps:
            yield Fault(
                f"{each.name}: {each.pacing_overruns} of {each.paced_steps} paced steps took "
                f"longer than modelled (limit {limit:.0%}); a quieter machine or a smaller "
                "emulate.time_scale would do",
                ExitCode.CLIENT_LIMITED,
            )
        late = max((phase.lateness_p99_s or 0.0 for phase in each.phases), default=0.0)
        if experiment.mode != "simulate" and late > LATE_S:
            yield Fault(
                f"{each.name}: requests were sent up to {late:.3f} s late (p99; limit {LATE_S} s)",
                ExitCode.CLIENT_LIMITED,
            )
