"""Runs an experiment in its mode: clock, fleets, run directory and summary."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tomli_w

from harness import host
from harness.comparison import Comparison, compare
from harness.control import check_control
from harness.errors import ExitCode
from harness.experiment import Experiment
from harness.fleets.base import OpenFleet
from harness.live import Say, Watch
from harness.passed_over import passed_over
from harness.planner import decode_batch
from harness.prediction import Planned, plan_experiment
from harness.scale import UNSCALED, Scale
from harness.verdict import CUT_OFF, Fault, faults
from results import rundir, summary
from results.recorder import Recorder
from results.schemas import ASKED, REAL, SCHEMAS
from results.summary import RunSummary
from workloads.spec import notes

if TYPE_CHECKING:
    from harness.fleets.worker_fleet import WorkerFleets

#: Virtual time that was told to end has this much CPU time for it.
ENDING_CPU_S = 2.0

#: The link's backend where workers stand on hosts of their own.
UNSHAPED = "direct"

#: Open row groups are closed this often in real time, so that a crash loses at most so much.
FLUSH_INTERVAL_S = 30.0


def _ending() -> list[signal.Signals]:
    """Signals that end a run; a hangup does not when it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Signals are handled afterwards as they were before."""
    before = {number: signal.getsignal(number) for number in _ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # not one of Python's
                signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Execution:
    """A finished run: its directory, what summary.json says, and the exit code of its verdict."""

    directory: Path
    summary: RunSummary
    exit_code: ExitCode


@_handlers_kept()
def execute(
    experiment: Experiment,
    root: Path,
    command: str,
    say: Say = lambda line: None,
    fleets: Fleets | None = None,
    watch: Watch | None = None,
) -> Execution:
    """Run `experiment` in its mode and write a run directory under `root`.

    SIGINT, SIGTERM and SIGHUP end the sending, drain what is in flight and write what there is,
    marked incomplete; a second one, or the first in virtual time, cancels. There the second ends
    the process, as do ENDING_CPU_S of CPU time in which what was cancelled has not ended, and want
    of memory: what is written so far stays. summary.json is written after each phase, so that a
    run that is killed has the figures of those that ended. `fleets`: where the workers of `emulate`
    stand, if not on this host. In real time `watch` is shown each phase while it runs. Raises
    CommandError.
    """
    started_s = time.monotonic()
    plan = plan_run(experiment)
    simulated = experiment.mode == "simulate"
    identity = rundir.Identity(
        name=experiment.name,
        mode=experiment.mode,
        seed=experiment.seed,
        commit=host.commit(),
        clock="virtual" if simulated else "monotonic",
        command=command,
    )
    directory = rundir.create(root, identity, to_toml(experiment))
    runner, open_fleet, scale = _backend(experiment, plan, directory.path, fleets)
    without = REAL if simulated else frozenset()
    if not experiment.measure.flow_rates:
        without |= ASKED
    tables = [name for name in SCHEMAS if name not in without]
    recorder = Recorder(directory.path, _metadata(experiment, scale, simulated), tables=tables)
    comparison = Comparison()
    log = _logged(directory, say)
    interruption = _Interruption()
    if simulated:
        interruption.listen()
    log(duration_in_words(experiment, plan, scale))

    def write_summary(complete: bool, found: list[Fault]) -> RunSummary:
        duration_s = time.monotonic() - started_s
        made = _summary(experiment, comparison, scale, command, duration_s, complete, found)
        directory.write_text("summary.json", summary.to_json(made))
        return made

    def keep(why: Fault = CUT_OFF) -> None:
        """What is known so far, in case that the run ends before its end."""
        known, stopped = comparison.configurations, comparison.stop.is_set()
        write_summary(False, [why, *faults(experiment, known, {}, stopped)])

    work = compare(experiment, plan, open_fleet, recorder, comparison, log, watch, keep)
    ended: Coroutine[Any, Any, None] = (
        _cancellable(work, interruption)
        if simulated
        else _supervised(work, comparison, recorder, say)
    )
    try:
        with _unhurried() if simulated else nullcontext():
            runner(ended)
        complete = not comparison.interrupted
    except (asyncio.CancelledError, KeyboardInterrupt):
        comparison.interrupted = True
        complete = False
    except BaseException as error:
        recorder.close(complete=False)
        directory.close(complete=False)
        if comparison.configurations:
            keep(Fault(f"ended by an error: {error}", ExitCode.INCOMPLETE))
        raise
    recorder.close(complete=complete)
    lost: dict[str, list[str]] = {
        name: each.get("lost_workers", []) for name, each in comparison.facts.items()
    }
    found = list(faults(experiment, comparison.configurations, lost, comparison.interrupted))
    made = write_summary(complete, found)
    directory.close(complete=complete)
    return Execution(directory.path, made, found[0].exit_code if found else ExitCode.OK)


def plan_run(experiment: Experiment) -> list[Planned]:
    """What a run will do; everything that can be refused before it starts is refused here."""
    check_control(experiment)
    return plan_experiment(experiment)


def duration_in_words(experiment: Experiment, plan: list[Planned], scale: Scale) -> str:
    """How much is measured, and in real time how long that takes at the least."""
    phases = [phase for each in plan for phase in each.phases]
    modelled_s = sum(phase.duration_s for phase in phases)
    said = f"{len(plan)} configurations, {len(phases)} phases, {modelled_s:.0f} modelled seconds"
    if experiment.mode == "simulate":
        return said
    # A phase ends with its last request: the overload's backlog, a prompt's decode.
    drains_s = sum(0.1 * phase.duration_s + 30 for phase in phases)
    about_s = scale.loop_s(modelled_s + drains_s) + 5 * len(plan)
    return f"{said}: about {about_s / 60:.1f} min"


def to_toml(experiment: Experiment) -> str:
    """The experiment as resolved; `load_experiment` reads it back to an equal one."""
    return tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True))


Runner = Callable[[Coroutine[Any, Any, None]], None]
#: Makes the fleets of an experiment, which log into its run directory.
Fleets = Callable[[Experiment, Path], "WorkerFleets[Any]"]


def _backend(
    experiment: Experiment, plan: list[Planned], directory: Path, fleets: Fleets | None
) -> tuple[Runner, OpenFleet, Scale]:
    """What differs between the modes. Imports are local: simulate must not need the engine."""
    if experiment.mode == "simulate":
        from harness import clock
        from harness.fleets.modelled import open_modelled

        batch = decode_batch(plan[0].prediction.deployment)
        return clock.run, partial(open_modelled, max_batch=batch), UNSCALED
    from harness import realtime
    from harness.fleets.local import LocalFleets

    opened = (fleets or LocalFleets)(experiment, directory)
    return realtime.run, opened.open, opened.scale


class _Interruption:
    """What signals do in virtual time: the first cancels the comparison, between two callbacks, or
    before it begins. Raised wherever the program is, it would break a task off in the middle, which
    asyncio complains of at length; so the second one, also while what there is gets written, raises
    nothing either. Nor does what takes over after ENDING_CPU_S: a callback may go on for ever, or a
    million of them be ahead.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._task: asyncio.Task[Any] | None = None

    def listen(self) -> None:
        for number in _ending():
            signal.signal(number, self._interrupt)

    def attach(self, task: asyncio.Task[Any]) -> None:
        """`task`, which is the current one, is to be cancelled."""
        self._task = task
        if self._interrupted:
            signal.setitimer(signal.ITIMER_VIRTUAL, ENDING_CPU_S)
            task.cancel()

    def _interrupt(self, number: int, frame: object) -> None:
        if self._interrupted:
            _end(b"interrupted again: ended at once\n", ExitCode.INTERRUPTED)
        self._interrupted = True
        if self._task is not None and not (loop := self._task.get_loop()).is_closed():
            signal.setitimer(signal.ITIMER_VIRTUAL, ENDING_CPU_S)
            loop.call_soon(self._task.cancel)


