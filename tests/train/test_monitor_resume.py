"""A training that is stopped and resumed has the same rows as one that was not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import joma
from joma.runs import Run
from tests.train._language import Stop, begin, make, stop_after, write_text
from tests.train._watched import batches, encoder, loss_of

COLUMNS = ("step", "name", "module", "kind", "layer", "head", "value", "bound")


def rows(folder: Path) -> list[tuple[Any, ...]]:
    columns = Run.open(folder).metrics.read()
    found = list(zip(*(columns[name].tolist() for name in COLUMNS), strict=True))
    return sorted(found, key=lambda row: tuple(map(str, row)))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text")


@pytest.mark.parametrize("stops", [(1, 4, 9), pytest.param((2, 10), marks=pytest.mark.slow)])
def test_joma_train_measures_the_same_however_often_it_is_stopped(
    text: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    watching = {"off": False, "every": 1, "budget": 0.0, "theorem1": 1, "windows": 2}
    config = make(text, training={"steps": 22}, monitor=watching, validation={"every": 0})
    begin(config, tmp_path / "straight")
    for step in stops:
        with pytest.raises(Stop):
            begin(config, tmp_path / "run", progress=stop_after(step))
    begin(config, tmp_path / "run")
    expected = rows(tmp_path / "straight")
    names = {row[1] for row in expected}
    assert {"update_stable_rank", "update_relative", "theorem1_residual", "mlp_dead"} <= names
    assert list(map(str, rows(tmp_path / "run"))) == list(map(str, expected))


def train(folder: Path, stop: int | None, saved: bool = True) -> joma.Monitor:
    """Six steps, with a new monitor after one of them."""
    model = encoder(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"every": 1, "inputs": next(batches(9)), "budget": None}
    monitor = joma.Monitor(model, run=folder, **options)
    feed = batches()
    for step in range(1, 13):
        tokens = next(feed)
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        monitor.step()
        if step == stop:
            state = {name: tensor.clone() for name, tensor in monitor.state_dict().items()}
            monitor.close()
            monitor = joma.Monitor(model, run=folder, step=step, **options)
            if saved:
                monitor.load_state_dict(state)
        optimizer.zero_grad()
    monitor.close()
    return monitor


def test_the_state_of_a_monitor_can_be_saved_by_any_loop(tmp_path: Path) -> None:
    train(tmp_path / "straight", None)
    for stop in (1, 7, 10):
        monitor = train(tmp_path / str(stop), stop)
        assert str(rows(tmp_path / str(stop))) == str(rows(tmp_path / "straight"))
        assert "resumed" not in monitor.summary()


def test_without_its_state_the_summary_says_what_is_missing(tmp_path: Path) -> None:
    monitor = train(tmp_path / "run", 7, saved=False)
    assert "update_stable_rank is counted from step 10" in monitor.summary()
    assert not [row for row in rows(tmp_path / "run") if row[1] == "update_stable_rank"]


def test_a_state_that_does_not_fit_is_left_alone(tmp_path: Path) -> None:
    model = encoder()
    monitor = joma.Monitor(model, run=tmp_path / "run", step=3, inputs=next(batches()))
    odd: dict[str, Tensor] = {"due": torch.tensor([5, 6]), "copy.nothing": torch.ones(2)}
    for state in (
        {},
        odd,
        {"rank.x": torch.ones(1)},
        {"due": torch.ones(3), "copy.embedding": "no"},
    ):
        monitor.load_state_dict(state)  # type: ignore[arg-type]
    monitor.step(1.0)
    monitor.measure()
    monitor.close()


@pytest.mark.parametrize("given", ["path", "text", "run"])
def test_a_second_start_makes_the_next_folder_and_step_resumes_it(
    tmp_path: Path, given: str
) -> None:
    folder = tmp_path / "mine"
    model = encoder()

    def watch(**options: Any) -> joma.Monitor:
        run = {"path": folder, "text": str(folder), "run": folder}[given]
        return joma.Monitor(model, run=run, metrics=["stable_rank"], **options)

    for losses in ([5.0, 4.0, 3.0], [7.0, 6.0, 5.0]):
        with watch() as monitor:
            for loss in losses:
                monitor.step(loss)
    assert monitor.run is not None
    assert monitor.run.path == tmp_path / "mine-2"
    assert f"numbers in {tmp_path / 'mine-2'} ({folder} holds an earlier run)" in monitor.summary()
    # A run that is given is resumed itself, a path the newest of its name.
    resumed = joma.Monitor(model, run=Run.open(folder), step=2) if given == "run" else watch(step=2)
    with resumed:
        resumed.step(1.0)
    first, second = (
        Run.open(path).metrics.read("loss")["value"].tolist()
        for path in (folder, folder.with_name("mine-2"))
    )
    if given == "run":
        assert (first, second) == ([5.0, 4.0, 1.0], [7.0, 6.0, 5.0])
    else:
        assert (first, second) == ([5.0, 4.0, 3.0], [7.0, 6.0, 1.0])
