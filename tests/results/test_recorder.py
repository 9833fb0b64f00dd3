"""The recorder: what is read back is what was recorded, in any reader, also after a crash."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results import columns, reader, tokens
from results.growing import GrowingParquet, sound_length
from results.recorder import Recorder
from results.records import RequestRecord, Status
from results.rows import AuditRow, DecisionRow, InstanceRow, LinkRow
from results.schemas import SCHEMA_VERSION, SCHEMAS, with_metadata

META = {"seed": "7", "commit": "abc", "clock": "virtual"}


def record(ident: int, runs: list[tuple[float, float, int]] | None = None) -> RequestRecord:
    made = RequestRecord(ident, 1.0 + ident, 1000 + ident, 8, "s", "t", "gold")
    made.sent_s = made.scheduled_s + 0.001
    made.status = Status.SUCCEEDED
    made.attempts = 1
    made.prefill_cluster, made.prefill_instance = "prfaas", "prfaas-0"
    made.decode_instance = "pd-3"
    made.wire_bytes = 12345
    made.prefill_started_s = made.scheduled_s + 0.5
    made.prefill_finished_s = made.scheduled_s + 1.5
    made.delivered_s = made.scheduled_s + 1.75
    made.admitted_s = made.scheduled_s + 2.0
    made.token_runs = [(made.admitted_s, 0.025, 8)] if runs is None else runs
    made.first_token_s = made.token_runs[0][0]
    start, step, count = made.token_runs[-1]
    made.last_token_s = start + step * (count - 1)
    made.tokens_received = sum(run[2] for run in made.token_runs)
    made.ended_s = made.last_token_s
    return made


def test_rows_are_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, META, row_group_rows=2)
    for i in range(5):
        recorder.request(record(i), "prfaas" if i < 3 else "naive", "latency")
    unsent = RequestRecord(5, 9.0, 10, 20)
    unsent.status = Status.UNSENT
    recorder.request(unsent, "naive", "latency")
    recorder.close()
    rows = reader.read(tmp_path, "requests").to_pylist()
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["configuration"] for row in rows] == ["prfaas"] * 3 + ["naive"] * 3
    assert rows[1] == {
        "configuration": "prfaas",
        "phase": "latency",
        "id": 1,
        "status": "succeeded",
        "failure": "",
        "attempts": 1,
        "session": "s",
        "tenant": "t",
        "slo_class": "gold",
        "input_tokens": 1001,
        "output_tokens": 8,
        "cached_tokens": 0,
        "tokens_received": 8,
        "wire_bytes": 12345,
        "prefill_cluster": "prfaas",
        "prefill_instance": "prfaas-0",
        "decode_instance": "pd-3",
        "scheduled_us": 2_000_000,
        "sent_us": 2_001_000,
        "prefill_started_us": 2_500_000,
        "prefill_finished_us": 3_500_000,
        "delivered_us": 3_750_000,
        "admitted_us": 4_000_000,
        "first_token_us": 4_000_000,
        "last_token_us": 4_175_000,
        "ended_us": 4_175_000,
        "verified": None,
    }
    assert rows[5]["status"] == "unsent"
    assert rows[5]["sent_us"] is None
    assert rows[5]["first_token_us"] is None
    found = reader.read(tmp_path, "tokens").to_pylist()
    assert tokens.times_us(found[1]) == [4_000_000 + 25_000 * k for k in range(8)]
    assert tokens.times_us(found[5]) == []
    assert reader.describe(tmp_path / "requests.parquet").row_groups == 3


def test_many_rows_are_read_back_whatever_has_not_happened(tmp_path: Path) -> None:
    # More than a block of rows and a row group, with names and gaps in the times in the middle.
    recorder = Recorder(tmp_path, META, row_group_rows=3000)
    expected = []
    for i in range(7001):
        made = record(i)
        made.decode_instance = f"pd-{i % 5}"
        made.verified = (None, True, False)[i % 3] if i > 4000 else None
        if 2100 < i < 2200 or i == 6999:
            made.delivered_s = made.admitted_s = None
            made.token_runs = ()
        configuration = "prfaas" if i < 2500 else "naive"
        delivered_us = None if made.delivered_s is None else (i + 1) * 1_000_000 + 1_750_000
        expected.append(
            (
                configuration,
                i,
                made.decode_instance,
                made.verified,
                delivered_us,
                8 if made.token_runs else 0,
            )
        )
        recorder.request(made, configuration, "latency")
    recorder.close()
    found = reader.read(tmp_path, "requests").to_pylist()
    counts = [len(tokens.times_us(row)) for row in reader.read(tmp_path, "tokens").to_pylist()]
    fields = ("configuration", "id", "decode_instance", "verified", "delivered_us")
    assert [
        (*(row[field] for field in fields), count) for row, count in zip(found, counts, strict=True)
    ] == expected
    groups = pq.ParquetFile(tmp_path / "requests.parquet").metadata
    assert [groups.row_group(at).num_rows for at in range(3)] == [3000, 3000, 1001]


def test_links_instances_and_decisions(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, META)
    recorder.link(LinkRow(0.5, "prfaas->pd", 1000, 1e9, 5e8, 0.5, 10, 0.002, None), "a", "p")
    recorder.instance(InstanceRow(1.5, "pd-0", "pd", "decode", queued=2, running=3), "a", "p")
    recorder.decision(
        DecisionRow(7, 1, 2.5, 100, 10, 0, 19_400.0, "prfaas", "prfaas-0", "pd-0", 3.0, 0.25,
                    reason="longer than the threshold",
                    alternatives=(("prfaas", 3.25), ("pd", 4.5))),
        "a", "p",
    )  # fmt: skip
    recorder.decision(DecisionRow(8, 1, 2.5, 1, 0, 0, None, "pd", "x", "y", 1.0), "a", "p")
    recorder.close()
    assert reader.read(tmp_path, "links").to_pylist()[0]["rtt_us"] == 2000
    assert reader.read(tmp_path, "links").to_pylist()[0]["min_rtt_us"] is None
    assert reader.read(tmp_path, "instances").to_pylist()[0]["time_us"] == 1_500_000
    first, second = reader.read(tmp_path, "decisions").to_pylist()
    assert first["alternatives"] == [
        {"cluster": "prfaas", "ttft_us": 3_250_000},
        {"cluster": "pd", "ttft_us": 4_500_000},
    ]
    assert (first["predicted_work_us"], first["predicted_wait_us"]) == (3_000_000, 250_000)
    assert (second["threshold_tokens"], second["alternatives"]) == (None, [])


def test_audit_rows_of_both_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, META)
    ends = ("prfaas-0", "prfaas", "pd-1", "pd")
    digest = "0" * 30 + "ff"
    of_the_cache = ("request", 10_000_007, 2, "acme", *ends, "", 107, 64, 43_616)
    told_s = 1_795_990_543.723778
    recorder.audit(
        AuditRow(told_s, "pd-1", "received", "committed", *of_the_cache, None, digest), "a", "p"
    )
    recorder.audit(
        AuditRow(told_s + 1e-3, "prfaas-0", "sent", "committed", *of_the_cache, 44_064, digest),
        "a",
        "p",
    )
    recorder.audit(
        AuditRow(told_s + 1, "pd-1", "received", "refused", *of_the_cache, None, None), "a", "q"
    )
    recorder.close()
    received, sent, refused = reader.read(tmp_path, "audit").to_pylist()
    assert received == {
        "configuration": "a",
        "phase": "p",
        "unix_us": 1_795_990_543_723_778,
        "reporter": "pd-1",
        "direction": "received",
        "outcome": "committed",
        "cache": "request",
        "id": 10_000_007,
        "attempt": 2,
        "tenant": "acme",
        "sender": "prfaas-0",
        "sender_cluster": "prfaas",
        "receiver": "pd-1",
        "receiver_cluster": "pd",
        "peer_identity": "",
        "tokens": 107,
        "held_tokens": 64,
        "bytes": 43_616,
        "wire_bytes": None,
        "digest": digest,
    }
    assert (sent["wire_bytes"], sent["digest"]) == (44_064, digest)
    assert (refused["phase"], refused["digest"]) == ("q", None)


def test_every_field_has_a_definition_and_times_a_unit() -> None:
    for schema in SCHEMAS.values():
        for field in schema:
            assert field.metadata[b"definition"]
            if field.name.endswith("_us"):
                assert field.metadata[b"unit"] == b"us"


def test_field_metadata_and_key_values_reach_the_file(tmp_path: Path) -> None:
    Recorder(tmp_path, META).close()
    schema = pq.read_schema(tmp_path / "requests.parquet")
    assert schema.field("scheduled_us").metadata[b"unit"] == b"us"
    assert schema.metadata[b"prfaas.seed"] == b"7"
    assert schema.metadata[b"prfaas.schema_version"] == str(SCHEMA_VERSION).encode()
    assert schema.metadata[b"prfaas.complete"] == b"true"


@pytest.mark.parametrize("complete", [True, False])
def test_completeness_is_in_the_file(tmp_path: Path, complete: bool) -> None:
    recorder = Recorder(tmp_path, META)
    recorder.request(record(0), "a", "p")
    recorder.close(complete=complete)
    assert reader.describe(tmp_path / "requests.parquet").complete is complete


steps = st.one_of(
    st.tuples(st.floats(0, 5), st.floats(0.001, 0.2), st.integers(1, 60)),
    st.tuples(st.floats(0, 5), st.just(0.0), st.integers(1, 4)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(steps, min_size=1, max_size=12), min_size=1, max_size=6))
def test_token_times_are_exact_to_the_microsecond(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[tuple[float, float, int]]]
) -> None:
    directory = tmp_path_factory.mktemp("tokens")
    recorder = Recorder(directory, META)
    exact = []
    for ident, shape in enumerate(shapes):
        now, runs = 100.0, []
        for wait, step, count in shape:
            runs.append((now + wait, step, count))
            now += wait + step * (count - 1)
        recorder.request(record(ident, runs), "a", "p")
        exact.append([start + k * step for start, step, count in runs for k in range(count)])
    recorder.close()
    for row, times_s in zip(reader.read(directory, "tokens").to_pylist(), exact, strict=True):
        found = tokens.times_us(row)
        assert len(found) == len(times_s)
        np.testing.assert_allclose(np.array(found) / 1e6, times_s, atol=1.6e-6)


def test_gaps_over_all_tokens_and_their_percentile(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, META)
    recorder.request(record(0, [(5.0, 0.02, 91), (7.0, 0.04, 10)]), "a", "p")
    recorder.close()
    found = tokens.gaps(reader.read(tmp_path, "tokens"))
    # 90 gaps of 20 ms, one of 200 ms (6.8 to 7.0), 9 of 40 ms.
    assert found.count == 100
    assert found.percentile(0.90) == pytest.approx(0.020)
    assert found.percentile(0.91) == pytest.approx(0.040)
    assert found.percentile(0.99) == pytest.approx(0.040)
    assert found.mean() == pytest.approx((90 * 0.02 + 0.2 + 9 * 0.04) / 100)
    assert not found.chunked


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(2e-6, 1), st.integers(2, 2000)), min_size=1))
def test_one_run_each_is_kept_as_among_other_requests(
    shapes: list[tuple[float, float, int]],
) -> None:
    alone = columns.token_columns(np.ones(len(shapes), np.int64), np.array(shapes, np.float64))
    # A request without tokens is none that has one run.
    each = np.append(np.ones(len(shapes), np.int64), 0)
    among = columns.token_columns(each, np.array(shapes, np.float64))
    for one, other in zip(alone, among, strict=True):
        assert one.type == other.type
        assert one.equals(other[: len(shapes)])


def test_chunk_gaps_are_called_so(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, META)
    recorder.request(record(0, [(0.1, 0.0, 4), (0.14, 0.0, 4), (0.18, 0.0, 2)]), "a", "p")
    recorder.close()
    found = tokens.gaps(reader.read(tmp_path, "tokens"))
    assert found.chunked
    assert sorted(np.repeat(found.values_s, found.weights).tolist()) == pytest.approx([0.04, 0.04])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.lists(st.integers(0, 3_000_000), max_size=20)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_gaps_are_counted_as_they_are_in_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    measured: list[tuple[str, list[int]]],
    row_group_rows: int,
) -> None:
    directory = tmp_path_factory.mktemp("gaps")
    recorder = Recorder(directory, META, row_group_rows=row_group_rows)
    expected: Counter[tuple[str, int]] = Counter()
    for ident, (configuration, gaps_us) in enumerate(measured):
        ends_us = np.cumsum([5_000_000, *gaps_us])
        recorder.request(
            record(ident, [(each / 1e6, 0.0, 1) for each in ends_us.tolist()]), configuration, "p"
        )
        expected.update((configuration, gap) for gap in gaps_us)
    recorder.close()
    written = reader.read(directory, "gaps")
    (directory / "gaps.parquet").unlink()
    for table in (written, reader.read(directory, "gaps")):
        found: Counter[tuple[str, int]] = Counter()
        for row in table.to_pylist():
            found[row["configuration"], row["gap_us"]] += row["tokens"]
        assert found == expected


def test_duckdb_pandas_and_polars_read_the_files(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    recorder = Recorder(tmp_path, META, row_group_rows=3)
    for i in range(10):
        recorder.request(record(i), "a", "p")
    recorder.close()
    for name, column in (("requests", "first_token_us"), ("tokens", "first_us")):
        path = str(tmp_path / f"{name}.parquet")
        expected = sum(4_000_000 + 1_000_000 * (i - 1) for i in range(10))
        assert duckdb.sql(f"select sum({column}) from '{path}'").fetchall() == [(expected,)]
        assert pandas.read_parquet(path)[column].sum() == expected
        assert polars.read_parquet(path)[column].sum() == expected


def test_the_file_is_whole_after_every_row_group(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, META, row_group_rows=4)
    for i in range(12):
        recorder.request(record(i), "a", "p")
        rows = pq.read_table(tmp_path / "requests.parquet").num_rows
        assert rows == (i + 1) // 4 * 4
        assert not reader.describe(tmp_path / "requests.parquet").complete


def test_a_write_cut_anywhere_loses_only_the_open_row_group(tmp_path: Path) -> None:
    path = tmp_path / "links.parquet"
    schema = with_metadata("links", META)
    file = GrowingParquet(path, schema)
    row = {"configuration": "c", "phase": "p", "time_us": 1, "sent_bytes": 2}
    one = pa.Table.from_pylist([row], schema=schema)
    file.append(one)
    first = path.stat().st_size
    file.append(one)
    whole = path.read_bytes()
    for cut in range(first, len(whole), 97):
        path.write_bytes(whole[:cut])
        assert sound_length(path) == first
        path.write_bytes(whole[:cut] + bytes(1 << 12))
        assert sound_length(path) == first
        assert reader.read(tmp_path, "links").num_rows == 1
    path.write_bytes(b"PAR1")
    assert sound_length(path) == 0


@contextmanager
def at_most(file_bytes: int) -> Iterator[None]:
    """Files grow no further: a write that would go on fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("written_bytes", [0, 3000, 100_000])
