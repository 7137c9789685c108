"""Small registries in the place of the real ones."""

import os
from pathlib import Path

import pytest

import joma
import joma.experiments
from joma.experiments import claims
from joma.experiments._experiment import Experiment, Outcome
from joma.experiments.claims import Claim, Measurement
from joma.runs import Run


def difference(formula, _) -> Measurement:
    return Measurement(abs(formula() - 2.0), 1e-6)


def make_claims() -> tuple[Claim, ...]:
    return (
        Claim("right", "two", "JoMA Eqn 1", "by hand", lambda: 2.0, difference),
        Claim(
            "misprinted",
            "two",
            "JoMA Eqn 2",
            "by hand",
            lambda: 2.0,
            difference,
            printed=lambda: 3.0,
            erratum="print says three.",
        ),
        Claim("ours", "two", "new", "by hand", lambda: 2.0, difference),
    )


def make_experiment(name: str, agrees: bool = True, reproduce=None) -> Experiment:
    def default(run: Run, seed: int) -> Outcome:
        run.write_figure("picture.png", b"png")
        run.write_table("curve", {"value": [float(seed)]})
        return Outcome(agrees, f"seen with seed {seed}.")

    return Experiment(name, f"Picture {name}", "was seen.", reproduce or default)


@pytest.fixture
def few_claims(monkeypatch) -> tuple[Claim, ...]:
    few = make_claims()
    monkeypatch.setattr(claims, "CLAIMS", few)
    return few


@pytest.fixture
def few_experiments(monkeypatch) -> dict[str, Experiment]:
    few = {
        "fig2": make_experiment("fig2"),
        "fig4": make_experiment("fig4"),
        "fig9": make_experiment("fig9", agrees=False),
    }
    monkeypatch.setitem(vars(joma.experiments), "EXPERIMENTS", few)
    return few


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    source = str(Path(joma.__file__).parents[1])  # for processes, wherever they start
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv(
        "PYTHONPATH", source if inherited is None else os.pathsep.join([source, inherited])
    )
