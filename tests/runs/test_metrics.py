"""The metrics log: what is appended is read back, once, in order."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.runs import Metrics, Run
from tests.runs._failing import visible
from tests.runs._log import COLUMNS, rows


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics")


def test_a_run_has_one_log(tmp_path: Path):
    run = Run.create("table1", {}, out=tmp_path)
    run.metrics.append(3, "loss", 0.5)
    run.metrics.flush()
    assert visible(tmp_path / "metrics") == ["part-000000.parquet"]
    assert Run.open(tmp_path).metrics.read()["value"] == [0.5]
    assert Run.open(tmp_path) == run


def test_columns_and_what_stands_for_none(metrics: Metrics):
    before = time.time()
    metrics.append(
        5,
        "entropy",
        [1.0, np.nan, -np.inf],
        module="block.0",
        kind="self",
        layer=0,
        head=3,
        bound=0.1,
    )
    five: Any = np.int64(5)
    metrics.append(five, "loss", np.float32(2), module="", time=12.5)
    metrics.flush()
    log = metrics.read()
    assert {name: column.dtype for name, column in log.items()} == COLUMNS
    assert rows(metrics) == [
        (5, 0, "entropy", "block.0", "self", 0, 3, 1.0, 0.1),
        (5, 1, "entropy", "block.0", "self", 0, 3, None, 0.1),
        (5, 2, "entropy", "block.0", "self", 0, 3, -np.inf, 0.1),
        (5, 0, "loss", "", "", -1, -1, 2.0, None),
    ]
    assert before <= log["time"][0] == log["time"][2] <= time.time()
    assert log["time"][3] == 12.5


def test_any_reader_of_parquet_finds_true_nulls(tmp_path: Path, metrics: Metrics):
    metrics.append(1, "loss", [1.0, np.nan], bound=np.nan)
    metrics.append(1, "loss", 2.0, layer=4)
    metrics.flush()
    table = pyarrow.parquet.read_table(tmp_path / "metrics" / "part-000000.parquet")
    assert table.column_names == list(COLUMNS)
    assert table.column("layer").to_pylist() == [None, None, 4]
    assert [table.column(name).null_count for name in COLUMNS] == [0, 0, 0, 0, 3, 3, 2, 3, 0, 1]


def test_nothing_is_an_empty_log(tmp_path: Path, metrics: Metrics):
    metrics.flush()
    metrics.compact()
    metrics.rewind(-1)
    assert {name: (len(c), c.dtype) for name, c in metrics.read().items()} == {
        name: (0, dtype) for name, dtype in COLUMNS.items()
    }
    assert not (tmp_path / "metrics").exists()


def test_one_name_alone(metrics: Metrics):
    for step in range(3):
        metrics.append(step, "loss", step)
        metrics.flush()
        metrics.append(step, f"of {step}", 10)
    assert metrics.read("loss")["value"].tolist() == [0, 1, 2]
    assert metrics.read("of 1")["step"].tolist() == [1]
    assert metrics.read("of 2")["step"].tolist() == []  # not flushed


def test_what_was_appended_is_the_callers_to_change(metrics: Metrics):
    values, steps, bound = np.ones((2, 2)), np.array([1, 2]), np.ones(2)
    metrics.append(0, "loss", values[0], bound=bound)
    metrics.append_many(steps, "loss", values, bound=bound)
    values[:], steps[:], bound[:] = 9, 9, 9
    metrics.flush()
    log = metrics.read()
    assert log["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert set(log["value"]) == set(log["bound"]) == {1.0}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([None, 0.5, "member", "value"]))
def test_many_steps_at_once_are_those_steps_one_by_one(tmp_path_factory, steps, members, bound):
    rng = np.random.default_rng(steps)
    values = rng.normal(size=(steps, members))
    times = rng.normal(size=steps)
    bounds = {"member": values[0], "value": values}.get(bound, bound)
    one, many = (Metrics(tmp_path_factory.mktemp("log")) for _ in range(2))
    for step in range(steps):
        each = bounds[step] if bound == "value" else bounds
        one.append(step, "loss", values[step], layer=2, bound=each, time=times[step])
    many.append_many(np.arange(steps), "loss", values, layer=2, bound=bounds, time=times)
    for metrics in (one, many):
        metrics.flush()
    for name, column in one.read().items():
        np.testing.assert_array_equal(column, many.read()[name])


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
OPERATIONS = st.one_of(
    st.tuples(
        st.just("append"),
        st.integers(0, 6),
        st.sampled_from(["loss", "entropy", "Δ"]),
        st.lists(NUMBERS, min_size=1, max_size=3),
        st.sampled_from([None, 0, 3]),
        st.one_of(st.none(), NUMBERS),
    ),
    st.tuples(st.just("rewind"), st.integers(-1, 6)),
    st.tuples(st.sampled_from(["flush", "flush", "compact", "reopen"])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=12))
def test_any_history_reads_as_a_plain_list_would(tmp_path_factory, history):
    folder = tmp_path_factory.mktemp("log")
    metrics = Metrics(folder)
    written: list[tuple[Any, ...]] = []
    unwritten: list[tuple[Any, ...]] = []
    for operation, *given_ in history:
        if operation == "append":
            step, name, values, layer, bound = given_
            metrics.append(step, name, values, layer=layer, bound=bound)
            place = -1 if layer is None else layer
            unwritten += [
                (step, m, name, "", "", place, -1, v, bound) for m, v in enumerate(values)
            ]
            continue
        if operation == "reopen":  # as after a kill
            metrics, unwritten = Metrics(folder), []
            continue
        getattr(metrics, operation)(*given_)
        written, unwritten = written + unwritten, []
        if operation == "rewind":
            written = [row for row in written if row[0] <= given_[0]]
        if operation == "compact":
            assert len(visible(folder)) == (1 if written else 0)
    expected = sorted(written, key=lambda row: row[0])
    assert rows(metrics) == [tuple(None if x != x else x for x in row) for row in expected]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"step": 1.5}, "steps must be whole"),
        ({"step": -1}, "steps must be whole"),
        ({"step": True}, "steps must be whole"),
        ({"step": 2**64}, "steps must be whole"),
        ({"step": None}, "steps must be whole"),
        ({"name": ""}, "name must be a word"),
        ({"name": 3}, "name must be a word"),
        ({"name": "\ud800"}, "name must be a word"),
        ({"values": []}, "values must be one or more real numbers"),
        ({"values": "a"}, "values must be one or more real numbers"),
        ({"values": [1j]}, "values must be one or more real numbers"),
        ({"values": [[1], [1, 2]]}, "values must be one or more real numbers"),
        ({"values": [[1.0]]}, "values must be a number or one for each member"),
        ({"module": 3}, "module must be"),
        ({"module": "\udfff"}, "module must be"),
        ({"kind": None}, "kind must be"),
        ({"kind": "\n"}, "kind must be"),
        ({"layer": -1}, "layer must be"),
        ({"layer": 1.0}, "layer must be"),
        ({"head": 2**31}, "head must be"),
        ({"bound": [1, 2, 3]}, r"bound must be one number or fit .* \(1, 2\), got shape \(3,\)"),
        ({"bound": "x"}, "bound must be"),
        ({"time": "now"}, "time must be"),
        ({"time": [1, 2]}, "time must be"),
    ],
)
def test_bad_rows_are_refused_and_none_is_kept(metrics: Metrics, bad, message: str):
    good: dict[str, Any] = {"step": 1, "name": "loss", "values": [1.0, 2.0]}
    with pytest.raises(ValueError, match=message):
        metrics.append(**{**good, **bad})
    metrics.append(**good)
    metrics.flush()
    assert len(rows(metrics)) == 2


def test_bad_steps_are_refused(metrics: Metrics):
    with pytest.raises(ValueError, match=r"axes \(steps, members\), got shape \(2,\)"):
        metrics.append_many([1, 2], "loss", [1.0, 2.0])
    with pytest.raises(ValueError, match="a row for each of 3 steps, got 2"):
        metrics.append_many([1, 2, 3], "loss", [[1.0], [2.0]])
    for steps in ([], [[1]], [0.5], [-1], np.empty(0, dtype=int), ["a"]):
        with pytest.raises(ValueError, match="steps must be whole"):
            metrics.append_many(steps, "loss", [[1.0]])
    for step in (-2, 0.5, None):
        with pytest.raises(ValueError, match="step must be"):
            metrics.rewind(step)  # type: ignore[arg-type]


def test_a_long_log_is_small(tmp_path: Path):
    metrics = Metrics(tmp_path)
    losses = np.random.default_rng(0).random((10_000, 10), dtype=np.float32)
    metrics.append_many(np.arange(10_000), "loss", losses, time=1.7e9 + np.arange(10_000))
    metrics.flush()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 100_000 * 4.5  # what single precision cannot do without, and little more
