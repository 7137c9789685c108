"""Experiments that train networks, at their smallest: run folders, groups, and resuming."""

from typing import Any

import numpy as np
import pytest

from joma.experiments import EXPERIMENTS, Outcome, Verdict
from joma.runs import Run, compare_metrics

FOUND = {
    "table1": ("C20-N2", {"means", "seeds"}, {"table1", "table1-training"}),
    "table1-hblt": ("L2", {"every", "means", "seeds"}, {"table1-hblt", "table1-hblt-training"}),
    "hierarchy": ("token-1", {"heights", "seeds"}, {"hierarchy", "hierarchy-one-layer"}),
    "fig6": ("depth-2", {"curves"}, {"fig6"}),
}
"""One of the groups of each, its tables and its figures."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=FOUND)
def made(request, tmp_path_factory) -> tuple[str, Run, Outcome]:
    """All of an experiment, once."""
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOMA_CACHE", str(tmp_path_factory.mktemp("cache")))
        asked = EXPERIMENTS[name].request(scale="tiny")
        run = Run.create(name, asked.config, out=tmp_path_factory.mktemp("runs") / name)
        return name, run, EXPERIMENTS[name].reproduce(run, asked)


def group_of(run: Run, name: str) -> Run:
    return Run.open(run.path / "groups" / name)


def metrics_are_equal(one: Run, other: Run) -> bool:
    difference = compare_metrics(one, other)
    return difference is not None and difference.equal


def test_the_folder_holds_tables_figures_and_every_group(made):
    name, run, outcome = made
    _, tables, figures = FOUND[name]
    assert outcome.verdict is Verdict.NOT_COMPARABLE, outcome.finding
    assert set(run.tables) == tables
    assert {path.name for path in run.figures} == {
        f"{figure}.{kind}" for figure in figures for kind in ("png", "svg")
    }
    assert run.read_json("summary")["table"] == list(outcome.table)
    text = outcome.finding + " ".join(outcome.paragraphs) + str(outcome.table)
    assert " nan" not in text
    for group in EXPERIMENTS[name].groups:
        own = group_of(run, group)
        assert own.read_json("outcome")["status"] == "done"
        assert own.checkpoints.steps == []
        losses = own.metrics.read("loss")
        assert np.isfinite(losses["value"]).all()
        assert set(losses["member"]) == set(range(len(own.config["members"])))


def test_what_is_done_is_not_done_again(made):
    name, run, outcome = made
    progress: list[Any] = []
    before = {path: path.read_bytes() for path in run.path.rglob("metrics/*.parquet")}
    request = EXPERIMENTS[name].request(
        scale="tiny", progress=lambda *given: progress.append(given)
    )
    assert EXPERIMENTS[name].reproduce(run, request) == outcome
    assert not progress
    assert {path: path.read_bytes() for path in run.path.rglob("metrics/*.parquet")} == before


def test_a_group_alone_that_was_stopped_resumes_to_the_same_numbers(made, tmp_path):
    name, whole, _ = made
    experiment, (group, _, _) = EXPERIMENTS[name], FOUND[name]
    reports = 0

    def stop(*_: object) -> None:
        nonlocal reports
        reports += 1
        if reports == 2:
            raise KeyboardInterrupt

    run = Run.create(name, whole.config, out=tmp_path / name)
    with pytest.raises(KeyboardInterrupt):
        experiment.reproduce(run, experiment.request(scale="tiny", groups=[group], progress=stop))
    own = group_of(run, group)
    with pytest.raises(ValueError, match="outcome"):
        own.read_json("outcome")
    outcome = experiment.reproduce(run, experiment.request(scale="tiny", groups=[group]))
    assert outcome.verdict is Verdict.INCOMPLETE
    assert [one.name for one in (run.path / "groups").iterdir()] == [group]
    assert metrics_are_equal(group_of(run, group), group_of(whole, group))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOUND, "fig8"])
def test_small(name: str, tmp_path):
    run = Run.create(name, {}, out=tmp_path / name)
    outcome = EXPERIMENTS[name].reproduce(run, EXPERIMENTS[name].request(scale="small"))
    assert outcome.verdict is Verdict.NOT_COMPARABLE, outcome.finding