def test_where_the_disk_is_full_the_file_stays_whole_and_goes_on(
    tmp_path: Path, written_bytes: int
) -> None:
    path = tmp_path / "links.parquet"
    schema = with_metadata("links", META)
    file = GrowingParquet(path, schema)
    rng = np.random.default_rng(1)
    rows = [
        {"configuration": "c", "phase": "p", "time_us": i, "loss": x}
        for i, x in enumerate(rng.random(30_000))
    ]
    one = pa.Table.from_pylist(rows, schema=schema)
    file.append(one[:4])
    before = path.read_bytes()
    with at_most(len(before) + written_bytes), pytest.raises(OSError) as caught:
        file.append(one)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    with at_most(len(before)), pytest.raises(OSError):
        file.close({"complete": "no"})
    assert path.read_bytes() == before
    file.append(one[:6])
    assert pq.read_table(path)["time_us"].to_pylist() == [0, 1, 2, 3, *range(6)]


_WRITER = """
import sys, pathlib
sys.path.insert(0, {tests!r})
from test_recorder import META, record
from results.recorder import Recorder
recorder = Recorder(pathlib.Path({directory!r}), META, row_group_rows=50)
i = 0
while {limit} is None or i < {limit}:
    recorder.request(record(i), "a", "p")
    i += 1
    if i == 500:
        print("written", flush=True)
recorder.close()
"""


