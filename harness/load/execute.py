"""A load run from its configuration to its directory: phases, tables, summary, verdict."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ExitCode
from harness.host import commit, facts
from harness.load.clients import ClientFailed, Clients, PhaseDone, Progress
from harness.load.figures import PhaseFigures, over_repeats, phase_figures, remarks
from harness.load.merge import merge
from harness.load.recording import Tally
from harness.load.search import Search, Trial
from harness.load.selfcheck import client_limits
from harness.load.spec import LoadSpec, measured_phase, warmup_phase
from harness.targets.secrets import redacted
from results import summary as model
from results.growing import GrowingParquet
from results.recorder import COMPLETE_KEY
from results.rundir import Identity, RunDir, create
from results.schemas import with_metadata
from results.summary import ConfigurationSummary, Measured, RunSummary
from workloads.spec import notes

#: Interrupts within so long are one: `timeout` signals its child and then its group.
_ONE_INTERRUPT_S = 0.5

OnProgress = Callable[[str, Progress], None]


@dataclass(slots=True)
class LoadDone:
    """A finished run. `tally` is of all measured phases, `tallies` of each by its name."""

    directory: Path
    spec: LoadSpec
    summary: RunSummary
    phases: list[PhaseFigures]
    tally: Tally
    failures: dict[str, int]
    exit_code: ExitCode
    search: Search | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def best(self) -> PhaseFigures:
        """Of a search the last trial at the highest rate that met the SLO, else the last phase."""
        return _best(self.search, self.phases)


def _best(search: Search | None, phases: list[PhaseFigures]) -> PhaseFigures:
    if search is not None:
        for trial in reversed(search.trials):
            if trial.rate == search.highest_met:
                return next(each for each in phases if each.whole.name == trial.phase)
    return phases[-1]


@dataclass(slots=True)
class _Run:
    """What accumulates while the phases of a run go by."""

    model: str = ""
    done: dict[str, PhaseDone] = field(default_factory=dict)
    limits: dict[str, list[str]] = field(default_factory=dict)
    interrupted_s: float | None = None
    killed: str = ""

    @property
    def interrupted(self) -> bool:
        return self.interrupted_s is not None


def execute(
    spec: LoadSpec,
    root: Path,
    command: str,
    *,
    ready_timeout_s: float = 0.0,
    search: Search | None = None,
    min_goodput: float | None = None,
    on_progress: OnProgress = lambda phase, progress: None,
) -> LoadDone:
    """Run `spec` and leave its run directory under `root`. Raises CommandError, InputError."""
    begun_s = time.monotonic()
    saved = redacted(spec)
    run_directory = create(
        root,
        Identity(
            spec.name,
            mode="live",
            seed=spec.seed,
            commit=commit(),
            clock="monotonic",
            command=command,
        ),
        _toml(saved),
    )
    meta = {"commit": commit(), "seed": str(spec.seed), "clock": "monotonic", "mode": "live"}
    path = run_directory.path
    run = _Run()
    try:
        asyncio.run(_phases(spec, run_directory, meta, run, ready_timeout_s, search, on_progress))
    except BaseException:
        if not run.done:
            # Nothing was measured: no run.
            run_directory.close(complete=False)
            shutil.rmtree(path)
        raise
    complete = not (run.interrupted or run.killed) and all(
        each.counts.unsent == 0 for each in run.done.values()
    )
    merge([path / f"client-{k}" for k in range(spec.processes)], path, meta, complete)
    for table in ("links", "instances", "decisions"):
        # Rows of what only our own fleets have; readers expect the files.
        empty = GrowingParquet(path / f"{table}.parquet", with_metadata(table, meta))
        empty.close({COMPLETE_KEY: "true" if complete else "false"})
    done = _summarised(path, spec, run, search, min_goodput, command, complete, begun_s)
    run_directory.write_text("summary.json", model.to_json(done.summary))
    run_directory.close(complete)
    return done


async def _phases(
    spec: LoadSpec,
    run_directory: RunDir,
    meta: dict[str, str],
    run: _Run,
    ready_timeout_s: float,
    search: Search | None,
    on_progress: OnProgress,
) -> None:
    clients = Clients(spec, lambda k: run_directory.path / f"client-{k}", meta)
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        now_s = time.monotonic()
        if run.interrupted_s is None:
            run.interrupted_s = now_s
            clients.stop()
        elif now_s - run.interrupted_s > _ONE_INTERRUPT_S:
            clients.kill("interrupted twice")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        run.model = await clients.start(ready_timeout_s)
        if spec.num_warmups and not run.interrupted:
            await clients.phase(warmup_phase(spec), lambda p: on_progress("warmup", p))
        if search is not None:
            await _search(spec, clients, run_directory, run, search, on_progress)
        else:
            for index in range(spec.repeats):
                if run.interrupted or clients.killed:
                    break
                name = "load" if spec.repeats == 1 else f"load-{index + 1}"
                await _phase(spec, clients, run_directory, run, name, index, None, on_progress)
        await clients.close(complete=not run.interrupted)
    except ClientFailed:
        if not clients.killed or not run.done:
            raise
    finally:
        run.killed = clients.killed
        await clients.abandon()


async def _phase(
    spec: LoadSpec,
    clients: Clients,
    run_directory: RunDir,
    run: _Run,
    name: str,
    index: int,
    request_rate: float | None,
    on_progress: OnProgress,
) -> PhaseDone:
    phase = measured_phase(spec, name, index, request_rate)
    done = await clients.phase(phase, lambda progress: on_progress(name, progress))
    histograms = done.tally.histograms
    run.done[name] = done
    run.limits[name] = client_limits(
        done.clients,
        histograms["lateness"].percentile(0.99),
        histograms["pool_wait"].percentile(0.99),
    )
    run_directory.log(
        "phase",
        phase=name,
        wall_clock_at_0=done.wall_anchor,
        counts=asdict(done.counts),
        clients=[asdict(each) for each in done.clients],
        max_rss_bytes=done.max_rss_bytes,
        lateness_p99_s=histograms["lateness"].percentile(0.99),
        pool_wait_p99_s=histograms["pool_wait"].percentile(0.99),
        client_limits=run.limits[name],
        failures=done.failures,
    )
    return done


async def _search(
    spec: LoadSpec,
    clients: Clients,
    run_directory: RunDir,
    run: _Run,
    search: Search,
    on_progress: OnProgress,
) -> None:
    index = 0
    while (rate := search.next_rate()) is not None and not run.interrupted:
        name = f"search-{index + 1}"
        done = await _phase(spec, clients, run_directory, run, name, index, rate, on_progress)
        index += 1
        if run.interrupted or clients.killed:
            break
        limited = bool(run.limits[name])
        search.record(Trial(rate, done.counts.offered, done.tally.met_slo, limited, name))


def _toml(saved: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(_without_none(saved))


def _without_none(value: Any) -> Any:
    """TOML has no null: what is None is left out."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


