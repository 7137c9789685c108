"""`fit`: other trainings are refused, errors lose nothing, how it measures, reports, ends."""

import importlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from joma.common.signals import TerminatedError
from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam
from joma.runs import Run
from joma.train import Ensemble, fit
from tests.runs._log import rows
from tests.train._child import MEASURED_AT, STEPS, Ended, file_of, train
from tests.train._small import CLASSES, DECAYS, RATES, SEEDS, ensemble, hierarchy
from tests.train._sound import Stop, snapshot

module = importlib.import_module("joma.train.loop")


# Other trainings


def other(
    seeds: tuple[int, ...] = SEEDS,
    rates: tuple[float, ...] = RATES,
    decays: tuple[float, ...] = DECAYS,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Ensemble:
    """The small ensemble but for what is said."""
    config: dict[str, Any] = {"layers": 2, "width": 16, "hidden": 32, **changes}
    model = Transformer(TransformerConfig(21, CLASSES, **config), seeds, dtype=dtype)
    optimizer = StackedAdam(model.named_parameters(), rates, decays, betas=betas, epsilon=epsilon)
    data = hierarchy(seeds)
    precision = str(dtype).removeprefix("torch.")
    return Ensemble(model, optimizer, lambda step: data.distinct(128, step), precision=precision)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seeds": ({"seeds": (5, 0, 8)}, r"must have seeds [5, 0, 9], .* got seeds [5, 0, 8]"),
    "members": (
        {"seeds": SEEDS[:2], "rates": RATES[:2], "decays": DECAYS[:2]},
        "must have seeds [5, 0, 9] and learning_rates [0.001, 0.003, 0.01] and .* got seeds [5, 0]",
    ),
    "width": ({"width": 24}, "must have width 16, .* got width 24"),
    "precision": ({"dtype": torch.float32}, "must have precision float64, .* got precision float3"),
    "rates": (
        {"rates": (1e-3, 3e-3, 2e-2)},
        "must have learning_rates [0.001, 0.003, 0.01], .* got learning_rates [0.001, 0.003, 0.02]",
    ),
    "decays": ({"decays": (0.0, 0.0, 0.0)}, "must have weight_decays [0.0001, 0.0, 0.01], as in"),
    "betas": ({"betas": (0.9, 0.99)}, "must have betas [0.9, 0.999], .* got betas [0.9, 0.99]"),
    "epsilon": ({"epsilon": 1e-6}, "must have epsilon 1e-08, .* got epsilon 1e-06"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_training_is_not_resumed(begun: Path, what: str):
    changes, expected = OTHERS[what]
    run, before = Run.open(begun), snapshot(begun)
    pattern = re.escape(f"ensemble {expected}").replace(r"\.\*", f".*{file_of(begun, 13)}.*")
    with pytest.raises(ValueError, match=f"^{pattern}") as refusal:
        fit(other(**changes), run, STEPS)
    assert "\n" not in str(refusal.value)
    assert snapshot(begun) == before


def test_fewer_steps_than_were_made_are_refused(begun: Path):
    before = snapshot(begun)
    with pytest.raises(ValueError, match=r"^steps must be at least 13, after which .*, got 12$"):
        fit(ensemble(), Run.open(begun), 12)
    assert snapshot(begun) == before


def test_networks_that_were_trained_need_a_checkpoint(folder: Path):
    trained = ensemble()
    train(folder, 6, trained=trained, checkpoint_seconds=60, keep_last=False)
    before = snapshot(folder)
    with pytest.raises(ValueError, match=r"^ensemble must be untrained, .*, got one after 6 steps"):
        fit(trained, Run.open(folder), STEPS)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": -1}, "steps must be a whole number ≥ 0, got -1"),
        ({"steps": 1.5}, "steps must be a whole number ≥ 0, got 1.5"),
        ({"measure_at": [0, -1]}, "measure_at must be whole numbers ≥ 0, got -1"),
        ({"measure_at": [0.5]}, "measure_at must be whole numbers ≥ 0, got 0.5"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds must be ≥ 0, got -1.0"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds must be ≥ 0, got nan"),
    ],
)
def test_bad_arguments_are_refused(begun: Path, bad: dict[str, Any], message: str):
    before = snapshot(begun)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(ensemble(), Run.open(begun), **{"steps": STEPS, **bad})
    assert snapshot(begun) == before


# Stopped by an error


def losses_until(straight: Path, step: int) -> list[Any]:
    return [row for row in rows(Run.open(straight).metrics) if row[2] == "loss" and row[0] < step]


def measured_until(straight: Path, step: int) -> list[Any]:
    return [row for row in rows(Run.open(straight).metrics) if row[2] != "loss" and row[0] <= step]


def check_log(folder: Path, straight: Path, losses: int, measured: int) -> None:
    """The log holds the losses of so many steps and the measurements up to one, no more."""
    log = rows(Run.open(folder).metrics)
    assert [row for row in log if row[2] == "loss"] == losses_until(straight, losses)
    assert [row for row in log if row[2] != "loss"] == measured_until(straight, measured)


def test_ctrl_c_saves_before_it_ends(straight: Path, folder: Path, caplog):
    """And the next one, while it saves, would not wait."""

    def press(done: int, _: int) -> None:
        if done == 6:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(folder, progress=press, checkpoint_seconds=60.0)
    assert signal.getsignal(signal.SIGINT) is before
    assert Run.open(folder).checkpoints.steps == [6]
    check_log(folder, straight, losses=6, measured=6)
    assert train(folder).begun_at == 6
    assert Ended.of(folder) == Ended.of(straight)
    assert not caplog.messages


