"""Two processes train what one trains, with DDP and with FSDP2, also when they go on."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from joma.models import Series, load
from joma.runs import Run
from joma.train.language import FailedElsewhereError, Processes, series_folder, train
from tests.train._language import STEPS, Stop, begin, logged, make, stop_after
from tests.train._processes import main, two_processes

WATCHING = {
    "off": False,
    "every": 4,
    "budget": 0.0,
    "metrics": ["attention_entropy", "stable_rank"],
}
SHARDINGS = ("none", "fsdp2")


def config(text: Path, sharding: str = "none"):
    return make(text, monitor=WATCHING, training={"accumulate": 2, "sharding": sharding})


def _together(place: Path, processes: Processes) -> None:
    """What each of the two processes does."""
    for sharding in SHARDINGS:
        settings = config(place / "text", sharding)
        run = processes.first(
            lambda s=settings, name=sharding: Run.resume("train", s.sections(), out=place / name)
        )
        assert (run is None) == (processes.rank > 0)
        with contextlib.suppress(Stop):
            train(settings, run, processes=processes, progress=stop_after(6))
        train(settings, run, processes=processes)  # goes on from the checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    with two_processes("tests.train.test_language_processes", folder):
        begin(config(folder / "text"), folder / "alone")
    return folder


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_two_train_as_one(place: Path, sharding: str):
    for name in ("loss", "validation_loss"):
        steps, alone = logged(place / "alone", name)
        found, values = logged(place / sharding, name)
        assert found == steps
        np.testing.assert_allclose(values, alone, rtol=1e-4)
    one, two = (
        load_file(series_folder(place / run, STEPS) / "model.safetensors")
        for run in ("alone", sharding)
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_monitor_of_two_sees_what_that_of_one_does(place: Path, sharding: str):
    for name in ("attention_entropy", "stable_rank"):
        rows, own = (Run.open(place / run).metrics.read(name) for run in ("alone", sharding))
        last = [table["value"][table["step"] == STEPS] for table in (rows, own)]
        assert len(last[0]) > 0
        np.testing.assert_allclose(last[1], last[0], rtol=1e-2)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_their_series_is_read_as_any_other(place: Path, sharding: str):
    series = Series.of(place / sharding / "series")
    assert series.steps == (0, 4, 8, STEPS)
    assert type(load(series.checkpoints[-1].source).model).__name__ == "GPTNeoXForCausalLM"


def test_one_goes_on_with_what_two_began(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(place / "cache"))
    settings = config(place / "text")
    run = Run.resume("train", settings.sections(), out=place / "none")
    assert train(settings, run).begun_at == STEPS


def test_a_batch_that_cannot_be_dealt(place: Path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(place / "cache"))
    with pytest.raises(ValueError, match=r"data\.batch must be a multiple of 6"):
        train(config(place / "text"), None, processes=Processes(rank=1, size=3))


def test_who_did_not_fail_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Processes, "most", lambda self, *numbers: [1])
    with pytest.raises(FailedElsewhereError):
        Processes(rank=1, size=2).first(lambda: None)


if __name__ == "__main__":
    main(_together)
