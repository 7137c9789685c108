"""Fig. 6 and 8 made with the smallest networks: runs, going on, taking over, recorded curves."""

import dataclasses
import signal

import numpy as np
import pytest

from joma.experiments import EXPERIMENTS, Verdict, fig6, fig8
from joma.experiments.language import _curves, _groups, _train, figure
from joma.experiments.language._curves import collect
from joma.experiments.language._groups import DEPTHS, SIZES, UNIFORM, Size
from joma.runs import Run, compare_metrics
from tests.experiments._language import FULL, SIZE, depths, rates, write_reference


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def smallest(monkeypatch) -> Size:
    monkeypatch.setitem(_groups.SIZES, "tiny", SIZE)
    return SIZE


def test_tiny_run_of_both(tmp_path):
    every = [Run.create(name, {}, out=tmp_path / name) for name in ("fig6", "fig8")]
    request = fig6.EXPERIMENT.request(scale="tiny")
    outcome = fig6.EXPERIMENT.reproduce(every[0], request)
    assert outcome.verdict is Verdict.NOT_COMPARABLE, outcome.finding
    assert [path.name for path in every[0].figures] == ["fig6.png", "fig6.svg"]
    columns = every[0].read_table("curves")
    setting = _train.load(SIZES["tiny"]).setting
    assert set(columns["step"]) == set(setting.published_steps)
    assert set(columns["depth"]) == set(DEPTHS)
    assert set(columns["learning_rate"]) == {setting.size.learning_rate}
    for name in ("attention_entropy", "attention_entropy_mean"):
        assert (np.array(columns[name]) > 0).all()
        assert (np.array(columns[name]) <= UNIFORM + 1e-4).all()
    assert (np.array(columns["stable_rank"]) >= 1 - 1e-3).all()

    progress: list[str] = []
    request = fig8.EXPERIMENT.request(scale="tiny", progress=lambda what, *_: progress.append(what))
    fig8.EXPERIMENT.reproduce(every[1], request)
    assert not progress  # nothing was trained: it was there
    groups = [Run.open(run.path / "groups" / "depth-5") for run in every]
    assert groups[1].read_json("outcome")["taken_from"] == str(groups[0].path)
    own, other = (
        collect(run, setting, ["depth-5"])[5, setting.size.learning_rates[0]] for run in every
    )
    np.testing.assert_array_equal(own.entropy, other.entropy)
    assert set(every[1].read_table("curves")["learning_rate"]) == set(setting.size.learning_rates)


class TestTakingOver:
    @staticmethod
    def trained(folder, name: str, size: Size, seed: int = 0) -> Run:
        """A run of one of the two, with the networks that both show."""
        run = Run.create(name, {}, out=folder / name)
        request = EXPERIMENTS[name].request(scale="tiny", seed=seed)
        others = {"fig6": "fig8", "fig8": "fig6"}
        _train.train_groups(run, ["depth-5"], _train.load(size), request, (others[name],))
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


def test_a_run_stopped_in_an_epoch_goes_on_to_the_same_numbers(tmp_path, smallest, monkeypatch):
    text = _train.load(smallest)
    request = fig6.EXPERIMENT.request(scale="tiny")
    runs = [Run.create("fig6", {}, out=tmp_path / name) for name in ("one", "two")]
    measure = _train.LanguageNetworks.measure

    def stop(self, step: int) -> None:
        measure(self, step)
        if step == 3:  # counted 2: the short window that ends an epoch is trained on too
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as stopped:
        stopped.setattr(_train.LanguageNetworks, "measure", stop)
        with pytest.raises(KeyboardInterrupt):
            _train.train_groups(runs[0], ["depth-2"], text, request, ())
    assert not collect(runs[0], text.setting, ["depth-2"])
    assert Run.open(runs[0].path / "groups" / "depth-2").checkpoints.latest().checkpoint is not None
    logs = []
    for run in runs:
        _train.train_groups(run, ["depth-2"], text, request, ())
        log = Run.open(run.path / "groups" / "depth-2").metrics.read()
        logs.append([log[key] for key in ("step", "name", "layer", "member", "value")])
    for one, two in zip(*logs, strict=True):
        np.testing.assert_array_equal(one, two)


