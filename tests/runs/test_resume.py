"""A run that is gone on with: what stays, what is refused, and what is written anew."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.runs import Run, compare_tables, differing, list_runs
from joma.runs import _run as run_module
from tests.runs._failing import contents, every_kill, visible

CONFIG = {"seed": 1, "rates": (1e-4, 1e-5), "model": {"layers": 3, "bias": True}}


def filled(folder: Path, config: dict[str, Any] = CONFIG) -> Run:
    """A run that left something of every kind, and was killed while it wrote more."""
    run = Run.create("table1", config, out=folder)
    run.write_table("curve", {"a": [1]})
    run.write_figure("curve.png", b"png")
    run.write_json("outcome", {"status": "interrupted"})
    run.metrics.append(0, "loss", [1.0, 2.0])
    run.metrics.flush()
    run.checkpoints.save(0, {"a": np.ones(2)}, {})
    for name in ("checkpoints/.step-000000001.safetensors", "metrics/.part-000001.parquet"):
        (folder / f"{name}.0123456789ab.tmp").write_bytes(b"half")
    return run


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


LEFT = [
    "checkpoints/step-000000000.safetensors",
    "config.json",
    "environment.json",
    "figures/curve.png",
    "manifest.json",
    "metrics/part-000000.parquet",
    "outcome.json",
    "tables/curve.parquet",
]


def test_everything_stays(tmp_path: Path):
    first = filled(tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    run = Run.resume("table1", {**CONFIG, "rates": np.array([1e-4, 1e-5])}, out=str(tmp_path))
    assert files(tmp_path) == LEFT  # and not what a kill left half
    assert (tmp_path / "config.json").read_bytes() == config
    assert run.config == first.config
    assert Run.open(tmp_path) == run
    assert run.metrics.read()["value"].tolist() == [1, 2]
    found = run.checkpoints.latest().checkpoint
    assert found is not None
    assert found.step == 0


def test_the_environments_it_went_on_in_are_added(tmp_path: Path, monkeypatch):
    first = filled(tmp_path)
    monkeypatch.setattr(
        run_module, "environment", lambda device: {**first.environment, "device": device}
    )
    Run.resume("table1", CONFIG, out=tmp_path)
    run = Run.resume("table1", CONFIG, out=tmp_path, device="cuda")
    date = first.environment["date"]
    assert run.environment["resumed"] == [{"date": date}, {"date": date, "device": "cuda"}]
    assert {**first.environment, "resumed": run.environment["resumed"]} == run.environment
    assert Run.open(tmp_path).environment == run.environment
    (summary,) = list_runs(tmp_path)
    assert summary.date == date
    assert list(differing(first.environment, run.environment)) == ["resumed"]
    assert [table.equal for table in compare_tables(first, run)] == [True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 0}, "seed 1, but seed 0 was asked for;"),
        ({"model": {"layers": 3}}, "model.bias True, but no model.bias was asked for;"),
        ({"new": "x"}, "no new, but new x was asked for;"),
        (
            {"seed": 0, "rates": [1e-4]},
            "seed 1 and rates [0.0001, 1e-05], but seed 0 and rates [0.0001] were asked for;",
        ),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], said: str):
    filled(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"(was|were) asked for") as refused:
        Run.resume("table1", {**CONFIG, **change}, out=tmp_path)
    sentence = str(refused.value)
    assert sentence.startswith(f"out {tmp_path} holds a table1 run with {said} ")
    assert sentence.endswith(
        "out must be a new folder, an empty one or that of a table1 run with the same settings"
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_setting_may_change(tmp_path: Path):
    config = {"seed": 1, "training": {"steps": 8, "rate": 0.1}}
    run = Run.create("fit", config, out=tmp_path)
    run.write_table("kept", {"x": [1.0]})
    longer = {"seed": 1, "training": {"steps": 12, "rate": 0.1}}
    refused: list[tuple[dict[str, Any], str, str]] = [
        (longer, "seed", "training.steps 8, but training.steps 12 was asked"),
        (longer, "training.rate", "training.steps 8, but training.steps 12 was asked"),
        ({**longer, "seed": 2}, "training.steps", "seed 1, but seed 2 was asked"),
        ({**config, "training": {"steps": "x", "rate": 0.1}}, "training.steps", "x was asked"),
        ({**config, "training": {"rate": 0.1}}, "training.steps", "no training.steps was asked"),
    ]
    for settings_asked, changing, said in refused:
        with pytest.raises(ValueError, match=re.escape(said)):
            Run.resume("fit", settings_asked, out=tmp_path, changing=(changing,))
    assert Run.open(tmp_path).config == run.config
    for other in (longer, config):
        before = Run.open(tmp_path).config
        changed = Run.resume("fit", other, out=tmp_path, changing=("training.steps",))
        assert changed.config == {"name": "fit", **other}
        assert Run.open(tmp_path).config == before
        changed.write_config()
        assert Run.open(tmp_path).config == changed.config
        assert changed.tables == ["kept"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=3).filter(lambda key: key != "name"), JSON, max_size=3))
def test_any_settings_are_the_same_as_themselves(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "environment", lambda device: {"joma": "0", "date": "today"})
        first = Run.create("any", config, out=folder)
        assert Run.resume("any", config, out=folder).config == first.config


def test_the_folder_of_another_run_and_other_folders_are_refused(tmp_path: Path):
    filled(tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds a table1 run.* earlier fig2 run"):
        Run.resume("fig2", CONFIG, out=tmp_path / "run")
    with pytest.raises(ValueError, match="other things"):
        Run.resume("fig2", CONFIG, out=tmp_path)
    with pytest.raises(ValueError, match="name must be letters"):
        Run.resume("a/b", CONFIG, out=tmp_path / "run")
    with pytest.raises(ValueError, match="config says name 'fig2'"):
        Run.resume("table1", {"name": "fig2"}, out=tmp_path / "run")


@pytest.mark.parametrize("content", ["{", "[]", "3", "null", "{}", '{"name": null}', "[" * 200_000])
def test_a_damaged_configuration_is_refused_and_nothing_is_lost(tmp_path: Path, content: str):
    filled(tmp_path)
    (tmp_path / "config.json").write_text(content)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is damaged: it does not match manifest"):
        Run.resume("table1", CONFIG, out=tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json (is not valid|must hold)"):
        Run.resume("table1", CONFIG, out=tmp_path)
    assert set(files(tmp_path)) >= set(LEFT) - {"manifest.json"}


def test_where_there_is_no_run_yet_it_begins(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    killed = Run.create("table1", CONFIG, out=tmp_path / "killed")
    (killed.path / "config.json").unlink()
    for out in (None, None, tmp_path / "new" / "deep", tmp_path / "empty", killed.path):
        run = Run.resume("table1", CONFIG, out=out)
        assert Run.open(run.path) == run
        assert "resumed" not in run.environment
        assert files(run.path) == ["config.json", "environment.json", "manifest.json"]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_kill_while_a_run_is_made_leaves_a_folder_to_use(tmp_path: Path, monkeypatch):
    folder = tmp_path / "0"

    def create() -> None:
        Run.create("table1", CONFIG, out=folder)

    for moment in every_kill(monkeypatch, create):
        Run.resume("table1", CONFIG, out=folder)
        assert visible(folder) == ["config.json", "environment.json", "manifest.json"]
        assert Run.open(folder).verified
        folder = tmp_path / f"{moment + 1}"


def test_a_resumed_run_is_listed_without_its_inner_folders(tmp_path: Path):
    filled(tmp_path / "run")
    Run.create("fig2", {}, out=tmp_path / "run" / "metrics" / "inner")
    Run.resume("table1", CONFIG, out=tmp_path / "run")
    assert [summary.name for summary in list_runs(tmp_path)] == ["table1"]


def test_a_folder_killed_at_its_very_first_write_can_be_used(tmp_path):
    left = tmp_path / "run" / ".environment.json.0123456789ab.tmp"
    left.parent.mkdir()
    left.write_text("{")
    run = Run.resume("fit", {"seed": 1}, out=left.parent)
    assert run.config == {"name": "fit", "seed": 1}
    assert not left.exists()
