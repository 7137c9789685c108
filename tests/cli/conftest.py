"""Small registries in the place of the real ones."""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import joma
import joma.experiments
from joma.experiments import Experiment, Option, Outcome, Request, Scale, Verdict, claims
from joma.experiments.claims import Claim, ClaimMeasurement, errata
from joma.runs import Run
from tests.cli._command import joma as joma_

joma_("--version")  # reads the experiments before a test puts others in their place


def difference(formula, _) -> ClaimMeasurement:
    return ClaimMeasurement(abs(formula() - 2.0), 1e-6)


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
        ),
        Claim("ours", "two", "new", "by hand", lambda: 2.0, difference),
    )


def make_experiment(
    name: str, verdict: Verdict = Verdict.AGREES, reproduce=None, **fields
) -> Experiment:
    def default(run: Run, request: Request) -> Outcome:
        run.write_figure("picture.png", b"png")
        run.write_table("curve", {"value": [float(request.seed)]})
        return Outcome(verdict, f"seen with seed {request.seed}.")

    return Experiment(name, f"Picture {name}", "was seen.", reproduce or default, **fields)


def make_trained(name: str, reproduce=None, **fields) -> Experiment:
    """An experiment with scales, options and groups, which goes on where it was stopped."""

    def default(run: Run, request: Request) -> Outcome:
        run.write_table("curve", {"value": [request.options["learning-rate"]]})
        words = (request.scale, request.device, *request.groups)
        return Outcome(Verdict.AGREES, f"trained {' '.join(words)}.")

    settings = {
        "scales": {
            "tiny": Scale(8, "2 CPU cores", "1 GB"),
            "small": Scale(240, "2 CPU cores", "2 GB"),
            "full": Scale(9000, "an H200", "20 GB"),
        },
        "default_scale": "small",
        "options": (
            Option("learning-rate", 1e-5, "step size", published=(1e-5, 1e-4)),
            Option("hidden", 4096, "hidden nodes", int, published=(4096, 400)),
        ),
        "groups": ("C20", "C30", "C50"),
        "resumable": True,
    }
    return make_experiment(name, reproduce=reproduce or default, **{**settings, **fields})


def make_erratum(name: str, root: str = "", document: str = errata.PREPRINT) -> errata.Erratum:
    return errata.Erratum(
        name,
        "Eqn 2: three for two",
        document,
        "Eqn 2",
        "three",
        "two",
        "By counting.",
        "None.",
        "a number",
        "one case",
        lambda: 0.5,
        ("misprinted",),
        root,
    )


@pytest.fixture
def few_claims(monkeypatch) -> tuple[Claim, ...]:
    few = make_claims()
    monkeypatch.setattr(claims, "CLAIMS", few)
    # As `list_claims` would read them, also after a test puts others there.
    monkeypatch.setattr(joma.experiments, "list_claims", lambda: claims.CLAIMS)
    listed = (
        make_erratum("eqn-2-three"),
        make_erratum("eqn-3-three", root="eqn-2-three"),
        make_erratum("slide-three", root="eqn-2-three", document=errata.TALK),
    )
    monkeypatch.setattr(errata, "ERRATA", listed)
    # The tour trains for seconds; what it prints of that has a test of its own.
    found = importlib.util.find_spec

    def without_transformers(name: str, *_: object):
        return None if name == "transformers" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_transformers)
    return few


@pytest.fixture
def few_experiments(monkeypatch) -> dict[str, Experiment]:
    few = {
        "fig2": make_experiment("fig2"),
        "fig4": make_experiment("fig4"),
        "fig9": make_experiment("fig9", Verdict.DIFFERS),
    }
    monkeypatch.setitem(vars(joma.experiments), "EXPERIMENTS", few)
    return few


@pytest.fixture
def trained(few_experiments) -> Experiment:
    few_experiments["table1"] = make_trained("table1")
    return few_experiments["table1"]


@pytest.fixture
def gpus(monkeypatch) -> list[str]:
    """The GPUs that torch sees; none."""
    found: list[str] = []
    cuda = SimpleNamespace(is_available=lambda: bool(found))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return found


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    source = str(Path(joma.__file__).parents[1])  # for processes, wherever they start
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv(
        "PYTHONPATH", source if inherited is None else os.pathsep.join([source, inherited])
    )
