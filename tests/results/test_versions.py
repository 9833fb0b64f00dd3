"""Files of older versions read as today's; the fixtures were written by the version they name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from results import reader, tokens
from results.reader import ReadError
from results.schemas import SCHEMA_VERSION, SCHEMAS

V1 = Path(__file__).parent / "fixtures" / "v1"


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - {"audit"}))
def test_version_1_reads_as_todays_schema(name: str) -> None:
    if name != "gaps":  # Counted from `tokens` when read.
        assert reader.describe(V1 / f"{name}.parquet").schema_version == 1
    table = reader.read(V1, name)
    assert table.schema.equals(SCHEMAS[name])
    assert table.num_rows == {"requests": 3, "tokens": 3, "gaps": 0}.get(name, 1)


def test_version_1_values() -> None:
    rows = reader.read(V1, "requests").to_pylist()
    assert [row["first_token_us"] for row in rows] == [3_000_000, 4_000_000, 1_000_000]
    expected = [1_000_000 + 20_000 * k for k in range(5)]
    expected += [1_500_000 + 20_000 * k for k in range(3)]
    assert tokens.times_us(reader.read(V1, "tokens").to_pylist()[2]) == expected
    assert reader.read(V1, "decisions").to_pylist()[0]["threshold_tokens"] == 19_400.0


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
