"""The copiers of records, in Python and in C: the same columns to the byte, the same refusals."""

from __future__ import annotations

import copy
import gc
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results.records import RequestRecord, Status
from results.request_rows import Copier, PythonCopier, RequestRows

try:
    from results import _request_rows, request_rows

    def c_copier() -> Copier:
        return _request_rows.Copier(
            RequestRecord,
            tuple(request_rows._SECONDS),
            tuple(request_rows._COUNTS),
            tuple(request_rows._OTHERS),
            "token_runs",
        )
except ImportError:
    c_copier = None  # type: ignore[assignment]

needs_c = pytest.mark.skipif(c_copier is None, reason="results._request_rows is not built")
COPIERS = [pytest.param(PythonCopier, id="python"), pytest.param(c_copier, id="c", marks=needs_c)]


class Subclass(RequestRecord):
    """Has a `__dict__`, and one of its fields is computed."""

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return 77

    @wire_bytes.setter
    def wire_bytes(self, value: int) -> None:
        pass


seconds = st.one_of(
    st.floats(-1e9, 1e9),
    st.integers(-1000, 1000),
    st.floats(0, 10).map(np.float64),
    st.floats(0, 10, width=32).map(np.float32),
    st.just(float("nan")),
    st.booleans(),
)
counts = st.one_of(st.integers(0, 2**31 - 1), st.integers(0, 9).map(np.int64), st.booleans())
names = st.one_of(st.sampled_from(["", "a", "pd-1"]), st.text(max_size=3))
run = st.tuples(st.floats(0, 1e4), st.floats(0, 1), st.integers(1, 2000))
runs = st.one_of(
    st.lists(run, max_size=12),
    st.lists(run, max_size=3).map(tuple),
    st.lists(run.map(list), max_size=2),
    st.just([(1.0, 0.0, 1)] * 300),
)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    made = draw(st.sampled_from([RequestRecord, RequestRecord, Subclass]))(0, 0.0, 1, 1)
    for field in fields(RequestRecord):
        kind = str(field.type)
        if kind.startswith("float"):
            value: Any = draw(st.none() | seconds if "None" in kind else seconds)
        elif kind == "int":
            value = draw(counts)
        elif kind == "str":
            # Equal strings that are not the same object, too.
            value = "".join(list(draw(names)))
        elif field.name == "status":
            value = draw(st.sampled_from([None, *Status, "succeeded"]))
        elif field.name == "verified":
            value = draw(st.sampled_from([None, True, False]))
        elif field.name == "token_runs":
            value = draw(runs)
        else:
            continue
        setattr(made, field.name, value)
    return made


def same(one: list[pa.Array], other: list[pa.Array]) -> bool:
    """Also what Parquet files are made of: dictionaries in the same order."""
    return all(
        a.type == b.type
        and a.equals(b)
        and (
            not isinstance(a, pa.DictionaryArray)
            or (a.dictionary.equals(b.dictionary) and a.indices.equals(b.indices))
        )
        for a, b in zip(one, other, strict=True)
    )


@needs_c
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(records(), min_size=1, max_size=8), max_size=5), st.integers(0, 5))
def test_both_copy_the_same(batches: list[list[RequestRecord]], taken_after: int) -> None:
    python, c = RequestRows(64, PythonCopier()), RequestRows(64, c_copier())
    for at, batch in enumerate(batches):
        for rows in (python, c):
            rows.held.extend(batch)
            rows.copy()
            assert rows.held == []
        assert (python.rows, python.runs) == (c.rows, c.runs)
        if at == taken_after:
            for one, other in zip(python.take(), c.take(), strict=True):
                assert same(one, other)
    for one, other in zip(python.take(), c.take(), strict=True):
        assert same(one, other)