def _summarised(
    path: Path,
    spec: LoadSpec,
    run: _Run,
    search: Search | None,
    min_goodput: float | None,
    command: str,
    complete: bool,
    begun_s: float,
) -> LoadDone:
    phases = [phase_figures(path, spec, name) for name in run.done]
    whole = over_repeats("load", [each.whole for each in phases])
    tally = Tally()
    failures: dict[str, int] = {}
    for each in run.done.values():
        tally.merge(each.tally)
        for kind, count in each.failures.items():
            failures[kind] = failures.get(kind, 0) + count
    limits = list(dict.fromkeys(text for each in run.limits.values() for text in each))
    if search is not None:
        # A trial whose client was the limit was not used; only a search of such trials is void.
        limits = [] if search.trials and not all(t.limited for t in search.trials) else limits
    counts = whole.counts
    exit_code, verdict = ExitCode.OK, "ok"
    if run.interrupted:
        exit_code, verdict = ExitCode.INTERRUPTED, "interrupted"
    elif run.killed:
        exit_code, verdict = ExitCode.INCOMPLETE, f"incomplete: {run.killed}"
    elif counts.unsent or not complete:
        exit_code, verdict = ExitCode.INCOMPLETE, f"incomplete: {counts.unsent} unsent"
    elif limits:
        exit_code, verdict = ExitCode.CLIENT_LIMITED, "client-limited: " + "; ".join(limits)
    elif not counts.succeeded:
        exit_code, verdict = ExitCode.INCOMPLETE, "no request succeeded"
    elif search is not None and search.highest_met is None:
        exit_code, verdict = ExitCode.SLO_MISSED, "no rate that was tried meets the SLO"
    elif min_goodput is not None and (whole.goodput.raw or 0.0) < min_goodput:
        exit_code = ExitCode.SLO_MISSED
        verdict = f"goodput {whole.goodput.raw or 0.0:.3f} is below {min_goodput:g}"
    slo_rate = model.NONE
    if search is not None and search.highest_met is not None:
        slo_rate = Measured(
            search.highest_met, search.highest_met, None, *search.bracket, n=len(search.trials)
        )
    kept = [each.whole for each in phases]
    if spec.repeats > 1 and len(phases) > 1 and search is None:
        kept = [whole, *kept]
    shown = kept[0].name if kept else "load"
    if search is not None and phases:
        shown = _best(search, phases).whole.name
    configuration = ConfigurationSummary(
        spec.name,
        slo_rate=slo_rate,
        phases=tuple(kept + [each.steady for each in phases if each.steady is not None]),
    )
    warnings = [*notes(spec.workload, spec.arrivals), *remarks(spec, phases)]
    if run.killed:
        warnings.append(f"{run.killed}; requests of their last seconds may be missing")
    made = RunSummary(
        spec.name,
        "live",
        (configuration,),
        slo=model.SloSummary(
            spec.slo.ttft_s, 1 / spec.slo.tpot_s if spec.slo.tpot_s else None, spec.slo.e2e_s
        ),
        latency_phase=shown,
        load_rate=spec.request_rate,
        seed=spec.seed,
        commit=commit(),
        model=spec.target.model or run.model,
        workload=spec.workload.kind,
        host=facts(),
        complete=complete,
        verdict=verdict,
        warnings=tuple(warnings),
        command=command,
        duration_s=time.monotonic() - begun_s,
        extra={
            "clients": {
                name: [asdict(each) for each in done.clients] for name, done in run.done.items()
            },
            "client": {each.whole.name: asdict(each.client) for each in phases},
            "failures": failures,
            "search": search.as_dict() if search is not None else None,
        },
    )
    tallies = {name: each.tally for name, each in run.done.items()}
    return LoadDone(path, spec, made, phases, tally, failures, exit_code, search, tallies)


def dry_run(spec: LoadSpec) -> str:
    """The resolved configuration as TOML, secrets left out."""
    return _toml(json.loads(json.dumps(redacted(spec))))
