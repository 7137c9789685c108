"""Two processes train what one trains, with DDP and with FSDP2, also when they resume."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from joma.errors import JomaError
from joma.models import Series, load
from joma.runs import Run
from joma.train.language import Config, FailedElsewhereError, Processes, series_folder, train
from tests.train._language import STEPS, Stop, begin, logged, make, stop_after
from tests.train._processes import main, two_processes

WATCHED = ("attention_entropy", "stable_rank")
EIGHT = {"bits": 8, "projector_bits": 8}
KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "adamw, ddp": ("none", None),
    "adamw, fsdp2": ("fsdp2", None),
    "galore, ddp": ("none", {"per_layer": True}),
    "galore, fsdp2": ("fsdp2", {"per_layer": True}),
    "eight bits, fsdp2": ("fsdp2", EIGHT),
}
"""How parameters are spread, and settings of GaLore; None for AdamW."""


def config(text: Path, sharding: str = "none", settings: dict[str, Any] | None = None) -> Config:
    galore = {"name": "galore-adamw", "rank": 6, "gap": 4, "eps": 1e-4, "verbose": False}
    metrics = WATCHED if settings is None else ("projection_energy",)
    return make(
        text,
        optimizer={} if settings is None else galore | settings,
        training={"sharding": sharding, "accumulate": 2 if settings is None else 1},
        monitor={"off": False, "every": 4, "budget": 0.0, "metrics": list(metrics)},
    )


def _together(place: Path, processes: Processes) -> None:
    """What each of the two processes does."""
    for name, (sharding, settings) in KINDS.items():
        made = config(place / "text", sharding, settings)
        run = processes.first(
            lambda made=made, name=name: Run.resume("train", made.sections(), out=place / name)
        )
        assert (run is None) == (processes.rank > 0)
        with contextlib.suppress(Stop):
            train(made, run, processes=processes, progress=stop_after(6))
        train(made, run, processes=processes)  # resumes from the checkpoint
    made = make(place / "text", optimizer={"name": "adamw-8bit"}, training={"sharding": "fsdp2"})
    run = processes.first(lambda: Run.resume("train", made.sections(), out=place / "refused"))
    with pytest.raises(JomaError, match="AdamW8bit takes whole parameters"):
        train(made, run, processes=processes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    with two_processes("tests.train.test_language_processes", folder):
        for name, settings in (("adamw", None), ("galore", {}), ("eight bits", EIGHT)):
            begin(config(folder / "text", settings=settings), folder / name)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_two_train_as_one(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, eight = name.split(",")[0], "eight" in name
    close = 1e-2 if eight else 1e-4  # each process rounds its own rows to eight bits
    for series in ("loss", "validation_loss"):
        steps, expected = logged(place / alone, series)
        found, values = logged(place / name, series)
        assert found == steps
        np.testing.assert_allclose(values, expected, rtol=close)
    if not eight:
        one, two = (
            load_file(series_folder(place / run, STEPS) / "model.safetensors")
            for run in (alone, name)
        )
        assert one.keys() == two.keys()
        for weight, value in one.items():
            np.testing.assert_allclose(two[weight], value, rtol=1e-2, atol=2e-4)
    for metric in WATCHED if alone == "adamw" else ():
        rows, own = (Run.open(place / run).metrics.read(metric) for run in (alone, name))
        last = [table["value"][table["step"] == STEPS] for table in (rows, own)]
        assert len(last[0]) > 0
        np.testing.assert_allclose(last[1], last[0], rtol=1e-2)
    if alone != "adamw":
        at, shares = logged(place / name, "projection_energy")
        assert set(at) == {1, 2, 4, 8, STEPS}
        assert 0 < min(shares) <= max(shares) <= 1.001  # bases in eight bits: nearly orthonormal
    series = Series.of(place / name / "series")
    assert series.steps == (0, 4, 8, STEPS)
    assert type(load(series.checkpoints[-1].source).model).__name__ == "GPTNeoXForCausalLM"
    monkeypatch.setenv("JOMA_CACHE", str(place / "cache"))
    made = config(place / "text", *KINDS[name])
    run = Run.resume("train", made.sections(), out=place / name)
    assert train(made, run).begun_at == STEPS  # one process resumes what two began


def test_a_batch_that_cannot_be_split(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(place / "cache"))
    with pytest.raises(ValueError, match=r"data\.batch must be a multiple of 6"):
        train(config(place / "text"), None, processes=Processes(rank=1, size=3))


def test_who_did_not_fail_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "most", lambda self, *numbers: [1])
    with pytest.raises(FailedElsewhereError):
        Processes(rank=1, size=2).first(lambda: None)


if __name__ == "__main__":
    main(_together)
