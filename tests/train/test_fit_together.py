"""`fit_together`: each training does what it does alone, and none is lost when one ends."""

import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from joma.models import LanguageConfig, LanguageModel
from joma.optim import StackedAdam
from joma.runs import Run
from joma.train import Ensemble, Training, fit, fit_together
from joma.train.loop import _different
from tests.runs._log import rows
from tests.train._small import ensemble

STEPS = {"one": 11, "two": 23, "three": 0}
SEEDS = {"one": (5, 0, 9), "two": (1, 2, 3), "three": (7, 8, 6)}

Measured = Callable[[str, int], None]


def training(folder: Path, name: str, measured: Measured = lambda name, step: None) -> Training:
    """One of three, with two measurements."""
    networks, run = ensemble(SEEDS[name]), Run.resume(name, {}, out=folder / name)

    def measure(step: int) -> None:
        measured(name, step)
        with networks.evaluating() as model:
            run.metrics.append(step, "scale", model.output.weight.std().item())

    return Training(
        networks, run, STEPS[name], measure, (0, 8), checkpoint_seconds=60, keep_last=True
    )


def alone(folder: Path) -> None:
    for name in STEPS:
        one = training(folder, name)
        settings = {"measure": one.measure, "measure_at": one.measure_at, "keep_last": True}
        assert isinstance(one.trained, Ensemble)
        fit(one.trained, one.first_run, one.steps, checkpoint_seconds=60, **settings)


def assert_same(folder: Path, other: Path) -> None:
    for name in STEPS:
        runs = Run.open(folder / name), Run.open(other / name)
        assert rows(runs[0].metrics) == rows(runs[1].metrics)
        states = [run.checkpoints.latest().checkpoint for run in runs]
        assert states[0] is not None
        assert states[1] is not None
        assert states[0].step == states[1].step == STEPS[name]
        for key, array in states[0].arrays.items():
            assert array.tobytes() == states[1].arrays[key].tobytes()


def test_each_does_what_it_does_alone(tmp_path: Path) -> None:
    alone(tmp_path / "alone")
    turns: list[tuple[str, int]] = []
    trainings = [
        training(tmp_path / "together", name, lambda *one: turns.append(one)) for name in STEPS
    ]
    ended = fit_together(trainings)
    assert [one.step for one in ended] == list(STEPS.values())
    assert turns[:3] == [("one", 0), ("two", 0), ("three", 0)]
    assert sorted(turns[3:]) == [("one", 8), ("two", 8)]
    assert_same(tmp_path / "together", tmp_path / "alone")


def test_a_stop_saves_all_and_they_go_on(tmp_path: Path) -> None:
    def stop(name: str, step: int) -> None:
        if (name, step) == ("two", 8):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit_together([training(tmp_path / "together", name, stop) for name in STEPS])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    found = {name: Run.open(tmp_path / "together" / name).checkpoints.steps for name in STEPS}
    assert found["two"] == [8]
    assert found["one"]
    fit_together([training(tmp_path / "together", name) for name in STEPS])
    alone(tmp_path / "alone")
    assert_same(tmp_path / "together", tmp_path / "alone")


def test_an_error_of_one_ends_all_and_loses_no_line(tmp_path: Path) -> None:
    def fail(name: str, step: int) -> None:
        if (name, step) == ("one", 8):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fit_together([training(tmp_path, name, fail) for name in STEPS])
    logged = Run.open(tmp_path / "two").metrics.read("loss")["step"]
    assert set(logged.tolist()) == set(range(len(set(logged.tolist()))))
    assert 0 < len(set(logged.tolist())) < STEPS["two"]
    with Run.open(tmp_path / "two").locked():
        pass  # nobody holds it


def test_a_run_cannot_be_in_it_twice(tmp_path: Path) -> None:
    pair = [training(tmp_path, "one"), training(tmp_path, "one")]
    with pytest.raises(ValueError, match="must each have a run of their own"):
        fit_together(pair)


def words(seeds: tuple[int, ...], layers: int) -> Ensemble:
    """Language models of Fig. 6: with few words this would not fail where graphs share a stream."""
    text = torch.randint(28782, (20, 3501), generator=torch.Generator().manual_seed(0)).cuda()
    weights = torch.full((20, 35), 1 / 700, device="cuda")
    places = torch.arange(36, device="cuda")
    model = LanguageModel(LanguageConfig(28782, layers), seeds, device="cuda")
    return Ensemble(
        model,
        StackedAdam(model.named_parameters(), 1e-3, clip=0.5),
        lambda step: text.index_select(1, places + 35 * (step % 100)),
        loss=lambda model, window, step: model.losses(
            window[:, :-1], window[:, 1:], weights_BT=weights, step=step
        ),
        precision="bfloat16",
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_of_a_gpu(tmp_path: Path) -> None:
    made: dict[str, Callable[[], Ensemble]] = {
        "small": lambda: ensemble(SEEDS["one"], device="cuda", precision="float32"),
        "one": lambda: words((1, 2, 3), 1),
        "two": lambda: words((4, 5, 6), 2),
        "three": lambda: words((7, 8, 9), 2),
    }

    def trained(names: Iterable[str], folder: str) -> dict[str, list[float]]:
        paths = {name: tmp_path / folder / name for name in names}
        runs = {name: Run.resume(name, {}, out=path) for name, path in paths.items()}
        fit_together([Training(made[name](), run, 600) for name, run in runs.items()])
        return {name: run.metrics.read("loss")["value"].tolist() for name, run in runs.items()}

    together = trained(made, "together")
    for name in made:
        assert trained([name], "alone")[name] == together[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_are_all_different() -> None:
    device = torch.device("cuda")
    streams = _different([device] * 20)
    assert len({stream.cuda_stream for stream in streams}) == 20
    with pytest.raises(ValueError, match="trainings of one GPU must be 32 at most"):
        _different([device] * 33)
