"""What this host offers to a run: cores, memory, GPU, privileges, TCP, link backends, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from harness.host import native
from harness.links.probe import Offers, probe
from harness.links.state import LinkState, all_states

_TCP_SETTINGS = (
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_available_congestion_control",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "net/core/rmem_max",
    "net/core/wmem_max",
    "net/ipv4/ip_local_port_range",
)
_PACKAGES = ("numpy", "torch", "triton", "fla-core", "pyarrow", "pydantic", "aiohttp", "uvloop")
_SYSTEM_COMMANDS = ("ip", "tc", "nsenter", "iperf3", "linux.uml")


def describe_host() -> dict[str, Any]:
    """Everything that `prfaas doctor` prints, by section; the values are JSON."""
    offers = probe()
    return {
        "machine": _machine(),
        "gpus": _gpus(),
        "versions": _versions(),
        "native": native(),
        "privileges": _privileges(),
        "commands": {name: shutil.which(name) for name in _SYSTEM_COMMANDS},
        "tcp": _tcp(),
        "links": _links(offers),
        "stale_links": [state.token for state in _stale()],
    }


def _machine() -> dict[str, Any]:
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith(("MemTotal", "MemAvailable"))
    }
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "memory_bytes": memory.get("MemTotal", 0),
        "memory_available_bytes": memory.get("MemAvailable", 0),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "open_files_limit": os.sysconf("SC_OPEN_MAX"),
    }


def _gpus() -> list[dict[str, str]]:
    """One row a CUDA device, from nvidia-smi; empty without it."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=15,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in listed.splitlines() if line.count(",") == 2]
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows]


def _versions() -> dict[str, str | None]:
    """Versions without importing: torch alone would take seconds."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _privileges() -> dict[str, Any]:
    return {"uid": os.geteuid(), "root": os.geteuid() == 0, "tun_device": _exists("/dev/net/tun")}


def _tcp() -> dict[str, str]:
    settings = {}
    for name in _TCP_SETTINGS:
        path = Path("/proc/sys") / name
        if path.exists():
            settings[name.split("/")[-1]] = " ".join(path.read_text().split())
    return settings


def _links(offers: Offers) -> dict[str, Any]:
    return {
        offer.backend: {"available": offer.available, "reason": offer.reason}
        for offer in offers.by_backend.values()
    }


def _stale() -> list[LinkState]:
    return [state for state in all_states() if state.stale()]


def _exists(path: str) -> bool:
    return Path(path).exists()
