"""The evidence for findings: its halves, its files, and what judging prints."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.findings import ARCHITECTURES, KINDS, split
from benchmarks.findings._case import NOTES, Case
from benchmarks.findings._cases import BEST, RECIPES, healthy, planted, small, sweep
from benchmarks.findings._judge import judge_half, truth_of, wilson
from benchmarks.findings._store import Stored, read_all, store

from joma.runs import Run
from joma.train.findings import series_of

pytest.importorskip("transformers")

SHORT = 24


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.findings._train import train

    folder = tmp_path_factory.mktemp("evidence")
    every = {case.name: case for case in planted(BEST) + healthy(BEST)}
    for name in ("healthy-000-llama-best", "sick-gpt2-nan-0", "sick-encoder-frozen-2"):
        case = replace(every[name], steps=SHORT, width=16, layers=3)
        train(case, folder)
    skipped = every["healthy-001-llama-best"]
    run = Run.create("case", {}, out=folder / skipped.name)
    store(run, skipped, {"skipped": "not needed"})
    return folder


def test_there_are_22_sick_variants_in_every_architecture_and_seed() -> None:
    cases = planted(BEST)
    sick = {case.variant for case in cases if case.state == "sick"}
    assert len(sick) == 22
    assert sick == set(KINDS) - set(NOTES)
    counts = Counter(case.variant for case in cases)
    assert all(counts[name] == 15 for name in KINDS if name != "rank_gate")
    assert counts["rank_gate"] == 6


def test_names_are_unique() -> None:
    names = [case.name for case in sweep() + planted(BEST) + healthy(BEST)]
    assert len(set(names)) == len(names)
    assert len({case.name for case in small()}) == len(small())


def test_gpt2_and_one_seed_and_half_of_the_healthy_are_held_out() -> None:
    cases = planted(BEST)
    assert {split(case) for case in cases if case.architecture == "gpt2"} == {"held out"}
    others = [case for case in cases if case.architecture != "gpt2"]
    assert {case.seed for case in others if split(case) == "held out"} == {2}
    assert {case.seed for case in others if split(case) == "choose"} == {0, 1}


@pytest.mark.parametrize("half", ["choose", "held out"])
def test_both_halves_have_every_recipe_of_every_other_architecture(half: str) -> None:
    runs = [case for case in healthy(BEST) if split(case) == half]
    assert len(runs) >= 60
    there = {(case.architecture, case.variant) for case in runs}
    wanted = {(name, recipe) for name in ARCHITECTURES for recipe in RECIPES if name != "gpt2"}
    assert wanted <= there


def test_healthy_runs_are_different() -> None:
    facts = [asdict(case) | {"number": 0, "variant": ""} for case in healthy(BEST)]
    assert len({json.dumps(one) for one in facts}) == len(facts)


def test_a_folder_holds_the_series_of_its_case(trained: Path) -> None:
    (stored,) = read_all(trained, Case("llama", "best", "healthy").name)
    assert stored.case.steps == SHORT
    series = {one.name: one for one in series_of(stored.columns) if one.layer is None}
    assert len(series["loss"].values) == SHORT
    assert len(series["validation_loss"].values) == 12  # every second step of 24
    assert series["validation_loss"].values[-1] == pytest.approx(
        stored.facts["validation_loss"], rel=1e-6
    )


def test_nan_survives(trained: Path) -> None:
    (stored,) = read_all(trained, Case("gpt2", "nan", "sick").name)
    loss = next(one for one in series_of(stored.columns) if one.name == "loss")
    assert np.isnan(loss.values[-1])
    assert np.isfinite(loss.values[0])


def test_judging_counts_each_half_and_names_what_was_not_trained(trained: Path) -> None:
    choose, held_out = (judge_half(trained, half) for half in ("choose", "held out"))
    assert choose["unclear"] == ["healthy-000-llama-best"]  # 24 steps are too few to learn
    assert held_out["false_alarms"]["total"] == 0
    assert held_out["sick"]["found"]["total"] == 2
    assert set(held_out["sick"]["by_variant"]) == {"nan", "frozen"}
    assert held_out["not_trained"] == ["healthy-001-llama-best: not needed"]


def test_judging_prints_json(trained: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.findings", "judge", str(trained)]
    done = subprocess.run([*command, "--half", "both"], capture_output=True, text=True, check=True)
    assert [one["half"] for one in json.loads(done.stdout)] == ["choose", "held out"]


def test_a_high_rate_that_does_not_end_worse_is_unclear() -> None:
    from benchmarks.findings._cases import Best

    best = BEST | {"llama": Best(1e-3, loss=2.0, spread=0.1)}
    case = next(one for one in planted(BEST) if one.name == "sick-llama-rate_3-0")
    for loss, state in ((2.05, "unclear"), (2.2, "sick"), (float("nan"), "sick")):
        assert truth_of(Stored(case, {"validation_loss": loss}, {}), best).state == state


def test_wilson_interval() -> None:
    # Newcombe (1998), Table I: 81 of 263 and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
