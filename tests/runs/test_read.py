"""`joma.read`: what was measured as a tidy table."""

import builtins
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import joma
from joma.errors import JomaError
from joma.runs import Run

COLUMNS = ["step", "time", "metric", "module", "kind", "layer", "head", "member", "value", "bound"]


def made(folder: Path) -> Run:
    run = Run.create("monitor", {}, out=folder)
    run.metrics.append(1, "loss", [2.0, 3.0], time=5.0)
    run.metrics.append(1, "entropy", 1.5, module="a.b", kind="self", layer=0, head=1, bound=0.1)
    run.metrics.flush()
    run.metrics.append(2, "loss", [float("nan"), float("inf")])
    run.metrics.flush()
    return run


def test_missing_is_null_and_never_a_number(tmp_path: Path):
    table = joma.read(made(tmp_path / "run"))
    assert table.column_names == COLUMNS
    rows = table.to_pylist()
    first = dict.fromkeys(("module", "kind", "layer", "head", "bound"))
    assert rows[0] == first | {
        "step": 1, "time": 5.0, "metric": "loss", "member": 0, "value": 2.0
    }  # fmt: skip
    assert {name: rows[2][name] for name in ("module", "kind", "layer", "head", "bound")} == {
        "module": "a.b", "kind": "self", "layer": 0, "head": 1, "bound": 0.1
    }  # fmt: skip
    assert np.isnan(rows[3]["value"])
    assert rows[4]["value"] == np.inf


def test_paths_lists_and_chosen_metrics(tmp_path: Path):
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    assert joma.read(str(one.path), metric="loss").num_rows == 4
    table = joma.read([one, two.path], metric=["entropy"])
    assert table.column_names == ["run", *COLUMNS]
    assert table.column("run").to_pylist() == [str(one.path), str(two.path)]
    assert joma.read([one]).column_names == ["run", *COLUMNS]
    empty = Run.create("monitor", {}, out=tmp_path / "empty")
    assert joma.read(empty).num_rows == 0
    assert joma.read([empty, one], metric="loss").num_rows == 4


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_tables_of_other_libraries(tmp_path: Path, kind: Any):
    library = pytest.importorskip(kind)
    table = joma.read(made(tmp_path / "run"), as_=kind)
    assert isinstance(table, library.DataFrame)
    assert list(table.columns) == COLUMNS
    if kind == "pandas":
        assert str(table["layer"].dtype) == "Int32"
        assert table["layer"].isna().tolist() == [True, True, False, True, True]
        assert table["module"].isna().sum() == 4
        assert len(table[table.layer == 0]) == 1
    else:
        assert table["layer"].to_list() == [None, None, 0, None, None]


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name)
    )
    with pytest.raises(JomaError, match=r'needs pandas, which is not installed; .* as "arrow"'):
        joma.read(made(tmp_path / "run"), as_="pandas")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("nowhere", {}, "is not a run folder"),
        ([], {}, "got an empty list"),
        ("run", {"as_": "csv"}, "as_ must be"),
        ("run", {"metric": "los"}, "got 'los'; there is entropy, loss"),
        ("run", {"metric": ["nothing"]}, "there is entropy, loss"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch, given: Any, options: Any, said: str
):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run")
    with pytest.raises(JomaError, match=said):
        joma.read(given, **options)


def test_nothing_but_arrow_is_imported(tmp_path: Path, monkeypatch):
    real = builtins.__import__

    def guarded(name: str, *rest: Any, **options: Any) -> Any:
        assert name.partition(".")[0] not in ("pandas", "polars", "torch")
        return real(name, *rest, **options)

    run = made(tmp_path / "run")
    monkeypatch.setattr(builtins, "__import__", guarded)
    joma.read(run)
