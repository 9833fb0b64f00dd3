"""The virtual loop: asyncio's own behaviour, a defined order, and errors instead of hangs."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import sys
import threading
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.clock import (
    BusyLoopError,
    DeadlockError,
    TimeLimitError,
    VirtualTimeError,
    run,
)
from harness.clock import loop as loop_module
from harness.clock.timeline import Timeline as PythonTimeline
from native import require

try:
    require("harness.clock._timeline")
    from harness.clock._timeline import Timeline as CTimeline
except ImportError:
    CTimeline = None

TIMELINES = [
    pytest.param(PythonTimeline, id="python"),
    pytest.param(
        CTimeline,
        id="c",
        marks=pytest.mark.skipif(CTimeline is None, reason="harness.clock._timeline is not built"),
    ),
]


def loop_on(timeline):
    class VirtualLoop(timeline, loop_module.TimelessLoop):
        def __init__(self, until_s=None):
            timeline.__init__(self, until_s)
            loop_module.TimelessLoop.__init__(self)

    return VirtualLoop


@pytest.fixture(params=TIMELINES, autouse=True)
def loop_class(request, monkeypatch):
    """Each test runs on either timeline."""
    made = loop_on(request.param)
    monkeypatch.setattr(loop_module, "VirtualLoop", made)
    return made


def test_sleep_advances_virtual_time_exactly():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600.0)
        await asyncio.sleep(0.25)
        return loop.time()

    assert run(main()) == 3600.25


def test_equal_deadlines_run_in_order_of_scheduling():
    async def main():
        loop = asyncio.get_running_loop()
        order = []
        for name in "abcdefghij":
            loop.call_at(5.0, order.append, name)
        loop.call_at(4.0, order.append, "first")
        await asyncio.sleep(5.0)
        return "".join(order)

    assert run(main()) == "firstabcdefghij"


def test_timer_in_the_past_runs_now_and_time_never_goes_back():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(10)
        seen = []
        loop.call_at(3.0, lambda: seen.append(loop.time()))
        loop.call_later(-5.0, lambda: seen.append(loop.time()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return seen

    assert run(main()) == [10.0, 10.0]


def test_nan_deadline_is_refused():
    async def main():
        asyncio.get_running_loop().call_later(float("nan"), print)

    with pytest.raises(ValueError, match="NaN"):
        run(main())


def test_cancelled_timers_do_not_run_and_are_swept():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        handles = [loop.call_later(1000 + i, seen.append, i) for i in range(1000)]
        for handle in handles[:999]:
            handle.cancel()
        loop.call_later(1, seen.append, "kept")
        assert loop._timer_count < 10
        await asyncio.sleep(3000)
        handles[999].cancel()  # after it ran: must not upset the count of cancelled timers
        assert loop._cancelled_count == 0
        return seen

    assert run(main()) == ["kept", 999]


def test_a_sweep_of_cancelled_timers_keeps_the_order_of_the_others():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        ties = [loop.call_at(5.0, seen.append, i) for i in range(10)]
        for i in (0, 4, 9):
            ties[i].cancel()
        for handle in [loop.call_later(1000 + i, seen.append, "never") for i in range(1000)]:
            handle.cancel()
        loop.call_at(5.0, seen.append, "last")
        assert loop._timer_count < 200
        await asyncio.sleep(10)
        return seen

    assert run(main()) == [1, 2, 3, 5, 6, 7, 8, "last"]


def test_timeout_cancels_the_body_at_its_deadline():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(100)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1.5)
        return loop.time()

    assert run(main()) == 4.0


def test_task_group_queue_lock_and_semaphore():
    async def main():
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        got = []

        async def produce():
            for i in range(3):
                await asyncio.sleep(1)
                await queue.put(i)

        async def consume():
            while len(got) < 3:
                got.append((loop.time(), await queue.get()))
                await asyncio.sleep(2)

        limit = asyncio.Semaphore(2)

        async def limited():
            async with limit:
                await asyncio.sleep(4)
            return loop.time()

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
            ends = [group.create_task(limited()) for _ in range(4)]
        return got, [task.result() for task in ends]

    got, ends = run(main())
    assert [item for _, item in got] == [0, 1, 2]
    assert ends == [4.0, 4.0, 8.0, 8.0]


def test_failing_task_group_cancels_its_tasks_in_order_of_creation():
    async def main():
        cancelled = []

        async def wait(i):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(i)
                raise

        async def fail():
            await asyncio.sleep(1)
            raise ValueError("planned")

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for i in range(100):
                    group.create_task(wait(i))
                group.create_task(fail())
        return cancelled

    assert run(main()) == list(range(100))


def test_deadlock_names_the_waiting_tasks_and_where_they_wait():
    async def stuck_worker(event):
        await event.wait()

    async def main():
        task = asyncio.create_task(stuck_worker(asyncio.Event()), name="worker-7")
        await task

    with pytest.raises(DeadlockError) as caught:
        run(main())
    text = str(caught.value)
    assert "worker-7: " in text
    assert "stuck_worker() waits in Event.wait() at locks.py:" in text
    assert "main() waits" in text


def test_a_deadlock_of_many_names_the_oldest_and_counts_the_rest():
    async def main():
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(50)))

    with pytest.raises(DeadlockError) as caught:
        run(main())
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 21 and "main()" in lines[0]
    assert lines[-1] == "  ... and 31 more"  # of main and fifty


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10)], ids=["on", "off"])
def test_a_run_leaves_garbage_collection_as_it_was(thresholds):
    before = gc.get_threshold()

    async def main():
        return gc.get_threshold()[0]

    try:
        gc.set_threshold(*thresholds)
        chosen = gc.get_threshold()
        during = run(main())
        assert gc.get_threshold() == chosen
    finally:
        gc.set_threshold(*before)
    assert during == (400_000 if thresholds[0] else 0)


def test_time_limit_names_the_waiting_tasks():
    async def main():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(10)

    with pytest.raises(TimeLimitError, match=r"limit of 60\.0 s.*(?s:.*)main"):
        run(main(), until_s=60.0)


def test_polling_without_time_is_reported():
    async def main():
        asyncio.get_running_loop()._busy_passes = 1000
        asyncio.get_running_loop().call_later(1, print)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(BusyLoopError, match=r"at 0\.0 s"):
        run(main())


def test_passes_are_counted_anew_at_each_instant():
    async def main():
        loop = asyncio.get_running_loop()
        loop._busy_passes = 10
        for _ in range(100):
            await asyncio.sleep(1)
        return loop.time()

    assert run(main()) == 100.0


def test_remaining_tasks_are_cancelled_in_order_of_creation():
    cancelled = []

    async def wait(i):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(i)

    async def main():
        tasks = [asyncio.create_task(wait(i)) for i in range(20)]
        await asyncio.sleep(1)
        return tasks

    run(main())
    assert cancelled == list(range(20))


def test_remaining_tasks_are_cancelled_and_generators_closed():
    closed = []

    async def ticks():
        try:
            while True:
                yield 1
                await asyncio.sleep(1)
        finally:
            closed.append("generator")

    async def background():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e9)
        closed.append("task")

    async def main():
        task = asyncio.create_task(background())
        iterator = ticks()
        await anext(iterator)
        return task, iterator

    run(main())
    assert sorted(closed) == ["generator", "task"]


def test_exception_of_main_propagates_and_of_a_callback_does_not_stop_the_loop():
    async def main():
        loop = asyncio.get_running_loop()
        reports = []
        loop.set_exception_handler(lambda _, context: reports.append(str(context["exception"])))
        loop.call_later(1, lambda: 1 / 0)
        await asyncio.sleep(2)
        assert reports == ["division by zero"]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_threads_sockets_subprocesses_and_signals_are_refused():
    async def main():
        loop = asyncio.get_running_loop()
        attempts = {
            "thread": lambda: asyncio.to_thread(print),
            "socket": lambda: asyncio.open_connection("127.0.0.1", 9),
            "server": lambda: asyncio.start_server(print, "127.0.0.1", 0),
            "subprocess": lambda: asyncio.create_subprocess_exec("true"),
        }
        for attempt in attempts.values():
            with pytest.raises(VirtualTimeError, match="impossible in virtual time"):
                await attempt()
        with pytest.raises(VirtualTimeError, match="a signal handler"):
            loop.add_signal_handler(10, print)

        errors = []

        def from_thread():
            try:
                loop.call_soon_threadsafe(print)
            except VirtualTimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=from_thread)
        thread.start()
        thread.join()
        assert errors and "another thread" in errors[0]

    run(main())


#: What a loop does in virtual time as in any other.
TIMELESS = {
    *("call_at", "call_later", "call_soon", "call_soon_threadsafe", "time"),
    *("create_future", "create_task", "get_task_factory", "set_task_factory"),
    *("call_exception_handler", "default_exception_handler"),
    *("get_exception_handler", "set_exception_handler", "get_debug", "set_debug"),
    *("run_forever", "run_until_complete", "stop", "close", "is_closed", "is_running"),
    *("shutdown_asyncgens", "shutdown_default_executor"),
}


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in vars(asyncio.AbstractEventLoop)
        if not name.startswith("_") and name not in TIMELESS
    ),
)
def test_all_that_reaches_outside_the_loop_is_refused(loop_class, name):
    loop = loop_class()
    with pytest.raises(VirtualTimeError, match="impossible in virtual time"):
        getattr(loop, name)()
    loop.close()


@pytest.mark.filterwarnings("error")
def test_a_run_in_a_running_loop_is_refused_and_leaves_nothing_behind():
    async def inner():
        await asyncio.sleep(1)

    async def outer():
        with pytest.raises(VirtualTimeError, match="another loop runs in this thread"):
            run(inner())
        return "went on"

    assert run(outer()) == "went on"
    assert asyncio.run(outer()) == "went on"
    gc.collect()


def test_a_task_factory_is_refused():
    async def main():
        loop = asyncio.get_running_loop()
        loop.set_task_factory(None)
        with pytest.raises(VirtualTimeError, match="a task factory"):
            loop.set_task_factory(lambda loop, coro, **options: asyncio.Task(coro, loop=loop))

    run(main())


def test_loop_closes_like_any_loop(loop_class):
    loop = loop_class()
    loop.call_later(5, print)
    loop.close()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()
    assert loop._timer_count == 0


def test_callbacks_get_their_arguments_in_their_context():
    name = contextvars.ContextVar("name", default="none")

    async def main():
        loop = asyncio.get_running_loop()
        seen = []

        def note(*args):
            seen.append((name.get(), args))
            name.set("changed by the callback")

        other = contextvars.copy_context()
        other.run(name.set, "other")
        name.set("at scheduling")
        for count in range(8):
            loop.call_soon(note, *range(count))
            loop.call_later(1, note, *range(count), context=other)
        loop.call_at(2.0, note, context=None)
        name.set("after scheduling")
        await asyncio.sleep(3)
        assert name.get() == "after scheduling"
        return seen

    seen = run(main())
    assert seen[:8] == [("at scheduling", tuple(range(count))) for count in range(8)]
    assert seen[8] == ("other", ())
    assert seen[9:16] == [("changed by the callback", tuple(range(count))) for count in range(1, 8)]
    assert seen[16] == ("at scheduling", ())


def test_wrong_arguments_are_refused(loop_class):
    loop = loop_class()
    with pytest.raises(TypeError):
        loop.call_at(1.0)
    with pytest.raises(TypeError):
        loop.call_soon()
    with pytest.raises(TypeError):
        loop.call_at(None, print)
    with pytest.raises(TypeError):
        loop.call_later("1", print)
    with pytest.raises(TypeError, match="nonsense"):
        loop.call_soon(print, nonsense=1)
    with pytest.raises(TypeError, match="as context"):
        loop.call_soon(print, context=1)
    assert loop._timer_count == 0
    loop.close()


def test_a_context_that_is_entered_already_is_reported():
    async def main():
        loop = asyncio.get_running_loop()
        reports = []
        loop.set_exception_handler(lambda _, context: reports.append(str(context["exception"])))
        context = contextvars.copy_context()
        loop.call_soon(context.run, loop.stop, context=context)
        loop.call_soon(reports.append, "went on")
        await asyncio.sleep(0)
        return reports

    first, second = run(main())
    assert first.startswith("cannot enter context") and second == "went on"


def test_handles_describe_themselves():
    async def main():
        loop = asyncio.get_running_loop()
        timer, soon = loop.call_later(2, print, "x"), loop.call_soon(print)
        assert (timer.when(), timer.cancelled(), timer._args) == (2.0, False, ("x",))
        words = [repr(timer), repr(soon)]
        timer.cancel()
        timer.cancel()
        assert timer.cancelled() and timer._args is None and loop._cancelled_count == 1
        assert timer == timer != soon and len({timer, soon}) == 2
        return [*words, repr(timer)]

    argument = "'x'" if sys.version_info < (3, 13) else ""  # which asyncio's own words leave out
    assert run(main()) == [
        f"<VirtualHandle when=2.0 print({argument})>",
        "<VirtualHandle when=0.0 print()>",
        "<VirtualHandle cancelled when=2.0>",
    ]


def test_a_callback_may_cancel_itself_and_those_after_it():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        handles = []

        def first(mark, *more):
            for handle in handles:
                handle.cancel()
            gc.collect()
            seen.append((mark, more))

        handles.append(loop.call_later(1, first, ["mine"], object, 2, 3, 4, 5))
        handles.append(loop.call_later(1, seen.append, "second"))
        handles.append(loop.call_later(2, seen.append, "third"))
        await asyncio.sleep(3)
        assert loop._cancelled_count == 0
        return seen

    assert run(main()) == [(["mine"], (object, 2, 3, 4, 5))]


def test_handles_and_loops_leave_no_garbage(loop_class):
    class Watched:
        def called(self, *args):
            raise AssertionError("never")

    loop = loop_class()
    watched = Watched()
    watched.handles = [loop.call_soon(watched.called, watched, loop) for _ in range(3)]
    watched.handles += [loop.call_later(i, watched.called, *range(i)) for i in range(9)]
    watched.handles[5].cancel()
    kept = weakref.ref(watched), weakref.ref(loop)
    loop._closed = True  # or it warns of being left open
    del watched, loop
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_handles_may_be_the_arguments_of_handles(loop_class):
    """However long the chain is that its end frees."""
    loop = loop_class()
    handle = None
    for _ in range(100_000):
        handle = loop.call_soon(lambda before: None, handle)
    loop.call_soon(loop.stop)
    loop.run_forever()
    for _ in range(100_000):
        handle = loop.call_later(1.0, len, handle)
    del handle
    loop.close()
    assert loop._timer_count == 0


def test_a_loop_closes_though_what_it_drops_schedules_anew(loop_class):
    loop = loop_class()

    class Persistent:
        def __call__(self):
            raise AssertionError

        def __del__(self):
            if scheduled[-1] < 1000:
                scheduled.append(scheduled[-1] + 1)
                loop.call_soon(Persistent())

    scheduled = [0]
    loop.call_soon(Persistent())
    loop.close()
    assert scheduled == [0, 1]
    scheduled.append(1000)
    loop._forget()


def test_exits_and_interrupts_of_callbacks_end_the_loop():
    for error in (KeyboardInterrupt, SystemExit):

        async def main(error=error):
            def interrupt():
                raise error("from a callback")

            asyncio.get_running_loop().call_later(1, interrupt)
            await asyncio.sleep(2)

        with pytest.raises(error, match="from a callback"):
            run(main())


def test_a_signal_interrupts_callbacks_that_run_no_python():
    async def main():
        loop = asyncio.get_running_loop()
        loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
        for _ in range(100):
            loop.call_soon(bool)
        loop.call_later(1, bool)
        await asyncio.Event().wait()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(main())
    finally:
        signal.signal(signal.SIGINT, before)


def test_debug_mode(monkeypatch, caplog):
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(5)
        loop.call_later(9, print).cancel()
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(20)
        return loop.time()

    assert run(main()) == 21.0
    assert "ZeroDivisionError" in caplog.text and "exception in <VirtualHandle" in caplog.text


#: What each callback does, in order of their running: it schedules others after these delays, or
#: cancels the handle of this number.
programs = st.lists(
    st.one_of(
        st.lists(st.sampled_from(["soon", -1.0, 0.0, 0.5, 1.0, 1.5, 1e9]), max_size=4),
        st.integers(0, 40),
    ),
    max_size=60,
)


class _Entry:
    def __init__(self, when, callback, args):
        self.when, self.callback, self.args, self.alive = when, callback, args, True

    def cancel(self):
        self.alive = False


class _Oracle:
    """A loop whose timers are a list in order of scheduling, searched from end to end."""

    def __init__(self):
        self.now_s, self.ready, self.timers = 0.0, [], []

    def time(self):
        return self.now_s

    def call_soon(self, callback, *args):
        self.ready.append(_Entry(self.now_s, callback, args))
        return self.ready[-1]

    def call_later(self, delay, callback, *args):
        self.timers.append(_Entry(self.now_s + delay, callback, args))
        return self.timers[-1]

    def run(self):
        while self.ready or any(timer.alive for timer in self.timers):
            if not self.ready:
                first_s = min(timer.when for timer in self.timers if timer.alive)
                self.now_s = max(self.now_s, first_s)
            due = sorted((t for t in self.timers if t.when <= self.now_s), key=lambda t: t.when)
            self.timers = [timer for timer in self.timers if timer.when > self.now_s]
            due, self.ready = self.ready + due, []
            for entry in due:
                if entry.alive:
                    entry.callback(*entry.args)


def _start(program, loop):
    """Runs `program` in callbacks of `loop`. Returns the log they write: number and time."""
    actions, handles, log = iter(program), [], []

    def schedule(delay):
        args = (callback, len(handles), *range(len(handles) % 7))
        handles.append(loop.call_soon(*args) if delay == "soon" else loop.call_later(delay, *args))

    def callback(number, *more):
        log.append((number, loop.time(), len(more)))
        action = next(actions, [])
        if isinstance(action, int):
            handles[action % len(handles)].cancel()
        else:
            for delay in action:
                schedule(delay)

    for delay in ("soon", 0.0, 1.0, 1.0):
        schedule(delay)
    return log


# The fixture is of one function and all its examples, which is what is meant.
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(programs)
def test_any_program_runs_as_on_a_list_of_timers(loop_class, program):
    async def main():
        loop = asyncio.get_running_loop()
        log = _start(program, loop)
        await asyncio.sleep(1e12)
        assert (loop._timer_count, loop._cancelled_count) == (0, 0)
        return log

    oracle = _Oracle()
    expected = _start(program, oracle)
    oracle.run()
    assert run(main()) == expected


def test_however_many_timers_of_one_time_are_freed_one_after_the_other(loop_class):
    # Each leads to the one before: freed within one another, they would overflow the stack.
    loop = loop_class()
    for _ in range(300_000):
        timer = loop.call_at(1.0, print)
    alive = weakref.ref(loop)
    loop.close()
    del loop, timer
    gc.collect()
    assert alive() is None
