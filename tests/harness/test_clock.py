"""The virtual loop: asyncio's own behaviour, a defined order, and errors instead of hangs."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from harness.clock import (
    BusyLoopError,
    DeadlockError,
    TimeLimitError,
    VirtualLoop,
    VirtualTimeError,
    run,
)


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
        assert len(loop._timers) < 10
        await asyncio.sleep(3000)
        handles[999].cancel()  # after it ran: must not upset the count of cancelled timers
        assert loop._cancelled_count == 0
        return seen

    assert run(main()) == ["kept", 999]


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


def test_time_limit_names_the_waiting_tasks():
    async def main():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(10)

    with pytest.raises(TimeLimitError, match=r"limit of 60\.0 s.*(?s:.*)main"):
        run(main(), until_s=60.0)


def test_polling_without_time_is_reported(monkeypatch):
    monkeypatch.setattr("harness.clock.loop._BUSY_PASSES", 1000)

    async def main():
        asyncio.get_running_loop().call_later(1, print)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(BusyLoopError, match=r"at 0\.0 s"):
        run(main())


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


def test_loop_closes_like_any_loop():
    loop = VirtualLoop()
    loop.call_later(5, print)
    loop.close()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()
