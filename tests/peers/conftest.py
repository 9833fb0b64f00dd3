"""Public servers in virtual environments of their own, started on free ports of the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: environment -> the arguments of each `pip install` that fills it
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "guidellm": (("torch==2.13.0", "guidellm==0.8.1"),),
    "transformers": (("torch==2.13.0", "transformers[serving]>=5.23"),),
    # Without what it depends on for other ends, of which one comes from NVIDIA's own index only.
    "dynamo": (
        ("--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
        (
            *("aiohttp", "msgspec", "numpy", "prometheus-client", "pydantic<=2.13.5", "pyzmq"),
            *("redis", "tqdm", "transformers", "typing-extensions", "uvloop", "zstandard"),
        ),
    ),
}
_START_S = 240.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """They install hundreds of megabytes, so they run only where `-m peers` asks for them."""
    if "peers" not in config.getoption("markexpr", ""):
        skip = pytest.mark.skip(reason="make test-peers runs it")
        for item in items:
            if item.get_closest_marker("peers"):
                item.add_marker(skip)


def environment(name: str) -> Path:
    """The environment's `bin`, made and filled unless it has been."""
    path = ROOT / f".venv-peers-{name}"
    stamp = path / ".installed"
    wanted = repr(PACKAGES[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        for packages in PACKAGES[name]:
            done = subprocess.run([str(path / "bin" / "pip"), "install", "--quiet", *packages])
            if done.returncode:
                pytest.skip(f"{' '.join(packages)} cannot be installed here")
        stamp.write_text(wanted)
    return path / "bin"


@pytest.fixture
def environment_of() -> Callable[[str], Path]:
    return environment


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts `NAME's command ARGUMENTS` with {port} filled in; returns the URL once it answers, or
    at once "" for a command that takes no port.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str, variables: dict[str, str] | None = None) -> str:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        path = tmp_path / f"{name}-{len(processes)}.log"
        log = path.open("wb")
        command = [str(environment(name) / arguments[0]), *arguments[1:]]
        process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in command],
            stdout=log,
            stderr=log,
            env=os.environ
            | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
            | (variables or {}),
        )
        log.close()
        processes.append(process)
        if "{port}" not in " ".join(arguments):
            return ""
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + _START_S
        while time.monotonic() < until and process.poll() is None:
            try:
                urllib.request.urlopen(url + "/health", timeout=2.0).close()
                return url
            except urllib.error.HTTPError:
                return url
            except OSError:
                time.sleep(0.3)
        said = path.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{name} did not come up:\n{said}")

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
