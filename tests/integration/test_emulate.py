"""The main job in small: real workers, a shaped link, a killed worker, an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")


def run_directory(folder: Path) -> Path:
    (directory,) = (folder / "runs").iterdir()
    return directory


def children(pid: int) -> list[int]:
    """All descendants of a process, youngest generation last."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    parents = {int(row.split()[0]): int(row.split()[1]) for row in listed if row.strip()}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def namespaces_of(pid: int) -> list[str]:
    folder = Path("/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if name.startswith("prfaas-") and f"-{pid}-" in name]


def wait_for(condition, timeout_s: float, what: str):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"not within {timeout_s} s: {what}")


def assert_nothing_left(pid: int, descendants: list[int]) -> None:
    def gone() -> bool:
        return not any(Path(f"/proc/{child}").exists() for child in descendants)

    wait_for(gone, 10, "the end of all worker processes")
    assert not namespaces_of(pid)


def balance(counts: dict[str, int]) -> bool:
    return counts["offered"] == counts["succeeded"] + counts["failed"] + counts["unsent"]


@pytest.mark.parametrize("backend", ["auto", "relay"])
def test_requests_cross_the_link_and_their_tokens_are_verified(cli, experiment_file, backend):
    summary = cli.run_whole(str(experiment_file), "--set", f"link.backend={backend}")
    (configuration,) = summary["configurations"]
    phases = {phase["name"]: phase for phase in configuration["phases"]}
    assert set(phases) == {"capacity", "latency"}
    for phase in phases.values():
        counts = phase["counts"]
        assert balance(counts)
        assert (counts["failed"], counts["unsent"], counts["mismatched"]) == (0, 0, 0)
        assert counts["verified"] >= 4
        assert 0 < counts["offloaded"] < counts["offered"]
        assert phase["egress"]["mean_gbps"]["raw"] > 0
    fleet = summary["extra"]["fleets"]["prfaas"]
    assert fleet["link_backend"] in {"netem", "tun", "tbf", "relay"}
    assert backend == "auto" or fleet["link_backend"] == backend

    table = pq.read_table(run_directory(cli.folder) / "requests.parquet").to_pandas()
    crossed = table[table.prefill_cluster == "prfaas"]
    assert (crossed.input_tokens > 5000).all()
    assert (crossed.wire_bytes > 0).all()
    assert (table[table.prefill_cluster == "pd"].wire_bytes == 0).all()
    assert (run_directory(cli.folder) / "complete").exists()

    audited_as_requested(run_directory(cli.folder), table)

    links = pq.read_table(run_directory(cli.folder) / "links.parquet").to_pandas()
    there = links[links.link == "prfaas->pd"]
    assert set(there.verdict) <= {"free", "busy", "saturated", "lossy", "receiver-limited"}
    assert there.goodput_bps.max() > 0
    assert there.connections.max() > 0
    assert there.backlog_bytes.max() > 0


def audited_as_requested(directory: Path, requests: pd.DataFrame) -> None:
    """Each cache has a row of either end, one digest, and as many bytes as its request says."""
    audit = words(pq.read_table(directory / "audit.parquet").to_pandas())
    assert set(audit.outcome) == {"committed"}
    assert (audit.reporter == audit.sender).equals(audit.direction == "sent")
    assert (audit.reporter == audit.receiver).equals(audit.direction == "received")
    assert set(zip(audit.configuration, audit.phase, strict=True)) == {
        ("prfaas", "capacity"),
        ("prfaas", "latency"),
    }
    cache = ["phase", "cache", "id", "attempt", "sender", "receiver", "tokens", "bytes", "digest"]
    sent, received = (
        audit[audit.direction == each].set_index("id").sort_index() for each in ("sent", "received")
    )
    assert sent.reset_index()[cache].equals(received.reset_index()[cache])
    requests = words(requests).set_index("id").sort_index()
    assert list(sent.index) == list(requests.index)
    assert (sent.sender == requests.prefill_instance).all()
    assert (sent.receiver == requests.decode_instance).all()
    across = sent.sender_cluster != sent.receiver_cluster
    assert (sent.wire_bytes.where(across, 0) == requests.wire_bytes).all()
    assert (sent.wire_bytes > sent.bytes).all()
    assert received.wire_bytes.isna().all()
    assert sent.digest.nunique() == len(sent)


def words(table: pd.DataFrame) -> pd.DataFrame:
    """Dictionaries of two tables cannot be compared; their strings can."""
    return table.astype(dict.fromkeys(table.select_dtypes("category"), object))