def test_sigterm_saves_before_it_ends(straight: Path, folder: Path):
    """Schedulers may send it more than once."""

    def terminate(done: int, _: int) -> None:
        if done == 6:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError):
        train(folder, progress=terminate, checkpoint_seconds=60.0)
    assert signal.getsignal(signal.SIGTERM) is before
    assert Run.open(folder).checkpoints.steps == [6]
    check_log(folder, straight, losses=6, measured=6)
    assert train(folder).begun_at == 6
    assert Ended.of(folder) == Ended.of(straight)


def test_signals_are_left_alone_in_another_thread(straight: Path, folder: Path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=train, args=(folder,))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert Ended.of(folder) == Ended.of(straight)


@pytest.mark.parametrize("when", ["measure", "progress"])
def test_ctrl_c_at_the_very_end_is_not_lost(straight: Path, folder: Path, when: str):
    def press(done: int, _: int = STEPS) -> None:
        if done == STEPS:
            signal.raise_signal(signal.SIGINT)

    pressed: dict[str, Any] = {"measured" if when == "measure" else "progress": press}
    with pytest.raises(KeyboardInterrupt):
        train(folder, checkpoint_seconds=60.0, keep_last=False, **pressed)
    check_log(folder, straight, losses=STEPS, measured=STEPS)
    assert train(folder).begun_at == STEPS  # nothing is made again
    assert Ended.of(folder) == Ended.of(straight)


def test_a_measurement_that_fails_loses_nothing_that_was_logged(straight: Path, folder: Path):
    def fail(step: int) -> None:
        if step == 13:
            raise Stop

    with pytest.raises(Stop):
        train(folder, measured=fail, checkpoint_seconds=60)
    half = [row for row in measured_until(straight, 13) if row[0] == 13 and row[5] == 0]
    log = rows(Run.open(folder).metrics)
    assert len(half) == len(SEEDS)
    assert [row for row in log if row[0] == 13] == half
    assert [row for row in log if row[2] == "loss"] == losses_until(straight, 13)
    assert [row for row in log if row[2] != "loss"] == [*measured_until(straight, 12), *half]
    train(folder)
    assert Ended.of(folder) == Ended.of(straight)


# Measurements, progress, and how it ends


def test_measurements_and_progress(folder: Path):
    measured, reported = [], []
    train(folder, measured=measured.append, progress=lambda *both: reported.append(both))
    assert measured == list(MEASURED_AT)
    assert reported[-1] == (STEPS, STEPS)
    assert reported == sorted(set(reported))
    assert {at for at, _ in reported} >= {at for at in MEASURED_AT if at}
    assert {total for _, total in reported} == {STEPS}


def test_a_measure_at_the_step_it_goes_on_from_is_not_repeated(straight: Path, begun: Path):
    log = rows(Run.open(begun).metrics)
    assert [row for row in log if row[0] == 13 and row[2] == "loss"]  # logged, and comes again
    measured: list[int] = []
    assert train(begun, measured=measured.append).begun_at == 13
    assert measured == [at for at in MEASURED_AT if at > 13]
    assert Ended.of(begun) == Ended.of(straight)


def test_what_has_ended_is_left_alone(folder: Path):
    train(folder)
    before = snapshot(folder)

    def measure(step: int) -> None:
        pytest.fail(f"measured at {step}")

    ended = fit(ensemble(), Run.open(folder), STEPS, measure=measure, measure_at=MEASURED_AT)
    assert (ended.begun_at, ended.step) == (STEPS, STEPS)
    again = fit(ensemble(), Run.open(folder), STEPS, measure_at=MEASURED_AT, keep_last=True)
    assert (again.begun_at, again.step) == (STEPS, STEPS)
    assert snapshot(folder) == before


def test_without_checkpoints_it_starts_again(straight: Path, folder: Path):
    train(folder)
    Run.open(folder).checkpoints.clear()
    measured: list[int] = []
    assert train(folder, measured=measured.append).begun_at == 0
    assert measured == list(MEASURED_AT)
    assert Ended.of(folder) == Ended.of(straight)


def test_the_last_checkpoint_is_kept_where_asked(straight: Path, tmp_path: Path):
    train(tmp_path / "without", keep_last=False)
    steps = Run.open(tmp_path / "without").checkpoints.steps
    assert max(steps) < STEPS
    assert rows(Run.open(tmp_path / "without").metrics) == rows(Run.open(straight).metrics)
    train(tmp_path / "with", checkpoint_seconds=60)
    assert Run.open(tmp_path / "with").checkpoints.steps == [STEPS]
    assert Ended.of(tmp_path / "with") == Ended.of(straight)


def test_it_resumes_with_more_steps(straight: Path, folder: Path):
    measured: list[int] = []
    train(folder, 0, measured=measured.append)
    assert Run.open(folder).checkpoints.steps == [0]
    for steps in (13, 14, STEPS):
        ended = train(folder, steps, measured=measured.append, checkpoint_seconds=60)
        assert ended.step == steps
    assert measured == list(MEASURED_AT)
    assert ended.begun_at == 14
    assert Ended.of(folder) == Ended.of(straight)


def test_one_process_at_a_time(folder: Path):
    holding = (
        "import sys, time; from joma.runs import Run\n"
        "with Run.open(sys.argv[1]).locked(): print('locked', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holding, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="in use by another process"):
            fit(ensemble(), Run.open(folder), 3)
    finally:
        other.kill()
        other.communicate()
    assert fit(ensemble(), Run.open(folder), 3).step == 3