def test_updates_at_which_networks_are_apart_are_counted(tmp_path, smallest, monkeypatch):
    run = Run.create("fig6", {}, out=tmp_path / "fig6")
    fig6.EXPERIMENT.reproduce(run, fig6.EXPERIMENT.request(scale="tiny", groups=["depth-5"]))
    log = Run.open(run.path / "groups" / "depth-5").metrics.read("loss")
    seen = {
        (s, m): v for s, m, v in zip(*(log[k] for k in ("step", "member", "value")), strict=True)
    }
    updates = sorted({step for step, _ in seen})
    far = [abs(seen[step, 2] - seen[step, 3]) / 2 for step in updates]  # from the middle of two
    monkeypatch.setattr(_curves, "MAX_LOSS_GAP", sorted(far)[2])
    found = collect(run, _train.load(SIZE).setting, ["depth-5"])[5, SIZE.learning_rates[1]]
    assert found.apart == pytest.approx((len(far) - 3) / len(far))


class TestShareApart:
    """Four networks that read the same words, over ten updates."""

    losses = np.linspace(6, 4, 10)[:, None] + np.array([0.0, 0.05, -0.05, 0.1])

    def test_healthy_networks_are_never_apart(self):
        assert _curves.share_apart(self.losses) == 0
        near = self.losses.copy()
        near[3, 1] += 0.2
        assert _curves.share_apart(near) == 0

    @pytest.mark.parametrize("wrong", [0.5, -0.5, 5.0, np.inf, -np.inf, np.nan])
    def test_one_that_is_wrong_is_counted(self, wrong: float):
        spoilt = self.losses.copy()
        spoilt[7:, 2] += wrong
        assert _curves.share_apart(spoilt) == pytest.approx(0.3)

    def test_one_that_is_nan_hides_no_other(self):
        spoilt = self.losses.copy()
        spoilt[8:, 0] = np.nan
        spoilt[2:, 3] += 1.0
        assert _curves.share_apart(spoilt) == pytest.approx(0.8)

    def test_where_all_are_nan_nothing_is_compared(self):
        spoilt = self.losses.copy()
        spoilt[5:] = np.nan
        assert _curves.share_apart(spoilt) == 0
        assert _curves.share_apart(np.full((3, 2), np.nan)) == 0


def test_recorded_curves_are_read_before_anything_is_trained(tmp_path, smallest):
    run = Run.create("fig6", {}, out=tmp_path / "fig6")
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"^reference .*cannot be read"):
        fig6.EXPERIMENT.reproduce(run, fig6.EXPERIMENT.request(scale="tiny", reference=folder))
    assert not (run.path / "groups").exists()


def test_recorded_curves_are_not_compared_with_a_smaller_size(tmp_path, smallest):
    run = Run.create("fig8", {}, out=tmp_path / "fig8")
    folder = write_reference(tmp_path / "r", rates())
    outcome = fig8.EXPERIMENT.reproduce(
        run, fig8.EXPERIMENT.request(scale="tiny", reference=folder)
    )
    assert outcome.paragraphs[-1].startswith("The recorded curves are those of WikiText-2 at the ")
    assert "comparison" not in run.tables


def test_comparison_of_the_full_size_keeps_numbers_alone(tmp_path, monkeypatch):
    text = _train.load(SIZE)
    full = dataclasses.replace(text, setting=FULL)
    monkeypatch.setattr(_train, "load", lambda size: full)
    monkeypatch.setattr(_train, "train_groups", lambda *_: None)
    monkeypatch.setattr(figure, "collect", lambda *_: depths())
    run = Run.create("fig6", {}, out=tmp_path / "fig6")
    folder = write_reference(tmp_path / "r", depths())
    outcome = fig6.EXPERIMENT.reproduce(
        run, fig6.EXPERIMENT.request(scale="full", reference=folder)
    )
    assert outcome.agrees
    assert outcome.paragraphs[-1].startswith("Next to the recorded curves: ")
    assert len(run.read_table("comparison")["pearson"]) == 18
    assert [check["holds"] for check in run.read_json("summary")["comparison"]] == [True] * 5
    assert not list(run.path.rglob("*.csv"))


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig6", "fig8"])
def test_small_run(tmp_path, name: str):
    run = Run.create(name, {}, out=tmp_path / name)
    outcome = EXPERIMENTS[name].reproduce(run, EXPERIMENTS[name].request(scale="small"))
    assert outcome.verdict is Verdict.NOT_COMPARABLE, outcome.finding


def test_which_networks_leave_a_gpu_idle():
    assert [_train._can_share_gpu(FULL, depth) for depth in DEPTHS] == [True, True, False, True]
    wide = dataclasses.replace(FULL, words=226_000)
    assert not any(_train._can_share_gpu(wide, depth) for depth in DEPTHS)