async def _cancellable(work: Coroutine[Any, Any, None], interruption: _Interruption) -> None:
    """The comparison in virtual time, which `interruption` may cancel."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.on_no_memory = _end_without_memory  # type: ignore[attr-defined]
    interruption.attach(task)
    try:
        await work
    except MemoryError:
        _end_without_memory()


def _end(line: bytes, code: ExitCode) -> NoReturn:
    os.write(sys.stderr.fileno(), line)
    os._exit(code)


def _end_without_memory() -> NoReturn:
    """At once: without memory CPython (3.11) recurses without end where it makes a MemoryError
    beyond those that it keeps, and repeats a step without end where it enters a `finally`.
    """
    _end(b"no memory left: ended at once, with what was written so far\n", ExitCode.INCOMPLETE)


@contextmanager
def _unhurried() -> Iterator[None]:
    """What is still in the block ENDING_CPU_S after a signal is ended; what is behind it, that
    writes what there is, may take its time.
    """

    def hurry(number: int, frame: object) -> None:
        _end(b"interrupted, but there is no end to it: ended at once\n", ExitCode.INTERRUPTED)

    before = signal.signal(signal.SIGVTALRM, hurry)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if before is not None:  # not one of Python's
            signal.signal(signal.SIGVTALRM, before)


async def _supervised(
    work: Coroutine[Any, Any, None], comparison: Comparison, recorder: Recorder, say: Say
) -> None:
    """The comparison in real time: under signal handlers, with row groups closed regularly."""
    task = asyncio.ensure_future(work)

    def interrupt() -> None:
        if comparison.stop.is_set():
            say("interrupted again: what is in flight is cut off")
            task.cancel()
            return
        comparison.stop.set()
        say("interrupted: no new requests; what is in flight ends first (again to cut it off)")

    loop = asyncio.get_running_loop()
    ending = _ending()
    for number in ending:
        loop.add_signal_handler(number, interrupt)
    flusher = loop.create_task(_flush_regularly(recorder))
    try:
        await task
    finally:
        flusher.cancel()
        for number in ending:
            loop.remove_signal_handler(number)


async def _flush_regularly(recorder: Recorder) -> None:
    while True:
        await asyncio.sleep(FLUSH_INTERVAL_S)
        recorder.flush()


def _logged(directory: rundir.RunDir, say: Say) -> Say:
    def both(line: str) -> None:
        directory.log("progress", line=line)
        say(line)

    return both


def _metadata(experiment: Experiment, scale: Scale, simulated: bool) -> dict[str, str]:
    """Key-value metadata of the Parquet files: nothing that differs between equal simulations."""
    meta = {
        "experiment": experiment.name,
        "seed": str(experiment.seed),
        "clock": "virtual" if simulated else "monotonic",
        "time_scale": repr(scale.time_scale),
        "token_scale": repr(scale.token_scale),
        "byte_scale": repr(scale.byte_scale),
    }
    return meta if simulated else meta | {"commit": host.commit()}


def _summary(
    experiment: Experiment,
    comparison: Comparison,
    scale: Scale,
    command: str,
    duration_s: float,
    complete: bool,
    found: list[Fault],
) -> RunSummary:
    traffic = (experiment.workload, experiment.arrivals)
    slo, link = experiment.slo, experiment.link
    facts = next(iter(comparison.facts.values()), {})
    backends = {
        str(each["link_backend"]) for each in comparison.facts.values() if each.get("link_backend")
    }
    unknown = passed_over(experiment, experiment.mode)
    if UNSHAPED in backends:
        unknown += passed_over(experiment, "ray")
    return RunSummary(
        name=experiment.name,
        mode=experiment.mode,
        configurations=tuple(comparison.configurations),
        scale=scale.recorded(),
        link=summary.LinkSummary(
            backend=", ".join(sorted(backends)),
            rate_gbps=scale.link_bps(link.rate_gbps * 1e9) * 1e-9,
            paper_rate_gbps=link.rate_gbps,
            rtt_s=scale.loop_s(link.rtt_ms / 1e3),
            loss=None,
        ),
        slo=summary.SloSummary(ttft_s=slo.ttft_s, tokens_per_s=slo.tokens_per_s),
        load_rate=comparison.common_rate,
        seed=experiment.seed,
        commit=host.commit(),
        model=str(facts.get("model", "")),
        workload=experiment.workload.kind,
        host=host.facts(),
        complete=complete,
        verdict=found[0].text if found else "ok",
        warnings=(*(fault.text for fault in found[1:]), *notes(*traffic), *unknown),
        command=command,
        duration_s=duration_s,
        extra={"fleets": comparison.facts},
    )