@needs_c
def test_both_copy_more_than_a_block_of_changing_rows_the_same() -> None:
    python, c = RequestRows(8000, PythonCopier()), RequestRows(8000, c_copier())
    for first in range(0, 7900, 100):
        batch = [
            RequestRecord(
                i,
                i / 7,
                1,
                2,
                session=f"session-{i % 3000}",
                prefill_instance=f"p-{i * i % 701}",
                ended_s=None if 3000 < i < 3010 else i * 1e-6 * 1.5,
                verified=(None, True, False)[i % 3] if i > 5000 else None,
                token_runs=[(i * 0.1 + k, 0.001 * k, 3) for k in range(i % 9)],
            )
            for i in range(first, first + 100)
        ]
        for rows in (python, c):
            rows.held.extend(batch)
            rows.copy()
    for one, other in zip(python.take(), c.take(), strict=True):
        assert same(one, other)


@pytest.mark.parametrize("make", COPIERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sent_s", "soon"),
        ("scheduled_s", 10**400),
        ("input_tokens", 2**63),
        ("input_tokens", 1.5),
        ("input_tokens", None),
        ("wire_bytes", -(2**63) - 1),
        ("id", "seven"),
        ("token_runs", [(1.0, 0.5)]),
        ("token_runs", [(1.0, "x", 3)]),
        ("token_runs", [7]),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_copied(
    make: Any, field: str, value: Any
) -> None:
    rows = RequestRows(10, make())
    good = RequestRecord(1, 2.0, 3, 4, token_runs=[(1.0, 0.5, 3)])
    bad = copy.copy(good)
    setattr(bad, field, value)
    bad.ended_s = None
    rows.held.append(good)
    rows.copy()
    rows.held.extend([good, bad])
    with pytest.raises(ValueError, match=f"{field} of request .* cannot be recorded"):
        rows.copy()
    assert (rows.rows, rows.runs, len(rows.held)) == (1, 1, 2)
    good.ended_s = 1.5
    rows.held[:] = [good, good]
    rows.copy()
    requests, _ = rows.take()
    assert requests[0].to_pylist() == [1, 1, 1]
    assert requests[-2].to_pylist() == [None, 1_500_000, 1_500_000]


@pytest.mark.parametrize("make", COPIERS)
def test_a_field_that_a_record_lacks_is_an_error(make: Any) -> None:
    rows = RequestRows(10, make())
    record = RequestRecord(1, 2.0, 3, 4)
    del record.status
    rows.held.append(record)
    with pytest.raises(AttributeError, match="status"):
        rows.copy()
    assert rows.rows == 0


@needs_c
def test_a_copier_in_c_refuses_what_it_cannot_copy_to() -> None:
    copier = c_copier()
    with pytest.raises(ValueError, match="no room"):
        copier.copy([RequestRecord(1, 2.0, 3, 4)])
    shapes: list[Any] = [((9, 4), "i8"), ((7, 4), "i8"), ((9, 4), "i4"), ((4,), "i8")]
    arrays = [np.empty(shape, kind) for shape, kind in shapes]
    for at in range(4):
        wrong = list(arrays)
        wrong[at] = np.empty((3, 5), "i2")
        with pytest.raises(ValueError):
            copier.begin(*wrong)
    with pytest.raises(TypeError):
        copier.copy(())  # type: ignore[arg-type]


def counted(kept: list[Any]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(each) for each in kept]


@needs_c
def test_references_are_given_back() -> None:
    copier = c_copier()
    rows = RequestRows(100, copier)
    session = "".join(["a session ", "of its own"])
    record = RequestRecord(10**6, 2.5e5, 3, 4, session=session, token_runs=[(0.1, 0.2, 3)])
    kept = [session, record, record.token_runs, record.id]
    before = counted(kept)
    for _ in range(5):
        rows.held.extend([record] * 20)
        rows.copy()
        record.status = 1.5  # type: ignore[assignment]
        record.input_tokens = "x"  # type: ignore[assignment]
        rows.held.append(record)
        with pytest.raises(ValueError):
            rows.copy()
        rows.held.clear()
        record.input_tokens, record.status = 3, None
    rows.take()
    assert counted(kept) == before
    rows.held.append(record)
    rows.copy()
    del rows, copier
    assert counted(kept) == before
