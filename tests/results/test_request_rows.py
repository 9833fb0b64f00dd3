"""The copiers of records, in Python and in C: the same columns to the byte, the same refusals."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native import require
from results.records import RequestRecord, Status
from results.request_rows import Copier, PythonCopier, RequestRows

try:
    require("results._request_rows")
    from results import _request_rows, request_rows

    def c_copier(on_full: Callable[[], None]) -> Copier:
        return _request_rows.Copier(
            RequestRecord,
            tuple(request_rows._SECONDS),
            tuple(request_rows._COUNTS),
            tuple(request_rows._OTHERS),
            "token_runs",
            on_full,
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


class Rows(RequestRows):
    """Knows how often they were full."""

    def __init__(self, make: Any, capacity: int = 64, max_runs: int = 1 << 20) -> None:
        self.fills = 0
        super().__init__(self._full, make)
        self.begin(capacity, max_runs)

    def _full(self) -> None:
        self.fills += 1


def rows_of(make: Any, capacity: int = 64, max_runs: int = 1 << 20) -> Rows:
    return Rows(make, capacity, max_runs)


def no_more() -> None:
    """Of a copier that is full."""


@needs_c
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(records(), st.sampled_from("abc"), st.sampled_from("pq")), max_size=40),
    st.integers(1, 40),
    st.integers(1, 400),
)
def test_both_copy_the_same(
    added: list[tuple[RequestRecord, str, str]], capacity: int, max_runs: int
) -> None:
    python, c = (rows_of(make, capacity, max_runs) for make in (PythonCopier, c_copier))
    fills = 0
    for record, configuration, phase in added:
        python.add(record, configuration, phase)
        c.add(record, configuration, phase)
        assert python.fills == c.fills
        assert python.rows == c.rows
        if python.fills > fills:
            fills = python.fills
            for one, other in zip(python.take(), c.take(), strict=True):
                assert same(one, other)
            python.begin(capacity, max_runs)
            c.begin(capacity, max_runs)
    for one, other in zip(python.take(), c.take(), strict=True):
        assert same(one, other)


@needs_c
def test_both_copy_more_than_a_block_of_changing_rows_the_same() -> None:
    python, c = rows_of(PythonCopier, 8000), rows_of(c_copier, 8000)
    for i in range(7900):
        record = RequestRecord(
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
        python.add(record, "a" if i < 5000 else "b", "p")
        c.add(record, "a" if i < 5000 else "b", "p")
    assert python.fills == c.fills == 0
    for one, other in zip(python.take(), c.take(), strict=True):
        assert same(one, other)


UNFIT = [
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
    ("token_runs", 7),
]


@pytest.mark.parametrize("make", COPIERS)
@pytest.mark.parametrize(("field", "value"), UNFIT)
def test_what_does_not_fit_is_refused(make: Any, field: str, value: Any) -> None:
    rows = rows_of(make)
    rows.add(RequestRecord(1, 2.0, 3, 4, token_runs=[(1.0, 0.5, 3)]), "a", "p")
    unfit = RequestRecord(2, 2.0, 3, 4)
    setattr(unfit, field, value)

    def record_it() -> None:
        rows.add(unfit, "a", "p")
        rows.take()

    with pytest.raises(ValueError, match=f"{field} of request .* cannot be recorded"):
        record_it()


@pytest.mark.parametrize("make", COPIERS)
@pytest.mark.parametrize("time_s", [float("inf"), -float("inf"), 1e13])
def test_a_time_of_too_many_microseconds_is_refused(make: Any, time_s: float) -> None:
    rows = rows_of(make)
    rows.add(RequestRecord(1, 9.2e12, 3, 4), "a", "p")

    def record_it() -> None:
        rows.add(RequestRecord(2, 2.0, 3, 4, ended_s=time_s), "a", "p")
        rows.take()

    with pytest.raises(ValueError, match=r"cannot be recorded: -?(inf|1000)"):
        record_it()


@needs_c
@pytest.mark.parametrize(("field", "value"), UNFIT)
def test_in_c_what_was_refused_leaves_no_trace(field: str, value: Any) -> None:
    rows = rows_of(c_copier)
    good = RequestRecord(1, 2.0, 3, 4, token_runs=[(1.0, 0.5, 3)], ended_s=1.5)
    unfit = copy.copy(good)
    setattr(unfit, field, value)
    unfit.ended_s = None
    rows.add(good, "a", "p")
    with pytest.raises(ValueError):
        rows.add(unfit, "a", "p")
    assert rows.rows == 1
    rows.add(good, "a", "p")
    _, requests, tokens = rows.take()
    assert requests[0].to_pylist() == [1, 1]
    assert requests[-2].to_pylist() == [1_500_000, 1_500_000]
    assert [len(each) for each in tokens[3].to_pylist()] == [1, 1]


@pytest.mark.parametrize("make", COPIERS)
def test_a_field_that_a_record_lacks_is_an_error(make: Any) -> None:
    rows = rows_of(make, 1)
    record = RequestRecord(1, 2.0, 3, 4)
    del record.status
    with pytest.raises(AttributeError, match="status"):
        rows.add(record, "a", "p")


@needs_c
def test_a_copier_in_c_refuses_what_it_cannot_copy_to() -> None:
    copier = c_copier(no_more)
    record = RequestRecord(1, 2.0, 3, 4)
    with pytest.raises(ValueError, match="no room"):
        copier.add(record, "a", "p")
    shapes: list[Any] = [((9, 4), "i8"), ((7, 4), "i8"), ((9, 4), "i4"), ((4,), "i8")]
    arrays = [np.empty(shape, kind) for shape, kind in shapes]
    for at in range(4):
        wrong = list(arrays)
        wrong[at] = np.empty((3, 5), "i2")
        with pytest.raises(ValueError):
            copier.begin(*wrong, 9)
    rows = rows_of(c_copier, 1)
    rows.add(record, "a", "p")
    assert rows.fills == 1
    with pytest.raises(ValueError, match="no room"):
        rows.add(record, "a", "p")


@needs_c
def test_a_run_that_shrinks_while_it_is_copied_is_refused() -> None:
    class Shrinking:
        def __float__(self) -> float:
            run.clear()
            return 1.0

    run: list[Any] = [Shrinking(), 0.5, 3]
    rows = rows_of(c_copier)
    with pytest.raises(ValueError, match="token_runs"):
        rows.add(RequestRecord(1, 2.0, 3, 4, token_runs=[run]), "a", "p")
    assert rows.rows == 0


@needs_c
def test_code_of_an_array_that_is_given_back_cannot_begin_anew() -> None:
    class Array(np.ndarray):
        def __del__(self) -> None:
            try:
                copier.begin(*arrays(np.ndarray), 9)
            except RuntimeError as error:
                refused.append(str(error))

    def arrays(kind: type[np.ndarray]) -> list[Any]:
        like = rows_of(PythonCopier, 4)
        return [
            kind(like._times_us.shape, np.int64),
            np.empty_like(like._counts),
            np.empty_like(like._codes),
            np.empty_like(like._runs_each),
        ]

    refused: list[str] = []
    copier = c_copier(no_more)
    copier.begin(*arrays(Array), 9)
    copier.take()
    copier.begin(*arrays(Array), 9)
    copier.begin(*arrays(np.ndarray), 9)
    assert refused == ["a copy is under way"] * 2
    copier.add(RequestRecord(1, 2.0, 3, 4), "a", "p")
    assert copier.rows == 1


@needs_c
def test_any_number_of_runs_may_be_the_most() -> None:
    copier = rows_of(c_copier, 4, 2**62)
    copier.add(RequestRecord(1, 2.0, 3, 4), "a", "p")
    assert copier.rows == 1


def counted(kept: list[Any]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(each) for each in kept]


@needs_c
def test_references_are_given_back() -> None:
    rows = rows_of(c_copier, 200)
    session = "".join(["a session ", "of its own"])
    record = RequestRecord(10**6, 2.5e5, 3, 4, session=session, token_runs=[(0.1, 0.2, 3)])
    kept = [session, record, record.token_runs, record.id]
    before = counted(kept)
    for _ in range(5):
        for _ in range(20):
            rows.add(record, "a", "p")
        record.input_tokens = "x"  # type: ignore[assignment]
        with pytest.raises(ValueError):
            rows.add(record, "a", "p")
        record.input_tokens = 3
    assert counted(kept) > before  # the session is kept, to be known again
    rows.take()
    assert counted(kept) == before
    rows.begin(10, 10)
    rows.add(record, "a", "p")
    del rows
    assert counted(kept) == before