def test_a_killed_decode_worker_loses_no_request(cli, experiment_file):
    process = cli.start(
        "run", str(experiment_file), "--json", "--set", "measure.capacity_window_s=100"
    )
    logs = cli.folder / "runs"
    wait_for(lambda: list(logs.glob("*/workers/prfaas/pd-2.log")), 60, "a decode worker")
    wait_for(
        lambda: "capacity at" in "".join(p.read_text() for p in logs.glob("*/log.jsonl")),
        60,
        "the first phase",
    )
    descendants = children(process.pid)
    victim = next(pid for pid in descendants if listens_as(pid, "pd-2.sock"))
    time.sleep(4)
    os.kill(victim, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 4, err
    summary = json.loads(out)
    assert "lost pd-2 on the way" in summary["verdict"]
    (configuration,) = summary["configurations"]
    for phase in configuration["phases"]:
        assert balance(phase["counts"])
        assert phase["counts"]["succeeded"] + phase["counts"]["failed"] > 0
    assert configuration["phases"][0]["counts"]["retried"] > 0
    audit = pq.read_table(run_directory(cli.folder) / "audit.parquet").to_pandas()
    # What the killed worker had not yet said, the senders of its caches said.
    told = audit[audit.receiver == "pd-2"]
    assert len(told[told.direction == "sent"]) >= len(told[told.direction == "received"]) > 0
    assert summary["extra"]["fleets"]["prfaas"]["lost_workers"] == ["pd-2"]
    assert_nothing_left(process.pid, descendants)


def listens_as(pid: int, name: str) -> bool:
    """Whether the process holds the unix socket whose path ends in `name`."""
    try:
        inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return False
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()]
    return any(row[-1].endswith(name) and f"socket:[{row[-2]}]" in inodes for row in rows)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_drains_writes_and_leaves_nothing(cli, experiment_file, number):
    process = cli.start(
        "run", str(experiment_file), "--json", "--set", "measure.capacity_window_s=600"
    )
    logs = cli.folder / "runs"
    wait_for(
        lambda: "capacity at" in "".join(p.read_text() for p in logs.glob("*/log.jsonl")),
        60,
        "the first phase",
    )
    time.sleep(2)
    descendants = children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    summary = json.loads(out)
    assert summary["complete"] is False
    counts = summary["configurations"][0]["phases"][0]["counts"]
    assert balance(counts) and counts["unsent"] > 0
    assert not (run_directory(cli.folder) / "complete").exists()
    assert_nothing_left(process.pid, descendants)


def test_a_killed_harness_leaves_no_process(cli, experiment_file):
    process = cli.start("run", str(experiment_file))
    logs = cli.folder / "runs"
    wait_for(lambda: list(logs.glob("*/workers/prfaas/pd-2.log")), 60, "a decode worker")
    time.sleep(1)
    descendants = children(process.pid)
    assert len(descendants) >= 5
    process.kill()
    process.communicate(timeout=10)
    wait_for(
        lambda: not any(Path(f"/proc/{child}").exists() for child in descendants),
        15,
        "the end of all worker processes",
    )


def test_a_worker_that_cannot_start_is_one_clear_line(cli, experiment_file):
    done = cli.run("run", str(experiment_file), "--set", "emulate.page_tokens=60000")
    assert done.returncode == 3
    lines = [line for line in done.stderr.splitlines() if line.startswith("prfaas run:")]
    assert len(lines) == 1
    assert "died at start" in lines[0] and "Traceback" not in done.stderr


def test_a_stopped_worker_is_noticed_and_routed_around(cli, experiment_file):
    process = cli.start(
        "run", str(experiment_file), "--json", "--set", "measure.capacity_window_s=100"
    )
    logs = cli.folder / "runs"
    wait_for(
        lambda: "capacity at" in "".join(p.read_text() for p in logs.glob("*/log.jsonl")),
        60,
        "the first phase",
    )
    descendants = children(process.pid)
    victim = next(pid for pid in descendants if listens_as(pid, "prfaas-0.sock"))
    time.sleep(3)
    os.kill(victim, signal.SIGSTOP)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 4, err
    summary = json.loads(out)
    assert "lost prfaas-0 on the way" in summary["verdict"]
    (configuration,) = summary["configurations"]
    assert all(balance(phase["counts"]) for phase in configuration["phases"])
    assert configuration["phases"][0]["counts"]["failed"] == 0
    assert summary["extra"]["fleets"]["prfaas"]["lost_workers"] == ["prfaas-0"]
    assert_nothing_left(process.pid, descendants)


def test_a_harness_that_was_stopped_itself_loses_nobody_and_says_so(cli, experiment_file):
    lengths = ("measure.capacity_window_s=40", "measure.latency_window_s=5")
    process = cli.start(
        "run", str(experiment_file), "--json", *[w for v in lengths for w in ("--set", v)]
    )
    logs = cli.folder / "runs"
    wait_for(
        lambda: "capacity at" in "".join(p.read_text() for p in logs.glob("*/log.jsonl")),
        60,
        "the first phase",
    )
    descendants = children(process.pid)
    names = ["prfaas-0", "pd-0", "pd-1", "pd-2"]
    workers = [next(p for p in descendants if listens_as(p, f"{n}.sock")) for n in names]
    time.sleep(1.5)
    # Whoever is stopped for a moment has the harness waiting for a sign of life, which is there
    # when the harness goes on.
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.6)
    os.kill(process.pid, signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    time.sleep(6.5)
    os.kill(process.pid, signal.SIGCONT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 5, json.loads(out)["verdict"]
    summary = json.loads(out)
    assert "the harness itself stood still for " in summary["verdict"]
    (configuration,) = summary["configurations"]
    assert configuration["stalled_s"] > 5.5
    for phase in configuration["phases"]:
        counts = phase["counts"]
        assert balance(counts)
        assert (counts["failed"], counts["unsent"], counts["mismatched"]) == (0, 0, 0)
    fleet = summary["extra"]["fleets"]["prfaas"]
    assert fleet["lost_workers"] == []
    assert 5.5 < fleet["stalls"][0]["seconds"] <= fleet["stalled_s"] + 0.2
    assert_nothing_left(process.pid, descendants)
