"""Fig. 6 and 8 made with the smallest networks: runs, going on, taking over, recorded curves."""

import dataclasses

import numpy as np
import pytest

from joma.experiments import EXPERIMENTS, Verdict, language
from joma.experiments.language import (
    FIG6,
    FIG8,
    SIZES,
    UNIFORM,
    LanguageSize,
    curves,
    training,
)
from joma.experiments.language.curves import collect
from joma.runs import Run, compare_metrics
from tests.experiments._language import SIZE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def smallest(monkeypatch) -> LanguageSize:
    monkeypatch.setitem(language.SIZES, "tiny", SIZE)
    return SIZE


def test_both_show_the_same_networks(tmp_path):
    six, eight = (Run.create(name, {}, out=tmp_path / name) for name in ("fig6", "fig8"))
    FIG6.reproduce(six, FIG6.request(scale="tiny", groups=["depth-5"]))
    columns = six.read_table("curves")
    made = training.load(SIZES["tiny"]).setting
    assert set(columns["step"]) == set(made.published_steps)
    assert set(columns["learning_rate"]) == {made.size.learning_rate}
    for name in ("attention_entropy", "attention_entropy_mean"):
        assert (np.array(columns[name]) > 0).all()
        assert (np.array(columns[name]) <= UNIFORM + 1e-4).all()
    assert (np.array(columns["stable_rank"]) >= 1 - 1e-3).all()

    progress: list[str] = []
    request = FIG8.request(scale="tiny", progress=lambda what, *_: progress.append(what))
    outcome = FIG8.reproduce(eight, request)
    assert outcome.verdict is Verdict.NOT_COMPARABLE, outcome.finding
    assert not progress  # nothing was trained: it was there
    groups = [Run.open(run.path / "groups" / "depth-5") for run in (six, eight)]
    assert groups[1].read_json("outcome")["taken_from"] == str(groups[0].path)
    assert set(eight.read_table("curves")["learning_rate"]) == set(made.size.learning_rates)


class TestTakingOver:
    @staticmethod
    def trained(folder, name: str, size: LanguageSize, seed: int = 0) -> Run:
        """A run of one of the two, with the networks that both show."""
        run = Run.create(name, {}, out=folder / name)
        request = EXPERIMENTS[name].request(scale="tiny", seed=seed)
        others = {"fig6": "fig8", "fig8": "fig6"}
        training.train_groups(run, ["depth-5"], training.load(size), request, (others[name],))
        return Run.open(run.path / "groups" / "depth-5")

    def test_either_takes_over_what_the_other_has(self, tmp_path):
        eight, six = (self.trained(tmp_path, name, SIZE) for name in ("fig8", "fig6"))
        assert six.read_json("outcome")["taken_from"] == str(eight.path)
        assert "taken_from" not in eight.read_json("outcome")
        difference = compare_metrics(six, eight)
        assert difference is not None
        assert difference.equal

    @pytest.mark.parametrize("other", [{"seed": 1}, {"size": dataclasses.replace(SIZE, width=10)}])
    def test_other_networks_are_left_alone(self, tmp_path, other):
        self.trained(tmp_path, "fig6", SIZE)
        eight = self.trained(tmp_path, "fig8", **{"size": SIZE, **other})
        assert "taken_from" not in eight.read_json("outcome")

    def test_so_are_those_that_are_not_done_or_damaged(self, tmp_path):
        six = self.trained(tmp_path, "fig6", SIZE)
        (six.path / "outcome.json").write_text("{")
        assert "taken_from" not in self.trained(tmp_path, "fig8", SIZE).read_json("outcome")


def test_updates_at_which_networks_are_apart_are_counted(tmp_path, smallest, monkeypatch):
    run = Run.create("fig6", {}, out=tmp_path / "fig6")
    FIG6.reproduce(run, FIG6.request(scale="tiny", groups=["depth-5"]))
    log = Run.open(run.path / "groups" / "depth-5").metrics.read("loss")
    seen = {
        (s, m): v for s, m, v in zip(*(log[k] for k in ("step", "member", "value")), strict=True)
    }
    updates = sorted({step for step, _ in seen})
    far = [abs(seen[step, 2] - seen[step, 3]) / 2 for step in updates]  # from the middle of two
    monkeypatch.setattr(curves, "MAX_LOSS_GAP", sorted(far)[2])
    found = collect(run, training.load(SIZE).setting, ["depth-5"])[5, SIZE.learning_rates[1]]
    assert found.share_apart == pytest.approx((len(far) - 3) / len(far))


class TestShareApart:
    """Four networks that read the same words, over ten updates."""

    losses = np.linspace(6, 4, 10)[:, None] + np.array([0.0, 0.05, -0.05, 0.1])

    def test_healthy_networks_are_never_apart(self):
        assert curves.share_apart(self.losses) == 0
        near = self.losses.copy()
        near[3, 1] += 0.2
        assert curves.share_apart(near) == 0

    @pytest.mark.parametrize("wrong", [0.5, -0.5, 5.0, np.inf, -np.inf, np.nan])
    def test_one_that_is_wrong_is_counted(self, wrong: float):
        spoilt = self.losses.copy()
        spoilt[7:, 2] += wrong
        assert curves.share_apart(spoilt) == pytest.approx(0.3)


def test_no_other_experiment_takes_a_reference(tmp_path):
    for name, experiment in EXPERIMENTS.items():
        if name in ("fig6", "fig8"):
            assert experiment.request(reference=tmp_path).reference == tmp_path
            assert "reference" not in experiment.request(reference=tmp_path).config
            with pytest.raises(ValueError, match="reference must be a folder"):
                experiment.request(reference=tmp_path / "none")
        else:
            with pytest.raises(ValueError, match=f"^reference must not be given for {name}"):
                experiment.request(reference=tmp_path)
