"""Two processes train by GaLore what one trains, with DDP and with FSDP2, also when they resume."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from joma.errors import JomaError
from joma.runs import Run
from joma.train.language import Config, Processes, series_folder, train
from tests.train._language import STEPS, Stop, begin, logged, make, stop_after
from tests.train._processes import main, two_processes

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("none", {}),
    "ddp, per layer": ("none", {"per_layer": True}),
    "fsdp2, per layer": ("fsdp2", {"per_layer": True}),
    "fsdp2, eight bits": ("fsdp2", {"bits": 8, "projector_bits": 8}),
}
pytestmark = pytest.mark.slow


def config(text: Path, sharding: str = "none", **settings: Any) -> Config:
    optimizer = {"name": "galore-adamw", "rank": 6, "gap": 4, "eps": 1e-4, "verbose": False}
    return make(
        text,
        optimizer=optimizer | settings,
        training={"sharding": sharding},
        monitor={"off": False, "every": 4, "budget": 0.0, "metrics": ["projection_energy"]},
    )


def _together(place: Path, processes: Processes) -> None:
    """What each of the two processes does."""
    for name, (sharding, settings) in KINDS.items():
        made = config(place / "text", sharding, **settings)
        run = processes.first(
            lambda made=made, name=name: Run.resume("train", made.sections(), out=place / name)
        )
        with contextlib.suppress(Stop):
            train(made, run, processes=processes, progress=stop_after(6))
        train(made, run, processes=processes)
    made = make(place / "text", optimizer={"name": "adamw-8bit"}, training={"sharding": "fsdp2"})
    run = processes.first(lambda: Run.resume("train", made.sections(), out=place / "refused"))
    with pytest.raises(JomaError, match="AdamW8bit takes whole parameters"):
        train(made, run, processes=processes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("galore")
    with two_processes("tests.train.test_language_galore_processes", folder, 450):
        begin(config(folder / "text"), folder / "alone")
        begin(config(folder / "text", bits=8, projector_bits=8), folder / "alone, eight bits")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_two_train_as_one(place: Path, name: str) -> None:
    reference = "alone, eight bits" if "eight" in name else "alone"
    close = 1e-2 if "eight" in name else 1e-4  # each process rounds its own rows to eight bits
    for series in ("loss", "validation_loss"):
        steps, alone = logged(place / reference, series)
        found, values = logged(place / name, series)
        assert found == steps
        np.testing.assert_allclose(values, alone, rtol=close)
    at, shares = logged(place / name, "projection_energy")
    assert set(at) == {1, 2, 4, 8, STEPS}
    assert 0 < min(shares) <= max(shares) <= 1.001  # bases in eight bits are nearly orthonormal
    if "eight" not in name:
        one, two = (
            load_file(series_folder(place / run, STEPS) / "model.safetensors")
            for run in ("alone", name)
        )
        for weight, value in one.items():
            np.testing.assert_allclose(two[weight], value, rtol=1e-2, atol=2e-4)


def test_one_resumes_what_two_began(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(place / "cache"))
    for name, (sharding, settings) in KINDS.items():
        made = config(place / "text", sharding, **settings)
        run = Run.resume("train", made.sections(), out=place / name)
        assert train(made, run).begun_at == STEPS


if __name__ == "__main__":
    main(_together)
