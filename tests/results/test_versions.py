"""Files of older versions read as today's; the fixtures were written by the version they name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from results import reader, tokens
from results.reader import ReadError
from results.schemas import SCHEMA_VERSION, SCHEMAS

FIXTURES = Path(__file__).parent / "fixtures"
V1 = FIXTURES / "v1"
ROWS = {
    1: {"requests": 3, "tokens": 3, "links": 1, "instances": 1, "decisions": 1},
    2: {"requests": 2, "tokens": 2, "gaps": 2, "links": 1, "instances": 1, "decisions": 1},
}
ROWS[3] = ROWS[2] | {"audit": 2}
ROWS[4] = ROWS[3] | {"flows": 2}


def test_each_version_has_a_fixture() -> None:
    folders = {path.name for path in FIXTURES.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {f"v{version}" for version in range(1, SCHEMA_VERSION + 1)}
    for version, rows in ROWS.items():
        assert {path.stem for path in (FIXTURES / f"v{version}").iterdir()} == rows.keys()


@pytest.mark.parametrize(("version", "name"), [(v, name) for v in ROWS for name in ROWS[v]])
def test_each_version_reads_as_todays_schema(version: int, name: str) -> None:
    folder = FIXTURES / f"v{version}"
    assert reader.describe(folder / f"{name}.parquet").schema_version == version
    table = reader.read(folder, name)
    assert table.schema.equals(SCHEMAS[name])
    assert table.num_rows == ROWS[version][name]


def test_gaps_of_version_1_are_counted_when_they_are_read() -> None:
    table = reader.read(V1, "gaps")
    assert table.schema.equals(SCHEMAS["gaps"])
    assert table.num_rows == 0  # Its steps are regular.


def test_version_1_values() -> None:
    rows = reader.read(V1, "requests").to_pylist()
    assert [row["first_token_us"] for row in rows] == [3_000_000, 4_000_000, 1_000_000]
    expected = [1_000_000 + 20_000 * k for k in range(5)]
    expected += [1_500_000 + 20_000 * k for k in range(3)]
    assert tokens.times_us(reader.read(V1, "tokens").to_pylist()[2]) == expected
    assert reader.read(V1, "decisions").to_pylist()[0]["threshold_tokens"] == 19_400.0


@pytest.mark.parametrize("version", [2, 3, 4])
def test_values_of_later_versions(version: int) -> None:
    folder = FIXTURES / f"v{version}"
    first, second = reader.read(folder, "tokens").to_pylist()
    assert tokens.times_us(first) == [3_000_000 + 25_000 * k for k in range(8)]
    assert tokens.times_us(second) == [4_000_000, 4_020_000, 4_040_000, 4_075_000, 4_095_000]
    assert [row["last_token_us"] for row in reader.read(folder, "requests").to_pylist()] == [
        3_175_000,
        4_095_000,
    ]
    gaps = reader.read(folder, "gaps").to_pylist()
    counted = {(row["gap_us"], row["tokens"]) for row in gaps}
    assert counted == {(20_000, 3), (35_000, 1)}
    (link,) = reader.read(folder, "links").to_pylist()
    assert (link["verdict"], link["connections"], link["sndbuf_limited"]) == ("busy", 4, 0.5)
    (decision,) = reader.read(folder, "decisions").to_pylist()
    assert decision["alternatives"][1] == {"cluster": "pd", "ttft_us": 4_500_000}


def test_values_of_the_audit_of_version_3() -> None:
    sent, received = reader.read(FIXTURES / "v3", "audit").to_pylist()
    assert (sent["direction"], sent["wire_bytes"]) == ("sent", 12_345)
    assert (received["direction"], received["wire_bytes"]) == ("received", None)
    assert sent["digest"] == received["digest"] == "0" * 30 + "ff"


def test_values_of_the_flows_of_version_4() -> None:
    first, last = reader.read(FIXTURES / "v4", "flows").to_pylist()
    assert (first["time_us"], first["rate_bps"]) == (2_500_000, 5e8)
    assert (last["time_us"], last["rate_bps"]) == (2_750_000, 0.0)
    assert (first["link"], first["id"], first["attempt"]) == ("prfaas->pd", 0, 1)


def test_columns_that_a_file_lacks_are_null(tmp_path: Path) -> None:
    table = pq.read_table(V1 / "requests.parquet").drop_columns(["verified", "tenant"])
    pq.write_table(table, tmp_path / "requests.parquet")
    found = reader.read(tmp_path, "requests")
    assert found.schema.equals(SCHEMAS["requests"])
    assert found["verified"].null_count == found["tenant"].null_count == 3
    assert len(reader.as_requests(found)) == 3
    assert reader.read(tmp_path, "requests", ["id", "verified"]).schema.names == ["id", "verified"]


def test_columns_that_only_the_file_has_are_kept(tmp_path: Path) -> None:
    table = pq.read_table(V1 / "requests.parquet")
    table = table.append_column("later", pa.array([1, 2, 3]))
    pq.write_table(table, tmp_path / "requests.parquet")
    assert reader.read(tmp_path, "requests")["later"].to_pylist() == [1, 2, 3]


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    table = pq.read_table(V1 / "links.parquet")
    newer = {**table.schema.metadata, b"prfaas.schema_version": str(SCHEMA_VERSION + 1).encode()}
    pq.write_table(table.replace_schema_metadata(newer), tmp_path / "links.parquet")
    with pytest.raises(ReadError, match="newer than"):
        reader.read(tmp_path, "links")


def test_what_is_no_results_file_is_said(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "links.parquet")
    with pytest.raises(ReadError, match="not a results file"):
        reader.read(tmp_path, "links")
    with pytest.raises(ReadError, match="No such file"):
        reader.read(tmp_path, "tokens")
