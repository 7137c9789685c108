"""Trainings to compare with, and ones that were stopped."""

import importlib
import shutil
from pathlib import Path

import pytest

from joma.runs import Run
from tests.train._child import STEPS, train
from tests.train._sound import Stop, stop_after

module = importlib.import_module("joma.train.loop")


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, checkpoints come at the same steps."""
    monkeypatch.setattr(module, "CHUNK_SECONDS", float("inf"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A training that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    ended = train(folder)
    assert (ended.begun_at, ended.step, ended.refused) == (0, STEPS, ())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has just begun."""
    return Run.create("small", {}, out=tmp_path / "run").path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A training that stopped some steps after its checkpoints at 12 and 13."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stop):
        train(folder, measured=stop_after(13))
    assert Run.open(folder).checkpoints.steps == [13, 12]
    return folder


@pytest.fixture
def begun(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that."""
    return shutil.copytree(stopped, tmp_path / "begun")
