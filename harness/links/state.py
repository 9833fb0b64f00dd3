"""Who owns which link on this host: one state file per link, written before anything is created.

A link outlives its harness only as namespaces, interfaces and an emulator process that its state
file names. A file whose owner is dead is stale, and the next run (or `prfaas link down`) removes
what it names and nothing else: a namespace is touched only if a state file names it, its name
carries that file's token, and its inode is the one that was recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.errors import BadInput, CommandError

PREFIX = "prfaas-"
NETNS_DIR = Path("/run/netns")
COMMAND_TIMEOUT_S = 10.0


class LinkError(CommandError):
    """A link could not be set up, changed or removed; the message says which command failed."""


class NotOurs(BadInput):
    """Something that this program did not make stands where it would have to act."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process by id and start time (clock ticks since boot), which no later process shares."""

    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _start_ticks(pid) or 0)

    def alive(self) -> bool:
        return self.started != 0 and _start_ticks(self.pid) == self.started


_SAVING = threading.Lock()


@dataclass(slots=True)
class LinkState:
    """What one link owns. `namespaces` maps a name to its inode (0 until it was created)."""

    token: str
    owner: Process
    backend: str
    sides: tuple[str, str]
    persistent: bool = False
    description: str = ""
    namespaces: dict[str, int] = field(default_factory=dict)
    emulator: Process | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    forwards: dict[str, str] = field(default_factory=dict)

    @classmethod
    def new(cls, backend: str, sides: tuple[str, str], persistent: bool) -> LinkState:
        return cls(secrets.token_hex(3), Process.current(), backend, sides, persistent)

    def namespace_name(self, suffix: str) -> str:
        return f"{PREFIX}{self.token}-{self.owner.pid}-{suffix}"

    @property
    def path(self) -> Path:
        return state_dir() / f"{self.token}.json"

    @property
    def control_path(self) -> Path:
        return state_dir() / f"{self.token}.sock"

    @property
    def counters_path(self) -> Path:
        return state_dir() / f"{self.token}.counters"

    @property
    def log_path(self) -> Path:
        return state_dir() / f"{self.token}.log"

    def stale(self) -> bool:
        """Its owner is dead and it was not meant to outlive it."""
        return not self.persistent and not self.owner.alive()

    def save(self) -> None:
        """Threads may save at once: the last to do so writes all that had changed by then."""
        with _SAVING:
            temporary = self.path.with_suffix(".part")
            # Copied in one step each: the loop goes on adding to them.
            still = replace(self, namespaces=dict(self.namespaces), forwards=dict(self.forwards))
            temporary.write_text(json.dumps(asdict(still), indent=1))
            temporary.replace(self.path)

    @classmethod
    def load(cls, path: Path) -> LinkState:
        value = json.loads(path.read_text())
        value["owner"] = Process(**value["owner"])
        value["sides"] = tuple(value["sides"])
        value["emulator"] = value["emulator"] and Process(**value["emulator"])
        return cls(**value)


def state_dir() -> Path:
    """The directory of this user's state files, made if need be. Refuses one of another user."""
    if os.geteuid() == 0:
        path = Path("/run/prfaas")
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime) / "prfaas"
    else:
        path = Path(f"/tmp/prfaas-{os.geteuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise NotOurs(f"{path}: belongs to another user; remove it or set XDG_RUNTIME_DIR")
    return path


def all_states() -> list[LinkState]:
    """Every recorded link of this user, oldest first. Unreadable files are left alone."""
    states = []
    for path in sorted(state_dir().glob("*.json"), key=_changed_at):
        # A file that vanishes meanwhile was removed by its owner.
        with contextlib.suppress(ValueError, TypeError, KeyError, FileNotFoundError):
            states.append(LinkState.load(path))
    return states


def find_state(token: str) -> LinkState:
    for state in all_states():
        if state.token == token:
            return state
    known = ", ".join(state.token for state in all_states()) or "none"
    raise BadInput(f"no link {token!r} is up (known: {known}); see `prfaas link show`")


def sweep_stale() -> list[LinkState]:
    """Remove every link whose owner died; returns what was removed."""
    removed = []
    for state in all_states():
        if state.stale():
            # One that names what is not ours stays, for `prfaas link down TOKEN` to explain.
            with contextlib.suppress(NotOurs):
                remove(state)
                removed.append(state)
    return removed


def remove(state: LinkState) -> None:
    """Stop the emulator, delete the recorded namespaces and the state file. Idempotent.

    Raises NotOurs, before touching anything, when a recorded name now is another's namespace.
    """
    owned = f"{PREFIX}{state.token}-"
    present = [name for name in state.namespaces if (NETNS_DIR / name).exists()]
    for name in present:
        inode = state.namespaces[name]
        if not name.startswith(owned) or (inode and (NETNS_DIR / name).stat().st_ino != inode):
            raise NotOurs(
                f"namespace {name} is not the one that link {state.token} made; not touched"
            )
    if state.emulator and state.emulator.alive():
        _end(state.emulator)
    for name in present:
        _delete_links(name, f"{PREFIX}{state.token}")
        with contextlib.suppress(LinkError):
            command("ip", "netns", "delete", name)
    for path in (state.control_path, state.counters_path, state.log_path, state.path):
        path.unlink(missing_ok=True)


def command(*arguments: str, allow_failure: bool = False) -> str:
    """Run `ip` or `tc`; returns what it printed. Raises LinkError with its complaint."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise LinkError(f"{arguments[0]} is not installed (Debian package iproute2)") from None
    except subprocess.TimeoutExpired:
        raise LinkError(f"`{' '.join(arguments)}` did not end in {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode and not allow_failure:
        complaint = " ".join((done.stderr or done.stdout).split())
        raise LinkError(f"`{' '.join(arguments)}` failed: {complaint}")
    return done.stdout


def _delete_links(namespace: str, interface_prefix: str) -> None:
    """Workers may keep a namespace alive after its name is gone; without interfaces it is inert."""
    listing = command("ip", "-n", namespace, "-j", "link", "show", allow_failure=True)
    for interface in json.loads(listing or "[]"):
        name = str(interface["ifname"])
        if name.startswith(interface_prefix):
            command("ip", "-n", namespace, "link", "delete", name, allow_failure=True)


def _end(process: Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        for _ in range(100):
            _reap(process.pid)
            if not process.alive():
                return
            time.sleep(0.01)


def _reap(pid: int) -> None:
    """A dead child stays visible until it is waited for; other processes' children cannot be."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _start_ticks(pid: int) -> int | None:
    """Start time from /proc/pid/stat (field 22), or None when there is no such living process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
