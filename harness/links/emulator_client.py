"""The harness's end of an emulator process: starting it, asking it, reading its counters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.links.counters import Counters, CountersFile
from harness.links.shape import LinkShape
from harness.links.state import LinkError, LinkState, Process

START_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 5.0


class EmulatorHandle:
    """The harness's end of an emulator process."""

    def __init__(self, state: LinkState) -> None:
        self._state = state
        self._process: subprocess.Popen[bytes] | None = None
        self.counters: CountersFile | None = None
        self._last = (Counters(), Counters())

    async def start(self, kind: str, shape: LinkShape, options: dict[str, Any]) -> None:
        """Start the process and wait until it is ready. Raises LinkError with what it said."""
        state = self._state
        config = {
            "kind": kind,
            "shape": shape.to_json(),
            "detached": state.persistent,
            "control": str(state.control_path),
            "counters": str(state.counters_path),
            "seed": int(state.token, 16),
            **options,
        }
        with state.log_path.open("wb") as log:
            self._process = await asyncio.to_thread(
                subprocess.Popen,
                [sys.executable, "-m", "harness.links.emulator", state.token],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        state.emulator = Process.of(self._process.pid)
        await asyncio.to_thread(state.save)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(config).encode() + b"\n")
        self._process.stdin.flush()
        try:
            answer = await asyncio.wait_for(
                asyncio.to_thread(self._process.stdout.readline), START_TIMEOUT_S
            )
        except TimeoutError:
            self._process.kill()
            raise LinkError(f"the {kind} emulator was not ready in {START_TIMEOUT_S:g} s") from None
        if answer.strip() != b"ready":
            said = answer.decode().strip() or _last_line(state.log_path)
            raise LinkError(f"the {kind} emulator did not start: {said}")
        self.counters = CountersFile(state.counters_path)

    async def request(self, **message: Any) -> dict[str, Any]:
        """Send one request over the control socket; raises LinkError if it is refused."""
        return await control_request(self._state, message)

    def read_counters(self) -> tuple[Counters, Counters]:
        if self.counters is None and self._state.counters_path.exists():
            self.counters = CountersFile(self._state.counters_path)
        if self.counters:
            self._last = self.counters.read()
        return self._last

    def failure(self) -> str | None:
        """Why the process is gone; None while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        return f"the {self._state.backend} emulator process ended (exit code {code})"

    def close(self) -> None:
        """Close the lifeline; the state file's removal ends what is left."""
        if self._process:
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
            if not self._state.persistent:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=2.0)
        if self.counters:
            self.counters.close()
            self.counters = None


async def control_request(state: LinkState, message: dict[str, Any]) -> dict[str, Any]:
    """One request to the emulator of `state`, also from another process than its owner."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(state.control_path))
            try:
                writer.write(json.dumps(message).encode() + b"\n")
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise LinkError(f"the emulator of link {state.token} does not answer ({error})") from None
    if "error" in answer:
        raise LinkError(f"the emulator of link {state.token}: {answer['error']}")
    return answer


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "no message")