def _script(directory: Path, limit: int | None) -> list[str]:
    tests = str(Path(__file__).parent)
    return [
        sys.executable,
        "-c",
        _WRITER.format(tests=tests, directory=str(directory), limit=limit),
    ]


def test_kill_9_loses_at_most_the_open_row_group(tmp_path: Path) -> None:
    process = subprocess.Popen(_script(tmp_path, None), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    rows = reader.read(tmp_path, "requests")
    assert rows.num_rows >= 500
    assert rows.num_rows % 50 == 0
    assert rows["id"].to_pylist() == list(range(rows.num_rows))
    assert not reader.describe(tmp_path / "requests.parquet").complete


def test_equal_runs_give_equal_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    contents = []
    for seed in ("1", "2"):
        directory = tmp_path / seed
        directory.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run(_script(directory, 600), check=True, env=environment, capture_output=True)
        contents.append({p.name: p.read_bytes() for p in sorted(directory.iterdir())})
    assert contents[0] == contents[1]
    assert len(contents[0]) == len(SCHEMAS)


def test_sizes_of_regular_and_of_measured_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    regular, measured = tmp_path / "regular", tmp_path / "measured"
    regular.mkdir()
    measured.mkdir()
    count, tokens_each = 400, 1024
    recorder = Recorder(regular, META)
    for i in range(count):
        recorder.request(record(i, [(float(rng.uniform(0, 900)), 0.025, tokens_each)]), "a", "p")
    recorder.close()
    recorder = Recorder(measured, META)
    for i in range(count):
        times = np.cumsum(rng.normal(0.025, 0.0005, tokens_each))
        recorder.request(record(i, [(float(t), 0.0, 1) for t in times]), "a", "p")
    recorder.close()
    total = count * tokens_each
    # Under 20 MB for 100,000 requests, with the fixed part of the file apart.
    empty = 2 * 20_000
    regular_bytes = sum(p.stat().st_size for p in regular.iterdir())
    assert (regular_bytes - 5 * empty) / count < 200
    assert (measured / "tokens.parquet").stat().st_size < 2 * total
    assert tokens.gaps(reader.read(measured, "tokens")).count == count * (tokens_each - 1)
