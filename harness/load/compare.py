"""The four-way comparison on an external deployment: one load run a policy, and one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.load.execute import LoadDone
from harness.load.spec import LoadSpec
from harness.targets.routing import COMPARED
from results.summary import RunSummary

Execute = Callable[[LoadSpec], LoadDone]


def compare(spec: LoadSpec, execute: Execute) -> tuple[list[LoadDone], RunSummary]:
    """Run `spec` under each policy, every time with the same requests at the same times.

    Returns the runs, each with a directory of its own, and a summary whose configurations are the
    policies. An interrupted run is the last.
    """
    done: list[LoadDone] = []
    for policy in COMPARED:
        target = spec.target.model_copy(update={"policy": policy})
        name = f"{spec.name}-{policy}"
        done.append(execute(spec.model_copy(update={"target": target, "name": name})))
        if done[-1].summary.verdict == "interrupted":
            break
    first = done[0].summary
    configurations = []
    for policy, each in zip(COMPARED, done, strict=False):
        (configuration,) = each.summary.configurations
        configurations.append(
            replace(
                configuration,
                name=policy,
                n_prfaas=None if policy == "homogeneous" else len(spec.target.remote_prefill_urls),
                n_p=None if policy == "naive" else len(spec.target.prefill_urls),
                n_d=len(spec.target.decode_urls),
                threshold_tokens=spec.target.threshold_tokens if policy == "prfaas" else None,
            )
        )
    verdicts = dict.fromkeys(each.summary.verdict for each in done)
    return done, replace(
        first,
        name=spec.name,
        configurations=tuple(configurations),
        complete=all(each.summary.complete for each in done),
        verdict="; ".join(verdicts),
        warnings=tuple(dict.fromkeys(text for each in done for text in each.summary.warnings)),
        duration_s=sum(each.summary.duration_s or 0.0 for each in done),
    )
