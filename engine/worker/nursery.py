"""Forks workers from one process in which torch is loaded already, so that each starts at once.

Run as `python -m engine.worker.nursery --socket PATH`. It connects to the unix socket at PATH, on
which its owner listens, and speaks JSON lines:

    owner -> nursery   {"id": 1, "argv": [...], "log": PATH, "netns": PATH or null}
    nursery -> owner   {"ready": true}                torch is loaded
                       {"id": 1, "pid": 4711}         forked
                       {"exit": 4711, "status": 2}    ended; negative: killed by that signal

A worker enters the network namespace before it starts and writes stdout and stderr to its log.
When the owner's connection ends, however it ended, so do all workers and the nursery.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from engine.worker.lifeline import die_with_parent

#: Loaded before the first fork. None of them may start a thread.
PRELOAD = ("torch", "uvloop", "aiohttp.web", "prometheus_client", "engine.worker.process")

#: Seconds between the polite and the final signal when the owner is gone.
GRACE_S = 2.0

_CLONE_NEWNET = 0x40000000


class Nursery:
    """Serves one owner; single-threaded, so that forking is safe."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._children: set[int] = set()
        self._buffer = b""

    def serve(self) -> None:
        """Until the owner's connection ends."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        inherited = (self._owner, wake_read, wake_write)
        with selectors.DefaultSelector() as selector:
            selector.register(self._owner, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            self._tell({"ready": True})
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake_read:
                        wake_read.recv(4096)
                        self._reap()
                        continue
                    data = self._owner.recv(65536)
                    if not data:
                        return
                    *lines, self._buffer = (self._buffer + data).split(b"\n")
                    for line in lines:
                        request = json.loads(line)
                        pid = self._fork(request, inherited, selector)
                        self._tell({"id": request["id"], "pid": pid})

    def close(self) -> None:
        """End all workers, politely first."""
        for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for pid in self._children:
                os.kill(pid, number)
            deadline_s = time.monotonic() + patience_s
            while self._children and time.monotonic() < deadline_s:
                self._reap()
                time.sleep(0.02)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                self._tell({"exit": pid, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, object]) -> None:
        # Should the owner be gone, the next read of its connection says so too.
        with contextlib.suppress(OSError):
            self._owner.sendall(json.dumps(message).encode() + b"\n")

    def _fork(
        self,
        request: dict[str, object],
        inherited: Sequence[socket.socket],
        selector: selectors.BaseSelector,
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return pid
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            for end in inherited:
                end.close()
            status = _run_worker(request, parent)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _run_worker(request: dict[str, object], parent: int) -> int:
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    die_with_parent(parent)
    if request.get("netns"):
        enter_netns(Path(str(request["netns"])))
    process = importlib.import_module("engine.worker.process")
    return int(process.main([str(word) for word in request["argv"]]))  # type: ignore[attr-defined]


def enter_netns(path: Path) -> None:
    """Move this process into the network namespace at `path`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(handle)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.worker.nursery", description=__doc__)
    parser.add_argument("--socket", required=True, help="unix socket on which the owner listens")
    options = parser.parse_args(argv)
    die_with_parent()
    # One compute thread a worker; a pool made here would not survive the fork.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    owner.connect(options.socket)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    nursery = Nursery(owner)
    try:
        nursery.serve()
    finally:
        nursery.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
