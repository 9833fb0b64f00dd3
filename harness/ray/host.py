"""The actor that keeps one worker process on its node. Runs on the worker's host, not the driver's.

Ray decides where it stands, from the cluster's custom resource and the GPUs it asks for; the
worker itself is the same `prfaas worker` as everywhere, with control and KV traffic on this node's
address. It ends with the actor, and so with the node.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.worker.lifeline import die_with_parent


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker serves its control API, and on which node."""

    host: str
    port: int
    node: str
    pid: int


class WorkerHost:
    """`words` are the worker's arguments by name, `files` (name -> text) what it is started with;
    a word of the form `file:NAME` becomes the path of such a file here."""

    def __init__(self, words: dict[str, str], flags: list[str], files: dict[str, str]) -> None:
        import ray

        self._folder = Path(tempfile.mkdtemp(prefix="prfaas-"))
        for name, text in files.items():
            path = self._folder / name
            path.write_text(text)
            path.chmod(0o600)
        host = ray.util.get_node_ip_address()
        port = free_port(host)
        words = {"listen": f"{host}:{port}", "data-host": host, **words}
        argv = [sys.executable, "-m", "harness", "worker"]
        for key, value in words.items():
            kind, colon, name = value.partition(":")
            is_file = colon and kind == "file"
            argv += [f"--{key}", str(self._folder / name) if is_file else value]
        self._log = self._folder / "worker.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        node = ray.get_runtime_context().get_node_id()
        self._place = Place(host, port, node, self._process.pid)

    def place(self) -> Place:
        return self._place

    def status(self) -> int | None:
        """The worker's exit status; None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """What the worker wrote, for the run directory."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the worker; returns when it has ended."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at `host` now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
